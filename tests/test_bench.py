"""`make bench`: the rows that its contract promises, and that what is compared does the same work.

No time is asserted."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from test_cli import stage
from tiny import LAYERS, V, conversations, load_target, write_prompts, write_recipe, write_target, write_traces
from torch import nn

from bench import decode, generate, passes, rows, turns
from bench import run as bench_run
from bench.capture import batches
from bench.material import Stock, apart
from bench.material import conversations as rows_to_capture
from bench.rows import Row, lines, ratio_rows, time_rows
from data.capture import capture
from data.generate import Answer, Generator, Request
from data.sampling import Sampling
from data.store import TraceReader
from drafters.fast_cpu import SkinnyLinear
from recipes.cli import help_text
from recipes.loader import flags

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["tell me a story", "what is the time", "why", "who are you then and where do you live"]
SMALL = {
    "generate": ["--generate.batch_size", "3", "--generate.max_tokens", "6", "--generate.longer", "[8]"],
    "capture": ["--capture.rows", "6", "--capture.answer_tokens", "6", "--trace.batch_tokens", "200"],
    "store": ["--store.rows", "4", "--store.rounds", "2", "--store.answer_tokens", "6"],
    "decode": ["--decode.prompts", "3", "--decode.max_tokens", "6", "--eval.draft_length", "2"],
    "products": ["--products.shapes", "[[8, 16], [16, 8]]", "--products.rows", "[1, 3]", "--products.rotate_mb", "1"],
    "passes": ["--passes.shapes", "[[1, 1], [33, 2]]", "--passes.columns", "9", "--passes.rounds", "3"],
    "answers": ["--answers.batch_sizes", "[2, 3]", "--answers.max_tokens", "5", "--answers.source", "traces"],
    "precision": ["--precision.rows", "3"],
    "trained": ["--trained.judges", "2", "--trained.dtypes", '["float32", "int8"]'],
    "speedups": ["--speedups.batches", "[1, 2]", "--speedups.lengths", "[1, 2]", "--speedups.context", "30"],
}
RATIOS = {  # variants with a ratio, and what the reference is
    "generate": {"greedy": ["transformers"], "sampled": ["transformers", "drafthouse"],
                 "greedy_8": ["transformers"], "sampled_8": ["transformers"], "sampler": ["transformers"]},
    "capture": {"capture": ["transformers"], "capture_apart": ["transformers"]},
    "store": {"store": ["drafthouse"]},
    "decode": {"plain": ["transformers"], "chain": ["transformers", "drafthouse"], "tree": ["drafthouse"],
               "lookup": ["transformers"], "assisted": ["transformers"]},
    "products": {f"{shape}_{n}": ["torch"] for shape in ("8x16", "16x8") for n in (1, 3)},
    "passes": {"1x1": ["torch"], "33x2": ["torch"]},
    "answers": {"rows_3": ["drafthouse"]},
    "precision": {},
    "trained": {},
    "speedups": {},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A recipe with a tiny target, evaluation prompts and traces."""
    folder = tmp_path_factory.mktemp("bench")
    write_target(folder / "model")
    manifest = write_traces(folder / "runs" / "tiny", folder / "model", conversations(5, 2)) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"dtype": "float32"}))
    prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
    write_recipe(folder / "r.yaml", folder / "model", eval={"prompts": str(prompts)})
    return folder


def bench(world: Path, capsys, name: str, *argv: str) -> tuple[int, str, list[dict]]:
    """Exit code, last line of stderr and rows of one measurement."""
    code, err = stage(bench_run.COMMAND, capsys, "--config", str(world / "r.yaml"), "--only", name, "--repeats", "1",
                      *SMALL.get(name, []), *argv)
    path = world / "runs" / "bench" / f"{name}.json"
    return code, err, json.loads(path.read_text()) if path.exists() else []


def check_rows(found: list[dict]) -> None:
    """The contract: exactly these keys; finite numbers; every ratio names what it compares with, version included."""
    assert found and all(list(row) == ["variant", "metric", "value", "unit", "reference"] for row in found)
    for row in found:
        assert row["variant"] and row["metric"] and isinstance(row["unit"], str)
        assert row["value"] is None or (isinstance(row["value"], (int, float)) and abs(row["value"]) < 1e15)
        if row["metric"].startswith(("ratio", "reference_")):
            assert re.search(r"\d+\.\d+\.\d+|drafthouse ([0-9a-f]{12}|unknown)", row["reference"])
    keys = [(row["variant"], row["metric"], row["reference"]) for row in found]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", SMALL)
def test_rows_keep_the_contract(world, capsys, name):
    """DESIGN: runs/bench/NAME.json is a list of rows {variant, metric, value, unit, reference}; a comparison has the
    metric `ratio` and the reference's name and version. Beside it stands where it was measured."""
    code, err, found = bench(world, capsys, name)
    assert code == 0, err
    check_rows(found)
    ratios: dict[str, list[str]] = {}
    for row in found:
        if row["metric"] == "ratio":
            assert row["value"] > 0
            ratios.setdefault(row["variant"], []).append(row["reference"].split()[0])
    assert ratios == RATIOS[name]
    around = json.loads((world / "runs" / "bench" / f"{name}.env.json").read_text())
    assert around["threads"] == 1 and around["versions"]["transformers"] == rows.TRANSFORMERS.split()[1]
    assert set(around["settings"]) == {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
                                       "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert len(around["load"]) == 3 and around["repeats"] == 1 and around["options"]


@pytest.mark.parametrize("name, message", [
    ("captur", "--only captur: unknown; did you mean capture?"), ("", "--only NAME is missing; names: generate, "),
    ("train_stp", "did you mean train_step?"), ("zzz", "--only zzz: unknown; names: generate, capture, store")])
def test_names_that_cannot_be_measured(world, capsys, name, message):
    """An unknown name exits 2 and names the nearest."""
    code, err, found = bench(world, capsys, name)
    assert code == 2 and message in err and not found


@pytest.mark.parametrize("argv, message", [
    (["--generate.prompt", "3"], "--generate.prompt: unknown option; did you mean generate.prompts?"),
    (["--repeats", "0"], "command line: repeats = 0: "),
    (["--passes.shapes", "[[1]]"], "command line: passes.shapes.0.1 = "),
    (["--generate.max_tokens", "600"], "beyond the target's context of 512")])
def test_bad_options(world, capsys, argv, message):
    """Options are typed and strict as a recipe's."""
    code, err, _ = bench(world, capsys, "generate", *argv)
    assert code == 2 and message in err


def test_help_lists_every_option():
    """Each option of each measurement stands in --help with a line and its default, before the recipe's fields."""
    text = help_text(bench_run.COMMAND)
    for name, default, about in flags(bench_run.Options):
        assert about and f"  --{name} {default!r}: {about}\n" in text
    assert text.index("--generate.prompts") < text.index("--target.model")
    names = {name.partition(".")[0] for name, _, _ in flags(bench_run.Options)}
    assert names == {"only", "repeats", *bench_run.MEASURES}


def test_make_prints_its_command():
    """`make -n bench` is one python command with the recipe and the options."""
    done = subprocess.run(["make", "-n", "bench", "ARGS=--only capture"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "-m bench.run --config recipes/smollm2-135m/eagle3-demo.yaml --only capture" in done.stdout


@pytest.fixture(scope="module")
def target(world):
    """float64, so that no tie is decided by rounding."""
    found = load_target(world / "model", layers=LAYERS)
    found.model.generation_config.eos_token_id = [2, 9, 17, 30]  # several ends, so that answers stop at many lengths
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [[3, 4, 5, 6, *torch.randint(3, 50, (1 + 5 * i % 7,), generator=g).tolist()] for i in range(7)]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_both_engines_answer_alike(target, prompts, size):
    """Our batches, refilled, and those of transformers, padded in front, give the same greedy tokens, each answer up to
    its end token, which counts; so tokens per second compare the same work."""
    ours = generate.ours(target, prompts, size, 9)
    theirs = generate.theirs(Stock(target), prompts, size, 9)
    assert ours.answers == theirs.answers and ours.tokens == sum(map(len, theirs.answers))
    lengths = {len(answer) for answer in ours.answers}
    assert len(lengths) > 2 and max(lengths) == 9  # mixed lengths, some cut
    assert all((len(a) == 9 or a[-1] in target.end_ids) and not set(a[:-1]) & set(target.end_ids)
               for a in ours.answers)


def test_prompt_lookup_answers_alike(target, prompts):
    """transformers' prompt lookup is greedy too: the same tokens."""
    stock = Stock(target)
    assert stock.answers(prompts[:3], 1, 9, lookup=2) == stock.answers(prompts[:3], 1, 9)


def test_sampled_answers_keep_the_settings(target, prompts):
    """A tiny nucleus leaves the most likely token: both engines then sample what they decode greedily; with a wide one
    they do not. So temperature and top_p reach both."""
    narrow, wide, stock = Sampling(1.0, 0, 1e-6), Sampling(3.0, 0, 1.0), Stock(target)
    greedy = generate.ours(target, prompts, 3, 9).answers
    assert generate.ours(target, prompts, 3, 9, narrow).answers == greedy
    assert generate.theirs(stock, prompts, 3, 9, narrow).answers == greedy
    assert generate.theirs(stock, prompts, 3, 9, wide).answers != greedy
    assert generate.theirs(stock, prompts, 3, 9, wide, 5).answers == (
        generate.theirs(stock, prompts, 3, 9, wide, 5).answers)


def test_time_inside_the_passes(target, prompts):
    """PassClock counts a prefill and a step for every further token, for both engines alike, and leaves no hook."""
    one = [[5, 6, 7]]
    for run in (generate.ours(target, one, 1, 9), generate.theirs(Stock(target), one, 1, 9)):
        assert run.clock.passes == {"prefill": 1, "steps": run.tokens - 1}
        assert 0 < sum(run.clock.seconds.values()) <= run.seconds
    assert not target.model.get_decoder()._forward_hooks and not target.head._forward_pre_hooks


def test_different_answers_fail_after_the_rows_are_written(world, capsys, monkeypatch):
    """An engine that does other work makes the ratio worthless: exit 1, the rows say how many answers differ."""
    run = Generator.run

    def wrong(self, requests: list[Request], *args) -> list[Answer]:
        answers = run(self, requests, *args)
        answers[0].tokens = [(answers[0].tokens[0] + 1) % V, *answers[0].tokens[1:]]
        return answers

    monkeypatch.setattr(Generator, "run", wrong)
    code, err, found = bench(world, capsys, "generate", "--generate.sampler_rounds", "0")
    assert code == 1 and "greedy: 1 of 4 answers differ from those of transformers" in err
    assert [row["value"] for row in found if row["metric"] == "mismatches"] == [1, 1]  # with either cap


def test_ratio_is_a_median_of_turns():
    """By hand: 3/2, 8/2 and 5/5 have the median 1.5, which the ratio of the medians (5/2) is not; times are rates
    upside down."""
    found = ratio_rows("v", [3.0, 8.0, 5.0], [2.0, 2.0, 5.0], "torch 2.0.0 x")
    assert found == [Row("v", "ratio", 1.5, "x", "torch 2.0.0 x"), Row("v", "ratio_min", 1.0, "x", "torch 2.0.0 x"),
                     Row("v", "ratio_max", 4.0, "x", "torch 2.0.0 x")]
    timed = {row.metric: row.value for row in time_rows("v", [0.1, 0.2, 0.4], [0.2, 0.6, 0.4], "r")}
    assert timed == pytest.approx({"ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0, "ms": 200, "reference_ms": 400})
    with pytest.raises(ValueError):
        ratio_rows("v", [1.0], [1.0, 2.0], "r")


def test_works_alternate(monkeypatch):
    """Case 23: every other turn goes backwards; the first round of short calls only warms up."""
    calls: list[str] = []
    works = {name: lambda turn, name=name: calls.append(f"{name}{turn}") for name in "ab"}
    assert turns.in_turns(works, [0, 1, 2]) == {"a": [None] * 3, "b": [None] * 3}
    assert calls == ["a0", "b0", "b1", "a1", "a2", "b2"]
    clock = iter([0, 9, 9, 17, 20, 22, 30, 31])  # a 9, b 8 while warming up, then b 2, a 1
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    assert turns.times_in_turns({"a": int, "b": int}, 1) == {"a": [1], "b": [2]}


def test_table_of_rows():
    """One line a row; a value that the system could not give is said to be unknown."""
    assert lines([Row("v", "ratio", 1.23456, "x", "torch 2"), Row("long", "peak", None, "bytes"),
                  Row("v", "n", 123456, "")]) == [
        "v     ratio    1.235 x      torch 2", "long  peak   unknown bytes", "v     n      123,456"]


def test_bare_pass_reads_what_capture_reads(target, prompts, monkeypatch):
    """The bare forward pass has the very batches of the capture, where no beginning is shared: ids, order, padding."""
    made = apart(rows_to_capture(prompts, 9, 8, V, seed=3), V)
    forward, seen = target.forward, []
    monkeypatch.setattr(target, "forward", lambda ids, *args, **more: seen.append(ids) or forward(ids, *args, **more))
    capture(target, made, 60)
    assert [ids.tolist() for ids in batches(made, 60)] == [ids.tolist() for ids in seen]
    assert 1 < len(seen) < 9 and sum(map(len, seen)) == 9


def test_rows_to_capture(target, prompts):
    """Prompts in rotation, answers of half to one and a half the length, supervised; `apart` shares no beginning."""
    made = rows_to_capture(prompts, 20, 8, V, seed=3)
    assert [row.ids[: row.turns.index(1)] for row in made] == [prompts[i % 7] for i in range(20)]
    lengths = [sum(row.turns) for row in made]
    assert {4, 12} <= set(lengths) and min(lengths) == 4 and max(lengths) == 12
    assert len({row.id for row in made}) == 20 and made == rows_to_capture(prompts, 20, 8, V, seed=3)
    ids = [row.ids for row in made]
    assert target.prefix(ids).length == 4
    assert target.prefix([row.ids for row in apart(made, V)]).length == 0
    assert [len(row.ids) for row in apart(made, V)] == list(map(len, ids))


def test_plain_products_are_switched_and_given_back(world):
    """`passes` compares two kinds of product of one model: inside the block every layer is a plain nn.Linear, behind it
    a SkinnyLinear again, and both give the same logits up to rounding."""
    target = load_target(world / "model", "float32")
    kinds = [type(m) for m in target.model.modules()]
    assert SkinnyLinear in kinds
    work = passes.pass_of(target, 2, 3, 10)
    packed = work()
    with pytest.raises(KeyError), passes.plain_products(target.model):
        assert SkinnyLinear not in [type(m) for m in target.model.modules()]
        assert nn.Linear in [type(m) for m in target.model.modules()]
        torch.testing.assert_close(work(), packed)
        raise KeyError
    assert [type(m) for m in target.model.modules()] == kinds and packed.shape == (2, 3, V)


def test_passes_need_packed_products(world, capsys):
    """Without them there is nothing to compare: exit 2."""
    code, err, _ = bench(world, capsys, "passes", "--target.skinny_linear", "false")
    assert code == 2 and "this target has no packed products" in err


def test_store_counts_every_row(world, capsys):
    """Peak memory stands for the rows once and in rounds; bytes a token are the store's own; nothing stays."""
    _, _, found = bench(world, capsys, "store")
    values = {(row["variant"], row["metric"]): row["value"] for row in found}
    assert values["store", "rows"] == 4
    assert values["store_rows_4", "peak_bytes"] > 1e6 and values["store_rows_8", "peak_bytes"] > 1e6
    # 10 bytes a token, 3 taps of 32 numbers; the final states of the answers and the header of the file come on top
    assert values["store", "bytes_per_token"] > 10 + 3 * 32 * 4
    assert not [p for p in (world / "runs" / "bench").iterdir() if p.is_dir()]


def test_peak_memory_is_that_since_it_was_set_back():
    """What a run takes and gives back counts until the peak is set back, not behind it: so runs can be compared."""
    assert turns.reset_peak()
    before = turns.peak_bytes()
    block = b"x" * (64 << 20)
    assert turns.peak_bytes() > before + (60 << 20) and len(block) == 64 << 20
    del block
    assert turns.peak_bytes() > before + (60 << 20)
    turns.reset_peak()
    assert turns.peak_bytes() < before + (30 << 20)


def test_training_on_another_dtype_begins_alike_and_differs_by_the_states_alone(world, capsys):
    """Twice the same dtype gives the same figures; another dtype other ones. The judges are no training rows."""
    code, err, found = bench(world, capsys, "trained", "--trained.dtypes", '["int8", "float32", "float32"]')
    losses = [row["value"] for row in found if row["metric"] == "loss"]
    assert code == 0 and losses[1] == losses[2] != losses[0], err
    notes = json.loads((world / "runs" / "bench" / "trained.env.json").read_text())["notes"]
    assert notes["rows"] + 2 == len(TraceReader(world / "runs" / "tiny" / "traces").split("train"))
    code, err, _ = bench(world, capsys, "trained", "--trained.dtypes", '["int7"]')
    assert code == 2 and "trained.dtypes: 'int7': unknown; known: float32" in err


def test_prediction_and_share_stand_beside_the_measured_ratio():
    """A loop at 1.2 of plain where 1.5 was predicted makes 0.8 of it; the other reference's ratio is not taken."""
    measured = [rows.Row("chain", "ratio", 0.9, "x", "theirs"), rows.Row("tree", "ratio", 0.5, "x", "ours"),
                rows.Row("chain", "ratio", 1.2, "x", "ours")]
    assert decode.predicted_rows("chain", 1.5, measured, "ours") == [
        rows.Row("chain", "predicted_speedup", 1.5, "x", "ours"),
        rows.Row("chain", "share_of_predicted", pytest.approx(0.8), "", "ours")]
