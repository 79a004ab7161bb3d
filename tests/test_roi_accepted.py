"""Measured acceptance as a plan takes it: our own report, and files that a user fills in."""

import json
from dataclasses import asdict

import pytest
import roi_world
from roi_world import MODEL, acceptance, found, planned

from eval.roi_accepted import Acceptance, contexts, draft_for, read_acceptance
from eval.roi_files import Steps
from eval.roi_names import eagle_size
from eval.roi_refuse import Refusal
from recipes.errors import ConfigError
from recipes.named_shapes import named, short_shape
from recipes.speculation import Draft, some_layers

calibrated, world = roi_world.calibrated, roi_world.world

BUCKETS = [{"from": 0, "to": 512, "drafts": 100, "mean_length": 2.0},
           {"from": 512, "to": 2048, "drafts": 40, "mean_length": 2.0},
           {"from": 2048, "to": 8192, "drafts": 3, "mean_length": 2.0}]
BLOCK = {"acceptance": {"per_position": [0.6, 0.4], "mean_length": 2.0, "ci95": [1.9, 2.1],
                        "by_context_bucket": BUCKETS},
         "tokens_per_target_pass": 1.9}
CHAIN = {"kind": "chain", "depth": 2, "nodes": 2, "confidence": 0.0}


def report(**changes) -> dict:
    """What make eval writes, as far as a plan reads it."""
    whole = {"schema": "drafthouse.report/1", "name": "run", "target": {"model": MODEL}, "drafter": {"kind": "eagle3"},
             "stack": {"dtype": "bfloat16"}, "settings": {"temperature": 0.0, "plan": CHAIN}, "total": BLOCK,
             "sets": {"code": BLOCK}, "prompts": []}
    return whole | changes


def read(folder, values: dict, domain: str = "", **named) -> Acceptance:
    path = folder / "accepted.json"
    path.write_text(json.dumps(values))
    return read_acceptance(path, domain, **named)


def test_plan_of_our_own_report(world, capsys):
    """eval/report.json is an acceptance: mean length, its interval as uncertainty, contexts with enough drafts, its
    sets as domains."""
    (world / "report.json").write_text(json.dumps(report()))
    assert planned(world, "--roi.domain", "code", name="report.json") == 0
    accepted = found(world)["acceptance"]["run"]
    assert accepted["context"] == [0.0, 2048.0] and accepted["relative_sd"] == pytest.approx(0.2 / 3.92 / 2)
    assert planned(world, "--roi.domain", "maths", name="report.json") == 2
    assert planned(world, "--roi.input_tokens", "2000", name="report.json") == 2
    assert "refused (1): acceptance was measured at contexts of 0 to 2,048" in capsys.readouterr().err


def test_the_tail_of_our_own_report(world):
    """1,000 conversations, eleven of whose answers keep 1.5 tokens a pass and the others 2.0: the 1st percentile of the
    1,001 answers is 1.5, and p99 is said. 999 conversations are too few, however many answers they have (7)."""
    rows = [{"set": "code", "id": f"p{i}", "round": 0, "tokens": 1 + (150 if i < 11 else 200), "passes": 100}
            for i in range(1000)]
    rows += [{"set": "code", "id": "p5", "round": 1, "tokens": 201, "passes": 100},
             {"set": "code", "id": "ended", "round": 0, "tokens": 1, "passes": 0}]
    accepted = read(world, report(prompts=rows))
    assert (accepted.requests, accepted.slowest) == (1000, 1.5) and read(world, report(prompts=rows), "code").slowest
    (world / "report.json").write_text(json.dumps(report(prompts=rows)))
    assert planned(world, "--roi.slo_percentile", "p99", "--roi.slo_ms", "30", name="report.json") == 0
    assert all(p["ms_p99"] > p["ms"] for p in found(world)["points"]["run"])
    (world / "report.json").write_text(json.dumps(report(prompts=rows[1:])))
    assert planned(world, "--roi.slo_percentile", "p99", "--roi.slo_ms", "30", name="report.json") == 2
    assert read(world, report(prompts=[])).requests == 0


def test_the_tail_of_a_shorter_draft():
    """A request that keeps 1 + 1.2 tokens of five drafted ones keeps at least 1 + 1.2 / 5 of one: rates fall."""
    accepted = Acceptance(per_position=[0.75, 0.55, 0.4, 0.3, 0.22], slowest=2.2)
    assert [accepted.slowest_of(K) for K in (1, 5)] == pytest.approx([1.24, 2.2])
    assert Acceptance(per_position=[0.5]).slowest_of(1) == 0.0


@pytest.mark.parametrize("plan, topk, verified", [
    ({"kind": "dynamic tree", "depth": 2, "top_k": 4, "nodes": 8}, 4, 9),
    ({"kind": "static tree", "depth": 2, "nodes": 4, "paths": [[0], [1], [2], [0, 0]]}, 3, 5),
    ({"kind": "chain", "depth": 2, "nodes": 2, "confidence": 0.4}, 1, 0)])
def test_a_tree_is_not_priced_as_a_chain(tmp_path, plan, topk, verified):
    """Its nodes and the last token are verified, its widest level is drafted, what it keeps a pass is known for itself
    alone; so of a chain that stops early."""
    accepted = read(tmp_path, report(settings={"temperature": 0.0, "plan": plan}))
    assert (accepted.tokens_per_pass, accepted.topk, accepted.verified) == (1.9, topk, verified)
    whole = read(tmp_path, report())
    assert (whole.tokens_per_pass, whole.topk, whole.verified) == (0.0, 1, 0)


def test_medusas_heads_are_priced_as_small_as_they_are(tmp_path):
    """Draft vocabulary and blocks are the report's, bits those of steps of the same kind; a file that states neither
    takes the steps', and the target's vocabulary where those are of another kind."""
    heads = {"kind": "medusa", "draft_vocab_size": 8192, "options": {"num_layers": 2, "heads": 2}}
    accepted = read(tmp_path, report(drafter=heads))
    assert (accepted.vocab, accepted.blocks, accepted.layers) == (8192, 2, 0)
    shape = short_shape(named(MODEL), MODEL)
    other, same = Steps(), Steps(drafter={"kind": "medusa", "bits": 32.0, "vocab": 4096, "blocks": 1},
                                 target={"model": MODEL})
    assert draft_for(accepted, shape, other) == Draft("medusa", vocab=8192, blocks=2)
    assert draft_for(accepted, shape, same) == Draft("medusa", bits=32.0, vocab=8192, blocks=2)
    by_hand = Acceptance(kind="medusa", per_position=[0.5])
    assert draft_for(by_hand, shape, same) == same.draft() == Draft("medusa", bits=32.0, vocab=4096)
    assert draft_for(by_hand, shape, other) == Draft("medusa")


@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_eagles_vocabulary_and_layers_are_the_reports(tmp_path, kind):
    """Whether the steps name sizes or not; a file that says nothing takes those of the steps, else 32,000 and one."""
    own = {"kind": kind, "draft_vocab_size": 8192, "options": {"num_layers": 2}}
    accepted = read(tmp_path, report(drafter=own))
    shape = short_shape(named(MODEL), MODEL)
    size = eagle_size(shape, draft_vocab=4096)
    bare, timed = Steps(target={"model": MODEL}), Steps(drafter={"kind": kind, "size": asdict(size)})
    for made in (bare, timed):
        assert draft_for(accepted, shape, made) == Draft(kind, eagle_size(shape, draft_vocab=8192, layers=2))
    silent = Acceptance(kind=kind, per_position=[0.5])
    assert draft_for(silent, shape, bare).size == eagle_size(shape) and draft_for(silent, shape, timed).size == size


def test_untemplated_prompts_are_refused(tmp_path):
    """One prompt without the chat template in the sets that are used (case 53); of another set it does no harm."""
    bare = report(sets={"code": BLOCK, "raw": BLOCK | {"untemplated": 1}})
    for domain in ("", "raw"):
        with pytest.raises(Refusal, match=r"refused \(6\).*completion prompts"):
            read(tmp_path, bare, domain)
    assert read(tmp_path, bare, "code").prompts == "chat"


@pytest.mark.parametrize("buckets, span", [
    ([(0, 512, 100), (512, 2048, 3), (2048, 8192, 100)], [0, 512]),
    ([(0, 512, 3), (512, 2048, 50), (2048, 8192, 50)], [512, 8192]),
    ([(0, 512, 100), (2048, 8192, 100)], [0, 512]), ([(32768, 131072, 90), (131072, 1 << 30, 90)], [32768, 131072]),
    ([(131072, 1 << 30, 90)], [131072, 131072]), ([(0, 512, 3)], [0, 0]), ([], [0, 0])])
def test_contexts_end_at_the_first_thin_bucket(buckets, span):
    """A gap, a thin bucket and the open end are not measured."""
    assert contexts([{"from": a, "to": b, "drafts": n} for a, b, n in buckets]) == span


def test_bits_of_a_reports_target(tmp_path):
    """Of the dtype; of the named shape where that is quantised; of the recipe's own checkpoint where it is known."""
    def bits(model: str, dtype: str = "bfloat16", **known: float) -> float:
        return read(tmp_path, report(target={"model": model}, stack={"dtype": dtype}), bits=known).weight_bits

    assert bits(MODEL) == 16 and bits("here", "float32") == 32 and bits("deepseek-ai/DeepSeek-V3") == 8
    assert bits("Qwen/Qwen3-32B-FP8") == 8 and bits("here", here=8.0) == 8 and bits("here", here=0.0) == 16


def test_another_target_under_the_same_name(world, capsys):
    """The report's fingerprint against that of the measured steps (1); parts that only one has say nothing."""
    accepted = json.loads((world / "runs" / "w" / "roi" / "calibration.json").read_text())
    accepted["steps"]["target"]["fingerprint"] = {"weights": "a", "template": "t"}
    (world / "other.json").write_text(json.dumps(accepted))
    for own, code in (({"weights": "a"}, 0), ({"weights": "b", "template": "t"}, 2), ({}, 0)):
        (world / "report.json").write_text(json.dumps(report(target={"model": MODEL, "fingerprint": own})))
        assert planned(world, "--calibration", str(world / "other.json"), name="report.json") == code
    assert "acceptance was measured on a target of other weights than the measured steps" in capsys.readouterr().err


@pytest.mark.parametrize("change, said", [
    ({"per_position": []}, "per_position is missing"), ({"per_position": [1.2]}, "must be cumulative rates"),
    ({"per_position": [-0.1]}, "must be cumulative rates"), ({"per_position": [0.4, 0.5]}, "none larger than the one"),
    ({"per_position": [float("nan")]}, "must be a finite number"), ({"context": [100.0]}, "context = "),
    ({"context": [0.0, 1.0, 2.0]}, "context = "), ({"context": [9.0, 1.0]}, "context = "),
    ({"tokens_per_pass": 0.5}, "tokens_per_pass = 0.5: must be 1 to 6"),
    ({"tokens_per_pass": 7}, "tokens_per_pass = 7"),
    ({"slowest": 9.0}, "slowest = 9"), ({"requests": -1}, "requests"),
    ({"size": {"hiden": 5}}, "size: unknown key hiden"),
    ({"size": {"hidden": 5}}, "size: "), ({"kind": "hydra"}, "draft = hydra: no kind of drafter"),
    ({"relative_sd": float("inf")}, "relative_sd")])
def test_figures_that_no_measurement_gives(world, capsys, change, said):
    """One line, exit 2, before anything is planned."""
    (world / "ours.json").write_text(json.dumps(acceptance(**change)))
    assert planned(world) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_layer_cut_is_a_drafter(world):
    """Its acceptance is planned, with a third of the target's layers where none are named, and the plan says that the
    steps timed another kind."""
    (world / "cut.json").write_text(json.dumps(acceptance(name="cut", kind="layer_cut", layers=4)))
    assert planned(world, name="cut.json") == 0
    assert any("cut: the steps are of eagle3, so its own drafting, layer_cut, was not timed" in n
               for n in found(world)["notes"])


def test_other_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="schema 'x': must be an eval/report.json or drafthouse.acceptance/1"):
        read(tmp_path, {"schema": "x"})


def test_a_small_model_is_some_of_its_targets_layers(tmp_path):
    """Its steps and its report name as many; its weights are its own, with bits of their own. One that began as a
    sibling is of sizes that nobody knows here."""
    shape = short_shape(named(MODEL), MODEL)
    made = Steps(target={"model": MODEL}, hardware={"name": "h100-sxm"},
                 drafter={"kind": "small_lm", "layers": 4, "bits": 8.0})
    assert made.draft() == Draft("model", model=some_layers(made.place().shape, 4), bits=8.0)
    for options, layers in (({"layers": 4, "keep": []}, 4), ({"layers": 0, "keep": [0, 3, 9]}, 3)):
        accepted = read(tmp_path, report(drafter={"kind": "small_lm", "options": options}))
        assert draft_for(accepted, shape, made) == Draft("model", model=some_layers(shape, layers), bits=8.0)
    with pytest.raises(ConfigError, match="sibling = other: the planner does not know its sizes"):
        read(tmp_path, report(drafter={"kind": "small_lm", "options": {"sibling": "other"}}))
