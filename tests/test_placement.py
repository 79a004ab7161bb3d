"""Targets spread by a device map: states equal those of the target on one device, and maps that cannot work."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny import LAYERS, L, conversations, write_target

from data.capture import capture
from data.generate import Generator, Request
from drafters import placement
from drafters.eagle3 import Options
from drafters.eagle3_build import build
from drafters.placement import loading_options, on_one_process
from drafters.target import Target
from recipes.errors import ConfigError
from recipes.files import sha256_file
from recipes.schema import Target as TargetSection

ROWS = conversations(4, 1)
PLAIN = {f"model.layers.{i}": "cpu" for i in range(L)} | {"model.embed_tokens": "cpu", "model.norm": "cpu",
                                                          "lm_head": "cpu"}
SOME = PLAIN | {"model.layers.1": "disk", f"model.layers.{L - 1}": "disk"}
ENDS = PLAIN | {"model.embed_tokens": "disk", "model.norm": "disk", "lm_head": "disk", "model.layers.0": "disk"}
MAPS = {"auto": "auto", "one device": {"": "cpu"}, "layers on disk": SOME, "ends on disk": ENDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def section(folder, **fields) -> TargetSection:
    return TargetSection(model=str(folder), threads=1, cache_dir=str(folder / "cache"), **fields)


@pytest.fixture(scope="module")
def plain(folder):
    return Target(section(folder, device="cpu"), LAYERS)


def same_work(placed: Target, plain: Target) -> None:
    """Captured states with a shared beginning, and answers decoded with a cache that loses rows, are the same."""
    rows = [replace(r, ids=[9, 8, 7, 6, 5, *r.ids], turns=[0] * 5 + r.turns) for r in ROWS]
    ours, theirs = (capture(target, rows, 64)[0] for target in (placed, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.taps, b.taps, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.final, b.final, rtol=1e-5, atol=1e-5)
    asked = [Request(r.id, r.ids) for r in rows]
    assert Generator(placed, 6, 3).run(asked) == Generator(plain, 6, 3).run(asked)


@pytest.mark.parametrize("spread", MAPS.values(), ids=MAPS)
def test_a_placed_target_computes_the_states_of_one_on_one_device(folder, plain, spread):
    """Hooks, caches and taps work across places, layers that are kept on disk included; the weights that a drafter
    starts from are whole, and the fingerprint is the same target's (cases 01, 36)."""
    placed = Target(section(folder, device_map=spread), LAYERS)
    kept = {name for name, p in placed.model.named_parameters() if p.is_meta}
    assert bool(kept) == (isinstance(spread, dict) and "disk" in spread.values())
    same_work(placed, plain)
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(placed.head_weight, weights["lm_head.weight"]) and not placed.head_weight.is_meta
    assert torch.equal(placed.embedding, weights["model.embed_tokens.weight"])
    assert placed.fingerprint() == plain.fingerprint() and placed.device == plain.device
    assert {name for name, p in placed.model.named_parameters() if p.is_meta} == kept
    written = [p for p in (folder / "cache").rglob("*") if p.is_file()]
    assert not written  # what stays on disk is read from the checkpoint (case 61)


def test_a_drafter_starts_from_the_weights_of_a_layer_kept_on_disk(folder, plain):
    """The warm start copies the target's last layer, wherever it is kept."""
    placed = Target(section(folder, device_map=SOME), LAYERS)
    options = Options(draft_vocab_size=32, start="target_layer")
    ours, theirs = (build(options, target, {5: 3, 6: 1}, 0).state_dict() for target in (placed, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("fields, message", [
    ({"device_map": "auto", "tp_plan": "auto"}, r"target\.tp_plan and target\.device_map"),
    ({"device_map": "auto", "device": "cpu"}, r"target\.device = cpu: target\.device_map places the weights"),
    ({"tp_plan": "auto", "device": "cpu"}, r"target\.device = cpu: target\.tp_plan places the weights"),
    ({"tp_plan": "auto"}, r"target\.tp_plan: this stage runs in one process"),
    ({"device_map": "everywhere"}, r"target\.device_map = everywhere: use auto, balanced"),
    ({"device_map": {"": "cuda:99"}}, r"target\.device_map\. = cuda:99"),
    ({"device_map": {"model": "cpu", "lm_head": 99}}, r"target\.device_map\.lm_head = cuda:99"),
    ({"device_map": {"model": "ram", "lm_head": "cpu"}}, r"target\.device_map\.model = ram: not a device"),
    ({"device_map": {"model": "cpu", "lm_haed": "cpu"}}, r"no module lm_haed; its modules begin with model, lm_head"),
    ({"device_map": {"model": "cpu"}}, r"target\.device_map: .*lm_head\.weight"),
    ({"device_map": {"model": "disk"}}, r"lm_head\.weight"),
], ids=str)
def test_placements_that_cannot_work_are_refused(folder, fields, message):
    """A contradiction, a device that is not there, a module that is not there or left out: each names its field."""
    with pytest.raises(ConfigError, match=message):
        Target(section(folder, **fields))


def test_stages_of_one_process_spread_a_shared_target_over_their_devices():
    """What trains or evaluates is one process: a tensor-parallel target is loaded by a device map there."""
    shared = TargetSection(tp_plan="auto")
    assert on_one_process(shared) == TargetSection(device_map="auto")
    assert loading_options(on_one_process(TargetSection())) == {}


def test_weights_of_a_hub_id_are_known_by_their_files(folder, plain, tmp_path, monkeypatch):
    """The Hub's cache links a large file to one named by its SHA-256: the digest is the local folder's, and nothing
    is read for it, so it does not depend on where the weights were loaded to (case 36)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache, commit = tmp_path / "models--org--name", "0123456789abcdef0123456789abcdef01234567"
    snapshot = cache / "snapshots" / commit
    for part in (snapshot, cache / "blobs", cache / "refs"):
        part.mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_bytes((folder / "config.json").read_bytes())
    blob = cache / "blobs" / sha256_file(folder / "model.safetensors")
    blob.write_bytes(b"not read")
    (snapshot / "model.safetensors").symlink_to(blob)
    assert Target.weights_digest(SimpleNamespace(path="org/name")) == plain.weights_digest()


@pytest.mark.cuda
def test_a_target_over_cuda_devices_and_the_cpu_equals_one_on_the_cpu(folder, plain):
    """Layers on every CUDA device in turn, some kept on the CPU, head on the last device: the same states."""
    count = torch.cuda.device_count()
    spread = {f"model.layers.{i}": "cpu" if i == 2 else i % count for i in range(L)}
    spread |= {"model.embed_tokens": 0, "model.norm": count - 1, "lm_head": count - 1}
    placed = Target(section(folder, device_map=spread), LAYERS)
    assert placed.device == torch.device("cuda", count - 1)
    rows = [replace(r, ids=[9, 8, 7, 6, 5, *r.ids], turns=[0] * 5 + r.turns) for r in ROWS]
    for a, b in zip(capture(placed, rows, 64)[0], capture(plain, rows, 64)[0], strict=True):
        torch.testing.assert_close(a.taps, b.taps, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a.final, b.final, rtol=1e-3, atol=1e-3)
    assert torch.equal(placed.head_weight.cpu(), plain.head_weight)


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is number 1 of 2 on a machine with four GPUs (stand-ins: nothing is put on them)."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(placement, "get_max_memory", lambda: {0: 10, 1: 11, 2: 12, 3: 13, "cpu": 99})


def test_each_process_spreads_over_its_own_gpus(folder, second_of_two, monkeypatch):
    """Two processes on four GPUs: the second takes 1, which it trains on, and 3; with more processes than GPUs, or with
    a literal map, that all of them would follow, it is an error."""
    assert loading_options(section(folder, device_map="auto"))["max_memory"] == {1: 11, 3: 13, "cpu": 99}
    with pytest.raises(ConfigError, match="each of the 2 processes of this machine would put its target"):
        loading_options(section(folder, device_map={"": "cuda:1"}))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="this machine has 4 GPUs for 8 processes"):
        loading_options(section(folder, device_map="auto"))


def test_one_process_spreads_over_all(folder):
    assert "max_memory" not in loading_options(section(folder, device_map="auto"))
