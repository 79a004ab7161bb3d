"""The processes that step drafters side by side: their protocol, and what a user reads where one fails."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bench import sides
from bench.peers import serving
from recipes.errors import ConfigError, RunError

ANSWERS = """
import json, sys
asked = json.loads(sys.stdin.readline())
{body}
"""
HELLO = ("print(json.dumps({'name': 'specforge', 'version': '9.9.9', 'torch': '2.0.0', 'trained': 7, 'imported': 5}), "
         "flush=True)")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Sets the body of the script that runs as specforge."""
    def put(body: str) -> None:
        (tmp_path / "peer.py").write_text(ANSWERS.format(body=body))
        monkeypatch.setitem(sides.SCRIPTS, "specforge", tmp_path / "peer.py")
    return put


def talk(*messages: dict) -> list[list]:
    """The parts `x` of the answers of specforge."""
    with sides.opened("specforge", sys.executable, {"threads": 1}) as side:
        assert (side.reference, side.trained, side.imported) == ("specforge 9.9.9, torch 2.0.0", 7, 5)
        return [side.ask("x", **message) for message in messages]


def test_a_message_a_line(script):
    """Every message gets one answer, in order; the process ends with the block."""
    script(HELLO + "\nfor line in sys.stdin: print(json.dumps({'x': json.loads(line)['n'] * 2}), flush=True)")
    assert talk({"n": 1}, {"n": 4}) == [[2], [8]]


@pytest.mark.parametrize("body, message", [
    ("sys.stderr.write('loading\\nImportError: no module named that\\n'); sys.exit(3)",
     "specforge: the process ended with status 3; last line of its stderr: ImportError: no module named that"),
    ("sys.stderr.write('a warning\\n'); print('Hello, I am a peer', flush=True)",
     "specforge: answered 'Hello, I am a peer', which is no JSON object; last line of its stderr: a warning"),
    ("print('[1, 2]', flush=True)", "specforge: answered '[1, 2]', which is no JSON object; it left nothing on stderr"),
    ("print(json.dumps({'name': 'x'}), flush=True)", "specforge: its answer lacks version: {'name': 'x'}"),
    (HELLO + "\nsys.stdin.readline(); sys.exit('out of memory')",
     "specforge: the process ended with status 1; last line of its stderr: out of memory"),
    (HELLO + "\nsys.stdin.readline(); print(json.dumps({'y': 1}), flush=True); sys.stdin.read()",
     "specforge: its answer lacks x: {'y': 1}")])
def test_a_peer_that_fails(script, body, message):
    """One that dies, prints garbage or leaves out what was asked for: RunError with its name and its last words."""
    script(body)
    with pytest.raises(RunError) as error:
        talk({"do": "step"})
    assert message in str(error.value).replace("\n", " ")


def test_a_failed_side_leaves_no_process(script):
    """Whatever happened, the process has ended behind the block."""
    script(HELLO + "\nsys.stdin.read()")
    with pytest.raises(KeyError), sides.opened("specforge", sys.executable, {}) as side:
        raise KeyError
    assert side.process.poll() == 0


def test_interpreters(tmp_path, capsys):
    """A peer without an interpreter is left out and said so; none at all, or a wrong path, is bad usage."""
    python = str(Path(sys.executable))
    assert sides.interpreters("train_step", {"speculators": "", "specforge": python}) == {"specforge": python}
    err = capsys.readouterr().err
    assert "train_step: speculators is left out, since --train_step.speculators_python is not given" in err
    with pytest.raises(ConfigError, match="--train_step.speculators_python or --train_step.specforge_python is needed"):
        sides.interpreters("train_step", {"speculators": "", "specforge": ""})
    missing = str(tmp_path / "bin" / "python")
    with pytest.raises(ConfigError, match=f"--train_step.specforge_python {missing}: no such file"):
        sides.interpreters("train_step", {"speculators": python, "specforge": missing})


class Line:
    """A side with one weight w: loss (w - 3)^2."""

    name, version, clip = "line", "1", 1.0

    def __init__(self):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 1.0)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=9.0)]

    def loss(self, case, options):
        return (self.model.weight - case["ids"] * options["scale"]).square().sum()

    def depth_losses(self, case):
        return [float(self.loss(case, {"scale": 1}))]

    def tensors(self):
        return self.model.state_dict()


@pytest.fixture
def asked(tmp_path):
    save_file({"ids": torch.tensor([3])}, tmp_path / "case.safetensors")
    return {"case": str(tmp_path / "case.safetensors"), "lr": 0.5, "options": {"scale": 1}}


def test_a_step(asked):
    """By hand: w = 1, gradient -4, clipped to length 1, rate 0.5 (half of 1): w = 1.5; no gradient is left behind. A
    step that is watched for memory is a step too."""
    side = Line()
    side.optimizers[0].param_groups[0]["relative"] = 0.5
    found = serving.step(side, asked | {"lr": 1.0})
    assert found["loss"] == 4 and found["forward_backward"] > 0 and found["optimizer"] > 0
    assert side.model.weight.item() == pytest.approx(1.5) and side.model.weight.grad is None
    del side.optimizers[0].param_groups[0]["relative"]
    assert serving.memory(side, asked)["peak_bytes"] > 1e6
    assert side.model.weight.item() == pytest.approx(2.0)


def test_losses_and_weights(asked, tmp_path):
    """`losses` changes nothing; `save` writes what the side would keep."""
    side = Line()
    assert serving.losses(side, asked) == {"losses": [4.0]} and side.model.weight.item() == 1
    serving.save(side, {"path": str(tmp_path / "out.safetensors")})
    assert load_file(tmp_path / "out.safetensors")["weight"].tolist() == [[1.0]]


def test_conversations_and_masks():
    """Conversations are cut where a start changes; a mask of a side's own name goes before the turns."""
    case = {"starts": torch.tensor([0, 0, 0, 3, 4, 4]), "turns": torch.tensor([0, 1, 1, 0, 2, -1])}
    assert serving.conversations(case) == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert serving.supervised(case, "line").tolist() == [False, True, True, False, True, False]
    case["mask.line"] = torch.tensor([1, 0, 0, 0, 0, 0])
    assert serving.supervised(case, "line").tolist() == [True] + 5 * [False]


@pytest.mark.parametrize("name", [name for name in sides.SCRIPTS if name != sides.OWN])
def test_environments_are_exact(name):
    """The file of a peer's environment pins every package, the peer and torch among them, once."""
    lines = (sides.SCRIPTS[name].parent / f"{name}.txt").read_text().splitlines()[1:]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines) and pins["torch"] == "2.13.0+cpu"
    assert f"`{name}` {pins[name]}" in (sides.HERE.parent / "docs" / "bench.md").read_text()
