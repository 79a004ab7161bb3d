"""`make serve-check` for drafters that need no training, against a stand-in for vLLM; tests/test_vllm.py has the real
one."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_serve_check import ENGINE
from tiny import call, load_target, plain_model, write_prompts, write_recipe, write_target
from tiny_run import EVAL, cycling_target

from data.chat import prompt_ids
from data.prompts import evaluation_prompts
from drafters.export import plain
from drafters.export.untrained import serving_config
from drafters.layer_cut import cut
from drafters.lookup import Options, Text, speculation
from drafters.registry import entry, options_of
from eval import run as eval_run
from eval import serve_check
from eval.decode import Decoder
from recipes.errors import RunError

FLAGS = ["--python", sys.executable]
KINDS = {"lookup": {"match": "first", "longest": 2}, "layer_cut": {"layers": 5}}


@pytest.fixture(scope="module", params=KINDS)
def base(request, tmp_path_factory):
    """An evaluated run of such a drafter, on a target that goes round or a random one, and what a right engine says."""
    kind, options = request.param, KINDS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    model = (cycling_target if kind == "lookup" else write_target)(folder / "model")
    texts = write_prompts(folder / "eval.jsonl", [f"{word} and {word} and {word}" for word in ("abc", "tea", "no")])
    recipe = write_recipe(folder / "r.yaml", model, drafter={"kind": kind, "options": options},
                          eval={**EVAL, "prompts": str(texts), "max_tokens": 12})
    assert call(eval_run.COMMAND, recipe) == 0
    target = load_target(model, "float32")
    drafter = entry(kind).code.build(options_of(kind, options), target, {}, 0)
    ids = [prompt_ids(target.tokenizer, p.messages) for p in evaluation_prompts(str(texts))[0]]
    outputs = Decoder(target, 12).speculative(ids, drafter, 3)
    right = {"answers": {str(i): o.tokens for i, o in zip(ids, outputs)}, "faults": {},
             "drafts": sum(o.acceptance.drafts for o in outputs),
             "accepted": [sum(o.acceptance.accepted[i] for o in outputs) for i in range(3)]}
    assert 0 < right["accepted"][0] <= right["drafts"]
    return SimpleNamespace(kind=kind, recipe=recipe, run=folder / "runs" / "tiny", model=model, target=target,
                           right=right)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENGINE))


def says(base, **more) -> None:
    told = {"lookup": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2},
            "layer_cut": {"method": "draft_model", "model": str(base.run / "serve" / "drafter")}}[base.kind]
    (base.model / "engine.json").write_text(json.dumps(base.right | {"told": told} | more))


def test_it_is_served_by_the_engines_own_method(base, capsys):
    """Cases 12, 50: vLLM is told the same draft; ids and acceptance are the report's, in process and over HTTP."""
    says(base)
    assert call(serve_check.COMMAND, base.recipe, *FLAGS) == 0, capsys.readouterr().err
    found = json.loads((base.run / "serve" / "report.json").read_text())
    report = json.loads((base.run / "eval" / "report.json").read_text())
    assert found["passed"] and found["greedy_equal"] and len(found["checks"]) == 2
    assert found["per_position_engine"] == report["total"]["acceptance"]["per_position"] == found["per_position_report"]
    name = {"lookup": "ngram", "layer_cut": "draft_model"}[base.kind]
    assert [row["layout"] for row in found["checks"]] == [name, name]
    for row in found["checks"]:
        assert row["drafts"] == row["drafts_report"] == report["total"]["drafts"]
    assert set(found["exports"][name]) >= ({"config.json", "model.safetensors"} if base.kind == "layer_cut" else set())


def test_what_fails(base, capsys):
    """Case 12: other acceptance, and as much of half the drafts, are no match; both are named."""
    half = {"drafts": base.right["drafts"] // 2, "accepted": [n // 2 for n in base.right["accepted"]]}
    for more, message in (({"accepted": [0, 0, 0]}, "the engine accepts [0.0, 0.0, 0.0] by position"),
                          (half, f"the engine drafted {half['drafts']} times, our loop {base.right['drafts']} times")):
        says(base, **more)
        assert call(serve_check.COMMAND, base.recipe, *FLAGS, "--http", "false") == 1
        assert message in capsys.readouterr().err


def test_a_report_of_another_drafter(base, capsys):
    """Cases 12, 36: the recipe's options, or its settings, are not those of the report: nothing is started."""
    says(base)
    other = {"lookup": ["--drafter.options.longest", "3"], "layer_cut": ["--drafter.options.layers", "4"]}[base.kind]
    for flags in (other, ["--eval.speed_prompts", "1"]):
        assert call(serve_check.COMMAND, base.recipe, *FLAGS, *flags) == 1
        assert "report.json: of another drafter than the recipe's" in capsys.readouterr().err


def test_what_vllm_would_draft_otherwise(base, capsys):
    """Case 12: the latest occurrence is none that vLLM continues, and a path names no other method than was meant."""
    says(base)
    if base.kind == "lookup":
        run = ["--name", "latest", "--drafter.options.match", "latest"]
        message = "drafter.options.match = latest: vLLM's ngram continues the first occurrence"
    else:
        run = ["--name", "EAGLE3-cut"]
        message = "vLLM takes 'eagle3' in a drafter's path for its method, and would not draft by draft_model"
    assert call(eval_run.COMMAND, base.recipe, *run) == 0
    capsys.readouterr()
    assert call(serve_check.COMMAND, base.recipe, *FLAGS, *run) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind,message", [
    ("suffix", "drafter.kind = suffix: vLLM's suffix decoding needs the package arctic-inference"),
    ("hybrid", "drafter.kind = hybrid: vLLM drafts by one method at a time"),
    ("fallback", "drafter.kind = fallback: vLLM drafts by one method at a time")])
def test_who_is_not_served_is_named_first(tmp_path, capsys, kind, message):
    """Before a report is asked for, a target loaded or an engine looked for."""
    recipe = write_recipe(tmp_path / "r.yaml", tmp_path / "nowhere", drafter={"kind": kind, "options": {}})
    assert call(serve_check.COMMAND, recipe, "--python", str(tmp_path / "none")) == 2
    assert message in capsys.readouterr().err


def test_the_config_is_the_exported_one():
    """What vLLM is told in the check is what `make export` writes."""
    values = {"match": "first", "longest": 4, "shortest": 2}
    told = speculation(SimpleNamespace(options=options_of("lookup", values)), 5, Path("nowhere"))
    assert serving_config("lookup", values, 5) == (told, [])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5))
def test_the_first_occurrence_as_vllm_defines_it(tokens, shortest, more, K):
    """Of the window's lengths the longest that occurred before, its earliest place, as far as the text goes: searched
    here place by place."""
    options = Options(longest=shortest + more, shortest=shortest, match="first")
    text = Text(options, tokens[0])
    text.add(tokens[1:])
    wanted = []
    for n in range(min(options.longest, len(tokens) - 1), shortest - 1, -1):
        places = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]]
        if places:
            wanted = tokens[places[0] + n : places[0] + n + K]
            break
    assert text.continuation(K) == wanted
    told = speculation(SimpleNamespace(options=options), K, Path("nowhere"))
    assert told == {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": shortest,
                    "prompt_lookup_max": shortest + more}


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_folder_is_the_model(tmp_path, tied, monkeypatch):
    """Case 03: written and read by transformers alone it computes the same; what does not read back leaves nothing, and
    what was there stays."""
    model = plain_model(write_target(tmp_path / "target"), torch.float32)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    small, out = cut(model, 6, [0, 1]), tmp_path / "out"
    plain.write_model(small, out)
    read, ids = plain_model(out, torch.float32), torch.tensor([[5, 9, 14]])
    assert read.config.num_hidden_layers == 2
    with torch.no_grad():
        assert torch.equal(read(ids).logits, small(ids).logits)
    before = load_file(out / "model.safetensors")

    def torn(folder) -> None:
        save_file({name: t + 1 for name, t in before.items()}, folder / "model.safetensors", {"format": "pt"})
        small.config.save_pretrained(folder)

    monkeypatch.setattr(small, "save_pretrained", torn)
    with pytest.raises(RunError, match="does not read back as it was written"):
        plain.write_model(small, out)
    assert load_file(out / "model.safetensors").keys() == before.keys() and list(tmp_path.glob(".out*")) == []
