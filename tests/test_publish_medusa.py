"""Medusa heads in both layouts: what `make publish` writes, and which of them a real engine is asked to serve."""

import json
import sys
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
from fake_hub_uploads import TOKEN
from test_publish import PUBLISH, staged
from tiny import call
from tiny_medusa import FORMATS, medusa_run

from drafters.export.layouts import LAYOUTS
from eval import doctor, publish, serve_check, ship
from eval import run as eval_run
from recipes.errors import RunError
from recipes.files import sha256_file


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    made = medusa_run(tmp_path_factory.mktemp("publish"), {"draft_vocab_size": 0})
    assert call(ship.COMMAND, made.recipe, *FORMATS) == 0 == call(eval_run.COMMAND, made.recipe)
    return made


@pytest.mark.parametrize("layout", ["medusa", "medusa-original"])
def test_dry_run_writes_the_heads_under_their_layouts_names(base, monkeypatch, capsys, layout):
    """The weights are the export's, byte for byte, and the only ones; the target has its public name; the card says
    nothing of positions, of which heads know none."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code = call(publish.COMMAND, base.recipe, *PUBLISH, "--format", layout, "--dry-run")
    assert code == 0, capsys.readouterr().err
    [weights] = staged(base).glob("*.safetensors")
    assert weights.name == LAYOUTS[layout].weights and weights.name in publish.OWNED
    assert sha256_file(weights) == sha256_file(base.run / "export" / layout / weights.name)
    config = json.loads((staged(base) / "config.json").read_text())
    assert config["drafthouse"]["target"]["model"] == "org/target"
    assert config.get("base_model_name_or_path", "org/target") == "org/target"
    card = (staged(base) / "README.md").read_text()
    assert "Labelled for" not in card and "| position 3 |" in card


def test_the_layout_is_the_recipes_unless_said(base, monkeypatch, capsys):
    """Without --format the first of export.formats is published, whatever the kind; a layout of another kind, and none,
    are refused by field; every layout can be named."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    flags = [*PUBLISH, "--dry-run"]
    assert set(get_args(get_type_hints(publish.Options)["format"])) == {"", *LAYOUTS}
    assert call(publish.COMMAND, base.recipe, *flags, "--export.formats", "[medusa-original, medusa]") == 0
    assert [path.name for path in staged(base).glob("*.safetensors")] == ["medusa_lm_head.safetensors"]
    assert json.loads((staged(base) / "provenance.json").read_text())["layout"] == "medusa-original"
    capsys.readouterr()
    for more, message in ((["--format", "native"], "--format = native: layouts of a drafter of kind medusa: medusa, "),
                          (["--export.formats", "[speculators]"], "export.formats[0] = speculators: layouts of"),
                          (["--export.formats", "[]"], "there is no export to publish")):
        assert call(publish.COMMAND, base.recipe, *flags, *more) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", [doctor, serve_check])
def test_what_vllm_does_not_load_is_not_served(base, module, monkeypatch, capsys):
    """Doctor and serve-check leave medusa-original out, in a line that says so; alone it is refused before an engine
    starts (case 47)."""
    asked = []

    def engine(python, job, threads, log):
        if job.speculation:
            asked.append((job.speculation["model"].rpartition("/")[2], job.speculation["method"]))
            raise RunError("far enough")
        return SimpleNamespace(tokens=[], engine={})

    monkeypatch.setattr(module, "offline", engine)
    flags = ["--python", sys.executable, "--export.formats"]
    assert call(module.COMMAND, base.recipe, *flags, "[medusa-original, medusa]") == 1
    out, err = capsys.readouterr()
    assert "far enough" in err and "vLLM does not load medusa-original: left out" in out
    assert asked == [("medusa", "medusa")]
    asked.clear()
    assert call(module.COMMAND, base.recipe, *flags, "[medusa-original]") == 2 and not asked
    assert "export.formats = ['medusa-original']: vLLM loads none of these" in capsys.readouterr().err
