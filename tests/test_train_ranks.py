"""Training in two real gloo processes under plain data parallelism and every ZeRO stage (forks: tests/launched.py).

Fast for plain data parallelism and ZeRO-3, the two ends, in their hardest form; the rest is marked slow.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import CONFIGS, assert_close, counts, result, train, whole_zero3
from tiny import conversations, load_target, write_recipe, write_target, write_traces
from torch.distributed.tensor import DTensor

from drafters import checkpoint, vocab
from drafters.eagle3 import Eagle3
from recipes import files
from train import checkpoints
from train import run as run_module
from train.loop import Trainer
from train.zero import partitioned

STEPS = 4
SLOW = pytest.mark.slow
KINDS = ["ddp", pytest.param("zero1", marks=SLOW), pytest.param("zero2", marks=SLOW), "zero3"]
PARTS = ("--train.batch_rows", "1", "--train.accumulation", "2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A target, the traces of 14 training rows and 5 validation rows (3 on one rank, 2 on the other). The last batch of
    an epoch holds two rows: in four parts, both micro-batches of rank 0 are empty."""
    folder = tmp_path_factory.mktemp("ranks")
    write_traces(folder / "runs" / "tiny", write_target(folder / "model"), conversations(14, 5))
    write_recipe(folder / "r.yaml", folder / "model", train={
        "validate_every": 2, "save_every": 2, "keep": 9, "batch_rows": 2, "accumulation": 1})
    return folder


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Launch configs by kind; that of ZeRO-3 leaves no parameter whole, however small."""
    return CONFIGS | {"zero3": whole_zero3(tmp_path_factory.mktemp("configs")), "one": None}


@pytest.fixture(scope="module")
def finished(base, configs) -> Callable[..., str]:
    """Name of a finished run of a kind, whole batches or in parts; trained once."""
    def run(kind: str, *flags: str) -> str:
        name = "-".join([kind, *flags]).replace(".", "_").replace("-", "")
        if not (base / "runs" / name).exists():
            assert ended(train(base, name, configs[kind], *flags, world=1 if kind == "one" else 2)) in ([0], [0, 0])
        return name

    return run


@pytest.fixture(scope="module")
def alone(base, finished):
    """What one process with four rows a step ends with."""
    return result(base, finished("one", "--train.batch_rows", "4"), STEPS)


def ended(ranks: list) -> list[int]:
    """Exit codes; what a rank says is shown where a test fails."""
    for rank in ranks:
        print(rank.out, rank.err)
    return [rank.code for rank in ranks]


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("parts", [pytest.param(False, marks=SLOW), True], ids=["whole", "parts"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(base, finished, alone, kind, parts):
    """2 ranks x 2 rows, or x 1 row accumulated twice, end with the weights, moments and validation counts of 1 rank x 4
    rows. Ranks have 3 and 2 validation rows, and an empty micro-batch at the end: nothing hangs (cases 18, 38, 42)."""
    weights, moments, curve = result(base, finished(kind, *(PARTS if parts else ())), STEPS)
    assert_close(weights, alone[0])
    assert_close(moments, alone[1])
    assert counts(curve) == counts(alone[2])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_holds_the_drafter_only(base, finished, kind):
    """Under every launch the same files: each trained weight and two moments, once, in full shape; no target, no
    pickle (cases 18, 62)."""
    folder = base / "runs" / finished(kind, *PARTS) / "checkpoints" / f"step-{STEPS:06d}"
    weights, moments, _ = result(base, folder.parent.parent.name, STEPS)
    trained = {name: t for name, t in weights.items() if name not in ("d2t", "t2d")}
    assert {f.name for f in folder.iterdir()} == {checkpoint.WEIGHTS, checkpoint.META, checkpoints.STATE,
                                                  "trainer.json", checkpoint.SUMS}
    assert set(moments) == {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in trained}
    assert all(moments[f"exp_avg/{name}"].shape == t.shape and t.numel() for name, t in trained.items())
    size = sum(f.stat().st_size for f in folder.iterdir())
    assert size < 3 * sum(t.nbytes for t in trained.values()) + 24_000


def die_in_a_micro_batch(rank: int) -> None:
    """kill -9 of this rank in its sixth micro-batch: of two a step, the second one of step 3."""
    forward, calls = Eagle3.forward, []

    def dying(*args):
        calls.append(rank)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args)

    Eagle3.forward = dying


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=SLOW) for kind in ("ddp", "zero1", "zero2")), "zero3"])
def test_killed_run_ends_bit_for_bit(base, configs, finished, kind):
    """kill -9 of both ranks within the third step, in the middle of epoch and accumulation, then the same command: the
    bits of the undisturbed run, moments included (case 19)."""
    whole, name = finished(kind, *PARTS), f"killed{kind}"
    assert -9 in ended(train(base, name, configs[kind], *PARTS, each=die_in_a_micro_batch))
    assert checkpoints.steps_in(base / "runs" / name / "checkpoints") == [2]
    assert ended(train(base, name, configs[kind], *PARTS)) == [0, 0]
    found, wanted = result(base, name, STEPS), result(base, whole, STEPS)
    assert_equal(found[0], wanted[0])
    assert_equal(found[1], wanted[1])
    assert found[2] == wanted[2]


def half(base: Path, run: str, name: str) -> Path:
    """A copy of a finished run as it was after two steps."""
    folder = base / "runs" / name
    shutil.copytree(base / "runs" / run, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:06d}")
    (folder / "checkpoints" / "curve.json").unlink()
    return folder


@pytest.mark.parametrize("first, then", [
    ("one", "zero3"), ("zero3", "one"), *(pytest.param(a, b, marks=SLOW) for a, b in (
        ("one", "ddp"), ("ddp", "zero2"), ("zero1", "ddp"), ("zero2", "one"), ("one", "zero1"), ("ddp", "zero3"),
        ("zero3", "zero1")))])
def test_another_launch_goes_on(base, configs, finished, alone, first, then):
    """Two steps under one kind of launch, two under another, on another number of processes: the result of the
    undisturbed run up to rounding (part 6; DeepSpeed's own checkpoints can do neither)."""
    name = f"from{first}to{then}"
    half(base, finished(first, *(("--train.batch_rows", "4") if first == "one" else PARTS)), name)
    rows = ("--train.batch_rows", "4") if then == "one" else ()
    assert set(ended(train(base, name, configs[then], *rows, world=1 if then == "one" else 2))) == {0}
    weights, moments, curve = result(base, name, STEPS)
    assert_close(weights, alone[0])
    assert_close(moments, alone[1])
    assert counts(curve) == counts(alone[2])


def late(rank: int) -> None:
    """Rank 1 sees no checkpoint when it first looks, as on a network file system that shows them late."""
    signal.alarm(300)  # rather dead than waiting for one that does something else
    if rank == 1:
        checkpoints.steps_in = lambda folder: []


def test_ranks_go_on_from_the_same_step(base, configs, finished):
    """Rank 0 sees a checkpoint and rank 1 does not yet: both go on from it, to the bits of the undisturbed run."""
    whole = finished("ddp")
    half(base, whole, "late")
    ranks = train(base, "late", configs["ddp"], each=late)
    assert ended(ranks) == [0, 0] and "goes on from" in ranks[0].out and "step 2 of 4" in ranks[0].out
    assert_equal(result(base, "late", STEPS)[0], result(base, whole, STEPS)[0])


def blind(rank: int) -> None:
    """Rank 1 never sees it."""
    signal.alarm(300)
    if rank == 1:
        checkpoints.appears = lambda path: False


def test_a_rank_that_never_sees_the_checkpoint_ends_all(base, configs, finished):
    """Another machine with a folder of its own: all ranks end with the reason, and nothing is trained."""
    folder = half(base, finished("ddp"), "blind")
    ranks = train(base, "blind", configs["ddp"], each=blind)
    assert ended(ranks) == [1, 1]
    assert "step-000002: 1 of 2 processes do not see this checkpoint" in ranks[0].err
    assert checkpoints.steps_in(folder / "checkpoints") == [2]


@SLOW
def test_another_global_batch_is_refused(base, configs, finished):
    """Four processes' worth of rows on two: both ranks end with the message, which names what fits; nothing hangs."""
    half(base, finished("one", "--train.batch_rows", "4"), "refused")
    ranks = train(base, "refused", configs["ddp"], "--train.batch_rows", "4")
    assert ended(ranks) == [2, 2]
    assert "trained on 4 rows a step, this launch has 8" in ranks[0].err
    assert "set train.batch_rows and train.accumulation to 1 and 2 or 2 and 1" in ranks[0].err


def full_disk(rank: int) -> None:
    """The second save meets a full disk."""
    save, times = checkpoint.save, []

    def refused(folder: Path, *args) -> None:
        times.append(folder)
        if len(times) > 1:
            files.token_hex = lambda n: "drawn"
            (folder / f".{checkpoint.META}.drawn.tmp").symlink_to("/dev/full")
        save(folder, *args)

    checkpoint.save = refused


@pytest.mark.parametrize("kind", ["ddp", pytest.param("zero3", marks=SLOW)])
def test_full_disk_ends_all_ranks(base, configs, kind):
    """Rank 0 cannot write the second checkpoint: it alone says so, in one line, both ranks end with exit code 1, and
    the first checkpoint is left (case 42's other half: no rank waits for the one that failed)."""
    name = f"full{kind}"
    ranks = train(base, name, configs[kind], each=full_disk)
    assert ended(ranks) == [1, 1]
    said = [text for text in ranks[0].err.splitlines() if "error" in text]
    assert len(said) == 1 and said[0].endswith("checkpoints/step-000004: No space left on device; what was finished is "
                                               "kept: make room and run the same command again")
    assert "error" not in ranks[1].err and "Traceback" not in ranks[0].err + ranks[1].err
    left = sorted(f.name for f in (base / "runs" / name / "checkpoints").iterdir())
    assert [f for f in left if "step" in f] == ["step-000002"]


def stop_one(rank: int) -> None:
    """SIGTERM to rank 1 in its first step."""
    load = Trainer.load

    def signalled(self: Trainer, rows: list[int]):
        if rank == 1 and self.progress.step == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return load(self, rows)

    Trainer.load = signalled


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW) for kind in ("ddp", "zero2", "zero3")])
def test_sigterm_to_one_rank_stops_both(base, configs, finished, kind):
    """A signal that one rank alone gets: both save the same step and exit 143; the same command then ends with the bits
    of the undisturbed run (case 42)."""
    name = f"stopped{kind}"
    ranks = train(base, name, configs[kind], each=stop_one)
    assert ended(ranks) == [143, 143] and "stopped by SIGTERM, saved" in ranks[0].err
    assert checkpoints.steps_in(base / "runs" / name / "checkpoints") in ([1], [2])
    assert ended(train(base, name, configs[kind])) == [0, 0]
    assert_equal(result(base, name, STEPS)[0], result(base, finished(kind), STEPS)[0])


def watch_memory(base: Path) -> Callable[[int], None]:
    """Notes, for each validation, how many elements of the drafter this rank holds outside and within it."""
    def each(rank: int) -> None:
        validate, chains, seen = Trainer.validate, [], []

        def watched(self: Trainer) -> None:
            sizes = [p.numel() for p in self.drafter.parameters()]
            tables = {name: list(b.shape) for name, b in self.drafter.named_buffers()}
            original = self.drafter.chains
            self.drafter.chains = lambda *args: (chains.append(sum(p.numel() for p in self.drafter.parameters())),
                                                 original(*args))[1]
            validate(self)
            self.drafter.chains = original
            seen.append({"partitioned": partitioned(self.drafter), "outside": sum(sizes), "within": chains[-1],
                         "tables": tables})
            (base / f"rank{rank}.json").write_text(json.dumps(seen))

        Trainer.validate = watched

    return each


@SLOW
def test_zero3_deals_out_weights_but_no_tables(base, configs):
    """Between steps a rank holds no whole parameter, in validation all of them, and the target's tables always; a
    frozen head is saved with the target's bits (case 18)."""
    flags = ("--drafter.options.train_head", "false")
    assert ended(train(base, "dealt", configs["zero3"], *flags, each=watch_memory(base))) == [0, 0]
    weights, moments, _ = result(base, "dealt", STEPS)
    target = load_target(base / "model", "float32", [1, 2, 3])
    total = sum(t.numel() for name, t in weights.items() if name not in ("d2t", "t2d"))
    for rank in range(2):
        for seen in json.loads((base / f"rank{rank}.json").read_text()):
            assert seen["partitioned"] and seen["outside"] == 0 and seen["within"] == total
            assert seen["tables"]["embedding"] == list(target.embedding.shape)
    assert torch.equal(weights["lm_head.weight"], target.head_weight[vocab.ids_of(weights["d2t"])])
    assert not any("lm_head" in name for name in moments)


@SLOW
@pytest.mark.parametrize("stage", [2, 3])
def test_offload_to_the_cpu(base, finished, alone, tmp_path, stage):
    """Optimizer states (and parameters) kept on the CPU: the recipe's optimizer still, the same weights."""
    config = tmp_path / "offload.yaml"
    text = CONFIGS[f"zero{stage}"].read_text()
    for part in ("optimizer", "param")[: stage - 1]:
        text = text.replace(f"offload_{part}_device: none", f"offload_{part}_device: cpu")
    config.write_text(text)
    assert ended(train(base, f"offload{stage}", config)) == [0, 0]
    weights, moments, _ = result(base, f"offload{stage}", STEPS)
    assert_close(weights, alone[0])
    assert_close(moments, alone[1])


@SLOW
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_bfloat16(base, configs, kind):
    """Reduced precision trains, validates, saves float32 weights, and goes on from its checkpoint bit for bit."""
    flags, name = ("--train.dtype", "bfloat16"), f"half{kind}"
    assert ended(train(base, name, configs[kind], *flags)) == [0, 0]
    half(base, name, f"again{kind}")
    assert ended(train(base, f"again{kind}", configs[kind], *flags)) == [0, 0]
    found, wanted = result(base, f"again{kind}", STEPS), result(base, name, STEPS)
    assert_equal(found[0], wanted[0])
    assert_equal(found[1], wanted[1])
    assert {t.dtype for name, t in wanted[0].items() if name not in ("d2t", "t2d")} == {torch.float32}


@SLOW
@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_shared_target_in_training(base, configs, alone, kind):
    """trace.mode online with target.tp_plan: two ranks share every layer of the frozen target and compute all rows
    together, with empty micro-batches and 3 and 2 validation rows; the result is that of one process that reads stored
    states. No rank holds the whole target (part 5)."""
    name = f"shared{kind}"
    write_traces(base / "runs" / name, base / "model", conversations(14, 5), "online")
    flags = (*PARTS, "--trace.mode", "online", "--target.tp_plan", "auto")
    assert ended(train(base, name, configs[kind], *flags, each=note_target(base))) == [0, 0]
    weights, moments, curve = result(base, name, STEPS)
    assert_close(weights, alone[0])
    assert counts(curve) == counts(alone[2])
    whole = sum(p.numel() for p in load_target(base / "model", "float32").model.parameters())
    for rank in range(2):
        assert int((base / f"target{rank}").read_text()) < 0.7 * whole


def note_target(base: Path) -> Callable[[int], None]:
    """Notes how many elements of the target this rank holds."""
    def each(rank: int) -> None:
        opened = run_module.open_target

        def noted(*args):
            target = opened(*args)
            local = (p.to_local() if isinstance(p, DTensor) else p for p in target.model.parameters())
            (base / f"target{rank}").write_text(str(sum(p.numel() for p in local)))
            return target

        run_module.open_target = noted

    return each


@SLOW
def test_cache_of_a_shared_target_is_refused(base, configs):
    """Each process's cache would skip passes that the others wait in: a message on both ranks, exit code 2."""
    write_traces(base / "runs" / "cached", base / "model", conversations(4, 2), "online")
    ranks = train(base, "cached", configs["ddp"], "--trace.mode", "cache", "--target.tp_plan", "auto")
    assert ended(ranks) == [2, 2] and "trace.mode = cache with target.tp_plan" in ranks[0].err
