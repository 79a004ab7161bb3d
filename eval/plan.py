"""`make plan`: memory per GPU, disk, time and cost of each stage on the recipe's hardware, before anything is rented.

Run as `python -m eval.plan --config RECIPE`. Prints a table with every assumption, writes runs/<name>/plan.json.
Arithmetic on config.json and the recipe; only `plan.hardware: this-machine` runs something, a probe of seconds.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import CONFIG_MAPPING, PretrainedConfig

from data.preview import duration
from drafters.registry import REGISTRY, entry, options_of
from drafters.target import default_layers, resolve_model
from eval.plan_load import loads
from eval.plan_machine import formats, hardware_of, machines
from eval.settings import greedy_of, how_of
from recipes import stages
from recipes.cli import Command, process
from recipes.cost import Format, dollars, weights_per_gpu
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.files import write_json
from recipes.hardware import Hardware
from recipes.model_shape import ModelShape, shape_of
from recipes.schema import Recipe
from recipes.stages import Judging, Load, Machine, Stage, Tracing, Training
from recipes.storage import STORED, row_bytes

SCHEMA = "drafthouse.plan/1"
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_config(recipe: Recipe) -> dict[str, Any]:
    """The target's config.json with its model type's defaults; nothing else of the target is read. ConfigError where it
    cannot be reached."""
    path = resolve_model(recipe.target)
    try:
        raw, _ = PretrainedConfig.get_config_dict(path)
        kind = raw.get("model_type")
        return CONFIG_MAPPING[kind].from_dict(raw).to_dict() if kind in CONFIG_MAPPING else raw
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"target.model = {recipe.target.model}: its config.json cannot be read: {first}") from None


def draft_size(recipe: Recipe, shape: ModelShape, config: dict[str, Any]) -> DraftSize:
    """The drafter that the recipe trains. ConfigError for a kind whose cost is not known."""
    cost = getattr(entry(recipe.drafter.kind).code, "cost", None)
    if cost is None:
        known = [kind for kind, one in REGISTRY.items() if hasattr(one.code, "cost")]
        raise ConfigError(f"drafter.kind = {recipe.drafter.kind}: its cost is not known yet; make plan knows "
                          f"{', '.join(known)}")
    taps = len(recipe.trace.layers or default_layers(shape.layers))
    return cost(options_of(recipe.drafter.kind, recipe.drafter.options), shape, config.get("text_config", config), taps)


def tracing(recipe: Recipe, taps: int) -> Tracing:
    section, backend = recipe.trace, recipe.generation.backend
    with_answers = backend == section.backend == "transformers" and not section.url
    states = "none" if section.mode != "store" else "with" if with_answers else "apart"
    answering = {"transformers": "eager", "logs": "none"}.get(backend, "engine")
    batch = recipe.generation.server.concurrency if backend == "openai" else recipe.generation.batch_size
    return Tracing(batch, states, section.dtype, taps, section.batch_tokens, states == "with", section.shard_mb * 1e6,
                   recipe.generation.unit_rows, answering, "engine" if section.backend == "vllm" else "eager")


def training(recipe: Recipe, size: DraftSize, load: Load) -> Training:
    options, section = options_of(recipe.drafter.kind, recipe.drafter.options), recipe.train
    held = row_bytes(load.tokens, load.finals, size.taps, size.target_hidden, *STORED[recipe.trace.dtype])
    kept = min(1.0, recipe.trace.cache_gb * 1e9 / max(1.0, held)) if recipe.trace.mode == "cache" else 0.0
    return Training(size, tuple(options.stages), options.depth_share, section.epochs, section.batch_rows,
                    section.accumulation, section.validate_every, section.save_every,
                    section.validation_draft_length, section.keep, recipe.plan.zero_stage,
                    section.dtype == "bfloat16", "stored" if recipe.trace.mode == "store" else "computed", kept,
                    recipe.trace.dtype, getattr(options, "depth_floor", 0.0))


def judging(recipe: Recipe, size: DraftSize) -> Judging:
    e, x = recipe.eval, recipe.export
    return Judging(size, e.draft_length, e.max_tokens, e.batch_size, e.lossless_prompts, e.speed_prompts,
                   e.speed_tokens, tuple(e.batch_sizes), e.sampling_contexts, e.sampling_draws, tuple(x.formats),
                   ITEM[x.dtype], x.check, x.check_prompts, x.check_tokens, greedy_of(e) != how_of(e))


def estimate(recipe: Recipe, shape: ModelShape, size: DraftSize, keeps: tuple[Format, Format, Format],
             machine: Machine, load: Load) -> dict[str, Stage]:
    """Every stage in one case."""
    answering, capturing, alone = keeps
    traced, judged = tracing(recipe, size.taps), judging(recipe, size)
    return {"trace": stages.trace(shape, answering, capturing, machine, load, traced),
            "train": stages.train(shape, alone, machine, load, training(recipe, size, load)),
            "export": stages.export(shape, alone, machine, load, judged),
            "eval": stages.evaluate(shape, alone, machine, load, judged)}


def ordered(pair: Iterable[float]) -> list[float]:
    return sorted(pair)


def make(recipe: Recipe, found: Hardware | None = None) -> dict[str, Any]:
    """The plan as plan.json holds it. `found`: the hardware, where it is not to be looked up or measured."""
    config = read_config(recipe)
    shape = shape_of(config, f"target.model = {recipe.target.model}")
    size = draft_size(recipe, shape, config)
    keeps = formats(recipe, shape, config)
    found = found or hardware_of(recipe)
    *hardware, assumed = machines(recipe, found, keeps[0].weight_bits, weights_per_gpu(shape, keeps[2]))
    *load, counted = loads(recipe, Path(recipe.runs_dir) / recipe.name)
    best, worst = (estimate(recipe, shape, size, keeps, m, l) for m, l in zip(hardware, load))
    price, gpus = recipe.roi.price_per_gpu_hour, recipe.plan.gpus
    table = {name: row(best[name], worst[name], gpus, price) for name in best}
    seconds = [sum(r["seconds"][i] for r in table.values()) for i in (0, 1)]
    disk = [sum(r["disk_bytes"][i] for r in table.values()) for i in (0, 1)]
    traced, trained = table["trace"], table["train"]
    peak = max(traced["disk_peak_bytes"][1], traced["disk_bytes"][1] + trained["disk_peak_bytes"][1], disk[1])
    return {"schema": SCHEMA, "name": recipe.name,
            "hardware": {"name": recipe.plan.hardware, "gpus": gpus, **asdict(found)},
            "target": {"model": recipe.target.model, "kind": shape.kind, "parameters": shape.parameters,
                       "active": shape.active, "weight_bits": keeps[2].weight_bits,
                       "cache_bytes_per_token": shape.cache_bytes(1, keeps[0].cache_bits, keeps[0].expanded)},
            "drafter": {"kind": recipe.drafter.kind, "parameters": size.parameters, "trained": size.trained},
            "load": [asdict(l) for l in load], "stages": table,
            "total": {"seconds": seconds, "disk_bytes": disk, "disk_peak_bytes": peak,
                      "cost": [dollars(s, gpus, price) for s in seconds] if price else None},
            "assumptions": [asdict(a) for a in [*counted, *assumed]], "warnings": warnings(recipe, found, table)}


def row(best: Stage, worst: Stage, gpus: int, price: float) -> dict[str, Any]:
    """One stage as plan.json holds it: each figure as [low, high]."""
    seconds = ordered((best.seconds, worst.seconds))
    return {"seconds": seconds, "memory_bytes": ordered((best.memory, worst.memory)),
            "disk_bytes": ordered((best.disk, worst.disk)), "disk_peak_bytes": ordered((best.peak, worst.peak)),
            "cost": [dollars(s, gpus, price) for s in seconds] if price else None,
            "parts": {name: ordered((best.parts[name], worst.parts[name])) for name in best.parts}}


def warnings(recipe: Recipe, found: Hardware, table: dict[str, Any]) -> list[str]:
    """What will not fit, or may not."""
    said = []
    for name, stage in table.items():
        low, high = (b / 1e9 for b in stage["memory_bytes"])
        if high > found.memory_gb:
            surely = "does" if low > found.memory_gb else "may"
            said.append(f"{name} {surely} not fit: {low:.1f} to {high:.1f} GB on a GPU of {found.memory_gb:.0f} GB; "
                        "raise plan.tensor_parallel, or lower the stage's batch")
    if recipe.plan.zero_stage == 3:
        said.append("plan.zero_stage = 3: make train takes stages 0 to 2 so far")
    return said


def figures(pair: list[float], unit: float, digits: int = 1) -> str:
    low, high = (f"{x / unit:,.{digits}f}" for x in pair)
    return low if low == high else f"{low} to {high}"


def span_of(pair: list[float]) -> str:
    low, high = (duration(s) for s in pair)
    return low if low == high else f"{low} to {high}"


def show(plan: dict[str, Any], console: Console) -> None:
    """The table, what it rests on, what to look out for."""
    hardware, target = plan["hardware"], plan["target"]
    table = Table("stage", "memory per GPU, GB", "disk, GB", "time", "cost", title_justify="left",
                  title=f"{plan['name']} on {hardware['gpus']} x {hardware['name']}")
    for name, stage in [*plan["stages"].items(), ("total", plan["total"])]:
        memory = figures(stage["memory_bytes"], 1e9) if "memory_bytes" in stage else ""
        cost = figures(stage["cost"], 1.0, 2) if stage["cost"] else "no price"
        table.add_row(name, memory, figures(stage["disk_bytes"], 1e9, 2), span_of(stage["seconds"]), cost)
    console.print(table)
    lines = [f"Target {target['model']} ({target['kind']}): {target['parameters'] / 1e9:.2f} B parameters, "
             f"{target['active'] / 1e9:.2f} B active, {target['cache_bytes_per_token'] / 1024:.1f} KiB of cache a "
             f"token. Drafter: {plan['drafter']['parameters'] / 1e6:.1f} M parameters.",
             f"Hardware: {hardware['note']}: {hardware['bandwidth_tb_s'] * 1e3:,.1f} GB/s, "
             + ", ".join(f"{k} {v:,.2f} TFLOP/s" for k, v in hardware["tflops"].items())
             + f" ({hardware['source']}, {hardware['date']}).",
             f"Disk at most {plan['total']['disk_peak_bytes'] / 1e9:,.2f} GB. An estimate, not a promise: what is "
             "assumed, best and worst case:"]
    for line in lines:
        console.print(Text(line))
    for a in plan["assumptions"]:
        console.print(Text(f"  {a['name']}: {a['best']:,.4g}, {a['worst']:,.4g} ({a['why']})"))
    for warning in plan["warnings"]:
        console.print(Text(f"warning: {warning}", "bold red"))


def main(recipe: Recipe, switches: set[str]) -> None:
    plan = make(recipe)
    folder = Path(recipe.runs_dir) / recipe.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the run's folder: {error.strerror}") from None
    write_json(folder / "plan.json", plan)
    show(plan, Console())
    print(f"plan: {folder / 'plan.json'}")


COMMAND = Command("make plan", "Estimates memory, disk, time and cost of each stage.", main)

if __name__ == "__main__":
    process(COMMAND)
