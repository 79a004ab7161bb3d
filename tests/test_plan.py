"""`make plan`: the command, what it refuses, and its ranges against the measured demo."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from tiny import call, write_prompts

from eval import plan, probe
from recipes.errors import ConfigError
from recipes.hardware import known
from recipes.loader import load_recipe
from recipes.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "recipes" / "smollm2-135m" / "eagle3-demo.yaml"
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
           "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
           "tie_word_embeddings": True, "max_position_embeddings": 8192}
LLAMA_8B = SMOLLM2 | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                      "tie_word_embeddings": False}
# Seconds of `make demo` on the machine of docs/results.md, one run on 2026-11-30, in a slow hour: loading, conversion,
# prompts and answers; training with its start; export; evaluation. Rows and tokens of its manifest.
MEASURED = {"trace": 277, "train": 259, "export": 24, "eval": 258}
MANIFEST = {"format": "drafthouse.traces/1", "rows": 420, "tokens": 59943, "supervised_tokens": 24716,
            "user_turn_tokens": 21718}


def target(folder: Path, config: dict) -> str:
    """A target folder that holds its config alone: a plan needs no more."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def recipe(folder: Path, config: dict, **sections) -> Path:
    """A recipe for this target with ten prompts, on H100s."""
    write_prompts(folder / "p.jsonl", [f"a prompt with number {i} and forty characters"[:40] for i in range(10)])
    values = {"name": "planned", "runs_dir": str(folder / "runs"),
              "target": {"model": target(folder / "target", config), "dtype": "bfloat16"},
              "prompts": {"sources": [{"kind": "jsonl", "path": str(folder / "p.jsonl")}], "validation": 2},
              "train": {"dtype": "bfloat16"}, "plan": {"hardware": "h100-sxm"}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def demo(tmp_path: Path, monkeypatch) -> Recipe:
    """The demo's recipe on the CPU of the table, its target by its config."""
    monkeypatch.chdir(ROOT)
    return load_recipe(DEMO, {"runs_dir": str(tmp_path), "plan.hardware": "cpu",
                              "target.model": target(tmp_path / "smollm2", SMOLLM2)})


@pytest.mark.parametrize("traced", [False, True])
def test_measured_demo_lies_in_the_planned_ranges(tmp_path, monkeypatch, traced):
    """Each stage that was measured lies between the planned bounds, from the sources alone and from the finished
    traces, and so does the sum; the traces' size is exact where the rows are known, and enclosed where not."""
    section = demo(tmp_path, monkeypatch)
    if traced:
        (tmp_path / "demo" / "traces").mkdir(parents=True)
        (tmp_path / "demo" / "traces" / "manifest.json").write_text(json.dumps(MANIFEST))
    found = plan.make(section)
    for name, seconds in MEASURED.items():
        low, high = found["stages"][name]["seconds"]
        assert low <= seconds <= high, name
        assert high < 7 * low, "a range that says something"
    low, high = found["total"]["seconds"]
    assert low <= sum(MEASURED.values()) <= high < 4.2 * low
    low, high = found["stages"]["trace"]["disk_bytes"]
    assert low <= 523_752_402 * 1.01 and high >= 523_752_402 * 0.99
    assert not traced or high / low < 1.01
    low, high = found["stages"]["eval"]["memory_bytes"]
    assert low <= 2_903_965_696 <= high


def test_a_second_layer_is_planned(tmp_path):
    """Two layers instead of one: the drafter's further weights with gradients and moments, longer training and drafts,
    a larger export."""
    path = recipe(tmp_path, LLAMA_8B, trace={"mode": "online"})
    one, two = (plan.make(load_recipe(path, {"drafter.options.num_layers": str(n)}))["stages"] for n in (1, 2))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096  # query and output, keys, MLP, norms
    for bound in (0, 1):
        assert two["train"]["memory_bytes"][bound] - one["train"]["memory_bytes"][bound] > 16 * layer
        assert two["export"]["disk_bytes"][bound] - one["export"]["disk_bytes"][bound] >= 2 * layer
        assert all(two[stage]["seconds"][bound] > one[stage]["seconds"][bound] for stage in ("train", "eval"))


def test_command_prints_and_writes_the_plan(tmp_path, capsys):
    """Eight H100s for Llama-3.1-8B: figures as ranges, every assumption with its reason, plan.json beside the run;
    cost only where a price is known."""
    path = recipe(tmp_path, LLAMA_8B, plan={"hardware": "h100-sxm", "gpus": 8}, roi={"price_per_gpu_hour": 2.5})
    assert call(plan.COMMAND, path) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("planned on 8 x h100-sxm", "8.03 B parameters", "128.0 KiB", "plan.compute_share: 0.6, 0.25",
                 "An estimate, not a promise", "https://www.nvidia.com/en-us/data-center/h100/", "plan.json"):
        assert part in text, part
    made = json.loads((tmp_path / "runs" / "planned" / "plan.json").read_text())
    assert made["schema"] == "drafthouse.plan/1" and set(made["stages"]) == {"trace", "train", "export", "eval"}
    for stage in [*made["stages"].values(), made["total"]]:
        low, high = stage["seconds"]
        assert 0 < low <= high and stage["cost"] == pytest.approx([s / 3600 * 8 * 2.5 for s in (low, high)])
    low, high = made["stages"]["eval"]["memory_bytes"]
    assert 16e9 < low < high < 80e9 and not made["warnings"]
    assert call(plan.COMMAND, path, "--roi.price_per_gpu_hour", "0") == 0
    assert "no price" in capsys.readouterr().out


def test_what_does_not_fit_is_a_warning(tmp_path):
    """A 70B-sized target on one L40S; eight of them with a map of devices hold it."""
    config = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                         "num_attention_heads": 64}
    path = recipe(tmp_path, config, plan={"hardware": "l40s"})
    found = plan.make(load_recipe(path))
    assert [w.split(":")[0] for w in found["warnings"]] == [f"{s} does not fit" for s in found["stages"]]
    found = plan.make(load_recipe(path, {"plan.gpus": "8", "plan.tensor_parallel": "8"}))
    assert found["stages"]["export"]["memory_bytes"][1] < 48e9
    found = plan.make(load_recipe(path, {"plan.weight_bits": "4.25"}))
    assert found["target"]["weight_bits"] == 4.25 and found["stages"]["export"]["memory_bytes"][0] < 48e9


def test_recipe_gives_its_own_assumptions(tmp_path):
    """What the recipe states replaces the default, is named as the recipe's, and a single number leaves no range."""
    path = recipe(tmp_path, SMOLLM2, plan={
        "hardware": "mine", "custom": {"mine": {"memory_gb": 10, "bandwidth_tb_s": 1, "tflops": {"bfloat16": 100}}},
        "prompt_tokens": [50], "answer_tokens": [20, 30], "compute_share": [0.5], "layer_us": [10]})
    found = plan.make(load_recipe(path))
    assert [load["prompt"] for load in found["load"]] == [50, 50]
    assert [load["answer"] for load in found["load"]] == [20, 30]
    given = {a["name"]: a for a in found["assumptions"]}
    assert given["plan.compute_share"] == {"name": "plan.compute_share", "best": 0.5, "worst": 0.5,
                                           "why": "the recipe"}
    assert given["plan.answer_tokens"]["why"] == "the recipe" and "layer_us of a serving engine" not in given


def test_lengths_come_from_the_sources(tmp_path):
    """Ten prompts of 40 characters: 40/4.5 + 8 to 40/3 + 40 tokens; a conversation of two turns has a second row only
    in the worst case; a Hub data set counts by its rows."""
    path = recipe(tmp_path, SMOLLM2)
    loads = plan.make(load_recipe(path))["load"]
    assert [load["rows"] for load in loads] == [10, 10]
    assert [load["prompt"] for load in loads] == pytest.approx([40 / 4.5 + 8, 40 / 3 + 40])
    two = {"messages": [{"role": "user", "content": "a" * 9}, {"role": "assistant", "content": "b"},
                        {"role": "user", "content": "c" * 9}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(two) + "\n")
    assert [load["rows"] for load in plan.make(load_recipe(path))["load"]] == [1, 2]
    hub = {"prompts.sources": "[{kind: hub, name: org/set, rows: 700, count: 500}]"}
    loads = plan.make(load_recipe(path, hub))["load"]
    assert [load["rows"] for load in loads] == [500, 500]
    assert [load["prompt"] for load in loads] == [64 + 8, 512], "at most prompts.max_tokens"


def test_evaluation_prompts_that_tracing_will_make(tmp_path):
    """The run's own evaluation.jsonl need not be there yet: as many as are kept out, as long as the others."""
    path = recipe(tmp_path, SMOLLM2, eval={"prompts": str(tmp_path / "runs" / "planned" / "evaluation.jsonl")},
                  prompts={"sources": [{"kind": "jsonl", "path": str(tmp_path / "p.jsonl")}], "evaluation": 3})
    for load in plan.make(load_recipe(path))["load"]:
        assert load["judged"] == 3 and load["judged_prompt"] == load["prompt"]


def test_evaluation_sets_count_every_turn(tmp_path):
    """eval.sets: each turn is an answer; a Hub data set, which is not read, counts with its rows or is an error."""
    (tmp_path / "q.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["a b c d", "e f"]}) + "\n")
    sets = [{"path": str(tmp_path / "q.jsonl")}, {"kind": "hub", "dataset": "org/d", "rows": 5}]
    path = recipe(tmp_path, SMOLLM2, eval={"sets": sets}, prompts={"sources": [{"kind": "jsonl", "path": str(
        tmp_path / "p.jsonl")}]})
    assert all(load["judged"] == 7 for load in plan.make(load_recipe(path))["load"])
    with pytest.raises(ConfigError, match=r"eval\.sets\[1\]\.rows: make plan must know how many rows org/d gives"):
        plan.make(load_recipe(path, {"eval.sets": json.dumps([sets[0], sets[1] | {"rows": 0}])}))


@pytest.mark.parametrize("flags, said", [
    (["--plan.hardware", "h1000"], "plan.hardware = h1000: unknown; known: this-machine, a100-40"),
    (["--plan.hardware", "mine", "--plan.custom", "{mine: {memory_gb: 1, tflops: {bfloat16: 1}}}"],
     "plan.custom.mine: bandwidth_tb_s is missing"),
    (["--plan.hardware", "mine", "--plan.custom", "{mine: {memry_gb: 1}}"], "unknown key memry_gb"),
    (["--plan.hardware", "mine", "--plan.custom",
      "{mine: {memory_gb: 1, bandwidth_tb_s: 1, tflops: {float32: 1}}}"], "no tflops for bfloat16; it has float32"),
    (["--plan.gpus", "4", "--plan.tensor_parallel", "3"], "plan.gpus = 4: must be a multiple of plan.tensor_parallel"),
    (["--generation.backend", "vllm", "--plan.gpus", "7", "--plan.tensor_parallel", "7"],
     "plan.tensor_parallel = 7: does not divide the target's 9 heads"),
    (["--prompts.sources", "[{kind: hub, name: org/set}]"], "prompts.sources[0].rows: make plan must know how many"),
    (["--target.model", "no/such-model"], "target.model = no/such-model: its config.json cannot be read"),
    (["--plan.layer_us", "[1, 2, 3]"], "plan.layer_us"), (["--eval.prompts", "no.jsonl"], "no.jsonl: cannot read"),
    (["--train.dtype", "float64"], "train.dtype")])
def test_what_cannot_be_known_exits_2_with_its_field(tmp_path, capsys, flags, said):
    """Nothing is guessed, nothing is written (exit 2)."""
    assert call(plan.COMMAND, recipe(tmp_path, SMOLLM2), *flags) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_unknown_model_type_is_named(tmp_path, capsys):
    assert call(plan.COMMAND, recipe(tmp_path, {"model_type": "mamba"})) == 2
    assert "model_type 'mamba' is not known to the cost model" in capsys.readouterr().err


def test_every_table_entry_has_a_source():
    """Each accelerator names its source and the day, has dense FLOP/s that halve with the width, and a price is
    nowhere."""
    table = known({})
    assert {"a100-40", "a100-80", "h100-sxm", "h200", "b200", "gb200", "mi300x", "l40s", "cpu"} <= set(table)
    for name, entry in table.items():
        assert entry.source and entry.date and not any("price" in key for key in vars(entry))
        if not entry.cpu:
            assert entry.source.startswith("https://") and entry.tflops["bfloat16"] == entry.tflops["float16"]
            assert entry.flops("fp8" if "fp8" in entry.tflops else "bfloat16") >= entry.flops("bfloat16"), name


def test_this_machine_is_measured():
    """The probe gives an entry with figures of this machine, which a plan takes as it takes one of the table."""
    found = probe.measure(torch.device("cpu"), ["float32"], budget=0.01)
    assert found.measured and found.cpu and found.layer_us > 0 and found.memory_gb > 0.1
    assert 1e-4 < found.bandwidth_tb_s < 10 and 1e-5 < found.tflops["float32"] < 1000


def test_plan_of_this_machine_uses_the_probe(tmp_path, monkeypatch):
    """plan.hardware: this-machine, the default, takes what was measured, in the dtypes of target and training."""
    asked = []

    def measure(device, dtypes):
        asked.append((device.type, dtypes))
        return known({})["cpu"]

    monkeypatch.setattr("eval.plan_machine.measure", measure)
    path = recipe(tmp_path, SMOLLM2, plan={"hardware": "this-machine"}, target={"device": "cpu", "threads": 1})
    found = plan.make(load_recipe(path))
    assert asked == [("cpu", ["bfloat16", "bfloat16"])] and found["hardware"]["name"] == "this-machine"
    console = Console(record=True, width=200)
    plan.show(found, console)
    assert "docs/results.md" in console.export_text()
