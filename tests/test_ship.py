"""`make export` and `make eval --drafter.path`: one checkpoint in every layout, proven, and read back as a drafter."""

import fcntl
import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import LAYERS, call
from tiny_drafter import make_meta
from tiny_run import change_json, change_shard, roll_states, tiny_run

from drafters import checkpoint, imported
from drafters.export.native import native_config
from drafters.export.serving import Deployment, serving_files
from eval import run as eval_run
from eval import ship
from recipes.errors import ConfigError
from recipes.schema import Drafter

BOTH = ["--export.formats", "[native, speculators]"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("ship"))


@pytest.fixture(scope="module")
def shipped(base):
    """Both layouts, exported in one call."""
    assert call(ship.COMMAND, base.recipe, *BOTH) == 0
    return base.run / "export"


def test_one_call_writes_and_proves_every_layout(base, shipped, capsys):
    """Cases 12, 47, 50: both layouts pass the second reader, the proof names the files it is of and what each engine
    makes of them; a second call writes nothing, and --check checks once more."""
    before = {p: p.stat().st_mtime_ns for p in shipped.rglob("*")}
    for layout in ("native", "speculators"):
        proof = json.loads((shipped / f"{layout}-check.json").read_text())
        assert proof["files"] == ship.digests(shipped / layout) and proof["same_text"] == proof["prompts"] == 2
        assert proof["loop"] == proof["reader"] and 0 < proof["loop"][2] < proof["loop"][0] <= 1
        assert proof["engines"]["vllm"] == []
        assert proof["validation"]["replay"] == proof["validation"]["reader"] and proof["validation"]["drafts"] > 3
    assert "SGLang does not load the speculators layout" in proof["engines"]["sglang"][0]
    assert call(ship.COMMAND, base.recipe, *BOTH) == 0
    assert capsys.readouterr().out.count("exported before") == 2
    assert {p: p.stat().st_mtime_ns for p in shipped.rglob("*")} == before
    assert call(ship.COMMAND, base.recipe, *BOTH, "--check") == 0
    assert "checked: " in capsys.readouterr().out


def test_a_changed_export_is_made_again(base, shipped, capsys):
    """What was proven is these bytes: a file that changed afterwards is noticed, by --check too."""
    path = shipped / "native" / "model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    save_file(tensors | {"norm.weight": tensors["norm.weight"].neg()}, path)
    assert call(ship.COMMAND, base.recipe, "--check") == 1
    assert "norm.weight differs" in capsys.readouterr().err
    assert call(ship.COMMAND, base.recipe) == 0 and "exported: " in capsys.readouterr().out
    assert path.read_bytes() == whole


def test_an_export_that_serves_other_than_was_trained(base, monkeypatch, capsys):
    """Case 12: where the second reader accepts fewer tokens than our loop, nothing ships."""
    reading = ship.read_acceptance

    def fewer(*arguments):
        found = reading(*arguments)
        return replace(found, accepted_per_position=[a - 1 for a in found.accepted_per_position])

    monkeypatch.setattr(ship, "read_acceptance", fewer)
    flags = ["--export.dtype", "bfloat16", "--name", "other", "--drafter.path", str(base.checkpoint)]
    assert call(ship.COMMAND, base.recipe, *flags) == 1
    assert "independent reader accepts" in capsys.readouterr().err
    assert not (base.run.parent / "other" / "export" / "native-check.json").exists()


def test_validation_that_serving_does_not_reach(base, shipped, capsys):
    """Case 12: position 1 of validation is compared with what the exported files accept on the same rows. States that
    were captured one token off give another number in training than in serving: nothing ships."""
    files = [p for p in (base.run / "traces").rglob("*") if p.is_file()]
    before = {path: path.read_bytes() for path in files}
    change_shard(base.run, roll_states)
    try:
        assert call(ship.COMMAND, base.recipe, "--check") == 1
        err = capsys.readouterr().err
        assert "at position 1 validation accepts" in err and "make doctor` names the stage" in err
    finally:
        for path, content in before.items():
            path.write_bytes(content)
    assert call(ship.COMMAND, base.recipe, "--check") == 0


def test_a_precision_that_the_drafter_does_not_survive(base, tmp_path, capsys):
    """Case 48: the gate runs on the precision that is shipped: a head whose rows only float32 tells apart passes in
    float32 and is refused in bfloat16, though its tensors are the trained ones, rounded once."""
    meta = checkpoint.read_meta(base.checkpoint)
    tensors = base.drafter.tensors()
    checkpoint.save(tmp_path, tensors | {"lm_head.weight": tensors["lm_head.weight"] + 256}, {
        key: value for key, value in meta.items() if key != "format"})
    flags = ["--name", "rounded", "--drafter.path", str(tmp_path)]
    assert call(ship.COMMAND, base.recipe, *flags) == 0
    capsys.readouterr()
    assert call(ship.COMMAND, base.recipe, *flags, "--export.dtype", "bfloat16") == 1
    assert "independent reader accepts" in capsys.readouterr().err


def test_layers_that_the_target_has_not(base, shipped, tmp_path):
    """Case 04: a published drafter's layers are held against the target before it is tapped: the message names the
    folder and key, not the recipe's."""
    for path in (shipped / "native").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change_json(tmp_path / "config.json", lambda config: config.update(
        eagle_aux_hidden_state_layer_ids=[1, 2, 99], eagle_config={}))
    with pytest.raises(ConfigError, match=r"config.json: eagle_aux_.* = \[1, 2, 99\], but target.model .* 6 layers"):
        imported.chosen(Drafter(path=str(tmp_path)), base.run, base.target)
    assert base.target.layers == LAYERS


def test_a_published_drafter_is_converted_by_one_stage(base, shipped, tmp_path, monkeypatch):
    """Two stages that begin at once both want the checkpoint that is made of it."""
    real, made = imported.convert, []

    def convert(*args):
        with open(tmp_path / "imported" / ".lock", "wb") as f, pytest.raises(BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.append(real(*args))

    monkeypatch.setattr(imported, "convert", convert)
    section = Drafter(path=str(shipped / "native"))
    assert imported.chosen(section, tmp_path, base.target) == imported.chosen(section, tmp_path, base.target)
    assert len(made) == 1


def test_a_gate_that_compares_nothing(base, capsys):
    """Case 12: answers of one token have no drafts, which agree on everything."""
    flags = ["--name", "few", "--drafter.path", str(base.checkpoint), "--export.check_tokens", "1"]
    assert call(ship.COMMAND, base.recipe, *flags) == 1
    assert "nothing was compared" in capsys.readouterr().err


def test_a_drafter_is_not_evaluated_beyond_its_positions(base, shipped, tmp_path, capsys):
    """Case 33: a published drafter that is labelled for few positions is held to them, whatever the target has."""
    for path in (shipped / "native").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    change_json(tmp_path / "config.json", lambda config: config.update(max_position_embeddings=20))
    assert call(eval_run.COMMAND, base.recipe, "--name", "short", "--drafter.path", str(tmp_path)) == 2
    assert "tokens, the context leaves 8" in capsys.readouterr().err  # 20, less the answer, a draft and one


@pytest.mark.parametrize("flags, message", [
    (["--export.tolerance", "nan"], "export.tolerance"), (["--export.tolerance", "2"], "export.tolerance"),
    (["--export.formats", "[native, gguf]"], "known layouts: native, speculators"),
    (["--export.formats", "[]"], "known layouts"),
    (["--export.formats", "[speculators]", "--export.engines", "[sglang]"], "does not load the speculators layout"),
    (["--export.engines", "[onnx]"], "export.engines")])
def test_bad_requests(base, capsys, flags, message):
    assert call(ship.COMMAND, base.recipe, *flags) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_evaluating_a_published_folder(base, shipped, layout, capsys):
    """Issue 6, part 6: a folder in either layout is evaluated by the same command, with the counts of the checkpoint
    that it was exported from; its fingerprint is compared with the target's (case 36)."""
    assert call(eval_run.COMMAND, base.recipe) == 0
    own = json.loads((base.run / "eval" / "report.json").read_text())
    flags = ["--drafter.path", str(shipped / layout), "--trace.layers", "[0, 1, 2]", "--name", f"of-{layout}"]
    assert call(eval_run.COMMAND, base.recipe, *flags) == 0
    found = json.loads((base.run.parent / f"of-{layout}" / "eval" / "report.json").read_text())
    assert found["total"]["acceptance"] == own["total"]["acceptance"]
    assert found["target"]["layers"] == own["target"]["layers"] == [1, 2, 3]
    config = shipped / layout / "provenance.json"
    if layout == "speculators":
        origin = json.loads(config.read_text())
        origin["target"]["fingerprint"]["weights"] = "other"
        whole = config.read_text()
        config.write_text(json.dumps(origin))
        assert call(eval_run.COMMAND, base.recipe, *flags) == 2
        config.write_text(whole)
        assert "whose weights differs from this target's" in capsys.readouterr().err


def test_only_safetensors_are_read(base, shipped, tmp_path, capsys):
    """Security of issue 6: no pickle, no path that leaves the folder, no size that is allocated unseen."""
    folder = tmp_path / "bin"
    folder.mkdir()
    config = json.loads((shipped / "native" / "config.json").read_text())
    tensors = load_file(shipped / "native" / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    flags = ["--drafter.path", str(folder)]
    assert call(eval_run.COMMAND, base.recipe, *flags) == 2
    assert "no model.safetensors here" in capsys.readouterr().err
    index = folder / "model.safetensors.index.json"
    for name in ("../native/model.safetensors", "/etc/passwd", "..", ".hidden.safetensors", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"norm.weight": name}}))
        assert call(eval_run.COMMAND, base.recipe, *flags) == 2
        assert "must name files of this folder" in capsys.readouterr().err
    index.unlink()
    save_file({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12, "draft_vocab_size": 10**12}))
    assert call(eval_run.COMMAND, base.recipe, *flags) == 2
    assert "vocab_size = 1000000000000: at most" in capsys.readouterr().err


FAKE = """#!/bin/sh
printf '%s\\n' "$0" "$@" > "$LOG.$$"
for last; do :; done
case "$last" in *.yaml) cat "$last" > "$LOG.yaml" ;; esac
"""


def start(folder, work, *arguments):
    """(exit code, commands that serve.sh gave, stderr); engines are replaced by programs that note their arguments."""
    tools = work / "tools"
    tools.mkdir(exist_ok=True)
    real = subprocess.run(["which", "python3"], capture_output=True, text=True, check=True).stdout.strip()
    (tools / "python3").write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exec {real} "$@"; fi\n{FAKE[10:]}')
    (tools / "trtllm-serve").write_text(FAKE)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    for old in work.glob("log*"):
        old.unlink()
    done = subprocess.run(["bash", folder / "serve.sh", *arguments], capture_output=True, text=True, check=False,
                          env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(work / "log")},
                          start_new_session=True)
    commands = [p.read_text().splitlines()[1:] for p in sorted(work.glob("log.*")) if p.suffix != ".yaml"]
    return done.returncode, commands, done.stderr


def deployment(**options):
    return Deployment("org/target", "PATH", "native", native_config(make_meta(**options), "float32"), 8, 5)


def test_serve_script(tmp_path):
    """The script starts each engine with this folder, whatever its name, and refuses what would serve another
    drafter; a target that has no name elsewhere must be given."""
    folder = tmp_path / "my \"drafter\" $HOME `x`"
    folder.mkdir()
    for name, text in serving_files(deployment()).items():
        (folder / name).write_text(text)
    code, [command], _ = start(folder, tmp_path, "vllm", "--port", "8001")
    assert code == 0 and command[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "org/target"]
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}
    assert json.loads(command[5]) == config and command[6:] == ["--port", "8001"]
    _, [command], _ = start(folder, tmp_path, "sglang", "other/target")
    assert command[3] == "other/target" and command[7] == str(folder) and command[-1] == "6"
    _, [command], _ = start(folder, tmp_path, "tensorrt-llm")
    assert command[0] == "org/target" and command[1] == "--extra_llm_api_options"
    settings = yaml.safe_load((tmp_path / "log.yaml").read_text())["speculative_config"]
    assert settings == {"decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": str(folder),
                        "eagle3_layers_to_capture": [1, 3, 4]}
    code, _, message = start(folder, tmp_path, "nothing")
    assert code == 2 and message.startswith("usage: serve.sh")
    for name, text in serving_files(replace(deployment(norm_before_residual=True), target="TARGET")).items():
        (folder / name).write_text(text)
    code, commands, message = start(folder, tmp_path, "vllm")
    assert code == 2 and not commands and "name the target" in message
    code, commands, message = start(folder, tmp_path, "sglang", "a/b")
    assert code == 2 and not commands and "SGLang does not read norm_before_residual" in message


@pytest.mark.parametrize("name, modes", [("aggregated", [None]), ("disaggregated", ["decode", "prefill"])])
def test_dynamo_workers_have_one_speculative_config(name, modes):
    """Both halves of a split deployment draft alike: the cache that is handed over holds the drafter's keys."""
    graph = yaml.safe_load(serving_files(deployment())[f"dynamo-{name}.yaml"])
    frontend, *workers = graph["spec"]["components"]
    assert frontend["type"] == "frontend" and graph["kind"] == "DynamoGraphDeployment"
    found = []
    for worker in workers:
        arguments = worker["podTemplate"]["spec"]["containers"][0]["args"]
        values = dict(zip(arguments[::2], arguments[1::2]))
        assert values["--model"] == "org/target"
        assert json.loads(values["--speculative-config"])["num_speculative_tokens"] == 5
        found.append(values.get("--disaggregation-mode"))
    assert found == modes
