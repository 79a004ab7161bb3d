"""`make inspect`: what a trace folder holds, whether it is whole and right, and how to mend it.

Run as `python -m data.tracetool --config RECIPE [--verify | --repair]`. Inspecting and verifying write nothing. Do not
repair a folder that another process is writing: its temporary files would be taken for those of a killed run.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from data.capture import Conversation, capture
from data.codec import DTYPES
from data.collect import Collector, collect
from data.compare import NOISE, compare
from data.place import LocalPlace, open_place
from data.prompts import hold_out
from data.remote import Remote
from data.settings import describe
from data.store import TraceReader
from data.tracecheck import Fault, Findings, check_folder, check_settings
from drafters.target import Target
from drafters.tensor_parallel import lead, open_target
from recipes.cli import Command, process
from recipes.errors import ConfigError, RunError
from recipes.launched import processes
from recipes.schema import Recipe
from recipes.schema import Trace as TraceSection

SHOWN = 16  # hex digits of a fingerprint

console = Console()


def recompute(place: LocalPlace | Remote, found: Findings, target: Target, section: TraceSection) -> list[Fault]:
    """Computes `trace.verify_rows` rows of the intact shards again with the target and compares every state.

    Tolerance of each number: the storage dtype's error bound, and NOISE of the target's dtype times the largest
    number of its state. The rows are the smallest by a hash of trace.verify_seed and id.
    """
    at = {row["id"]: name for name in found.intact for row in found.lists[name]["rows"]}
    chosen = hold_out(list(at), section.verify_rows, section.verify_seed)
    if not chosen or found.manifest.get("mode", "store") != "store":  # nothing stored that could be compared
        return []
    dtype, faults, worst = DTYPES[found.manifest["dtype"]], [], 0.0
    for name in sorted({at[i] for i in chosen}):
        with place.borrowed(name):
            reader = TraceReader(place.folder, [name])
            rows = [reader[i] for i, row in enumerate(found.lists[name]["rows"]) if row["id"] in chosen]
        for row in rows:
            again, bad = capture(target, [Conversation(row.id, row.split, row.ids.tolist(), row.turns.tolist(),
                                                       row.tail, "")], section.batch_tokens, torch.float32)
            what = bad.get(row.id, "")
            if again:
                ratio, what = compare(row, again[0], dtype, NOISE[target.dtype])
                worst = max(worst, ratio)
            if what:
                faults.append(Fault(f"shards/{name}.safetensors", row.id, what))
    console.print(f"recomputed {len(chosen)} rows: largest difference {worst:.2g} of what {found.manifest['dtype']} "
                  "and the order of sums allow", soft_wrap=True)
    return faults


def verify(recipe: Recipe, place: LocalPlace | Remote, target: Target) -> Findings:
    """Every fault of the folder: files, settings against recipe and target, a sample of rows computed again."""
    place.pull()
    found = check_folder(place.folder, True, place.borrowed)
    if found.manifest:
        found.faults += [Fault(name, "", "shard that the manifest does not name")
                         for name in place.unnamed(found.manifest["shards"])]
        other = check_settings(place.folder, found.manifest, describe(recipe, target))
        found.faults += other
        if not other:  # the states of another target or of other layers would only repeat it
            found.faults += recompute(place, found, target, recipe.trace)
    return found


def report(faults: list[Fault]) -> None:
    for fault in faults:
        print(f"fault: {fault}")


def remove(place: LocalPlace | Remote, faults: list[Fault]) -> None:
    """Deletes the files at fault, here and behind a URL; of a shard both, so that it counts as not made. settings.json
    stays: it says what the folder is."""
    for file in sorted({f.file for f in faults} - {"settings.json"}):
        path = Path(file)
        temporary = path.name.startswith(".")
        both = path.parent.name == "shards" and not temporary
        for gone in [path.with_suffix(".safetensors"), path.with_suffix(".json")] if both else [path]:
            if place.delete(gone.as_posix()):
                print(f"removed: {gone}")


def repair(recipe: Recipe) -> Findings:
    """Removes what is broken and lets the collector make it again, until a verify is clean. A broken manifest is made
    anew first, since it alone tells which shards are at fault. ConfigError where the folder is of other settings."""
    collector = Collector(recipe)
    place = collector.place
    with collector.at_work():
        pass  # it is of these settings, and nobody works there
    found = verify(recipe, place, collector.target)
    for _ in range(2):
        if found.faults:
            report(found.faults)
            remove(place, [f for f in found.faults if f.file == "manifest.json"] or found.faults)
            place.pull()
            collect(collector)
            found = verify(recipe, place, collector.target)
    return found


def table(place: LocalPlace | Remote, found: Findings) -> Table:
    """What the folder holds, as its manifest and lists say; bytes as they are on the disk or behind the URL."""
    manifest, lists = found.manifest, found.lists
    rows = [row for listed in lists.values() for row in listed["rows"]]
    tokens = sum(row["tokens"] for row in rows)
    size = place.shard_bytes(list(lists))
    left_out = sum(len(listed["bad"]) for listed in lists.values())
    splits = Counter(row["split"] for row in rows)
    lines: dict[str, Any] = {
        "model": manifest.get("model", ""),
        "mode": manifest.get("mode", "store"),
        "rows": f"{len(rows)} ({counted(splits)}), {left_out} left out for NaN or Inf",
        "tokens": f"{tokens}, of them supervised in training {manifest['supervised_tokens']}",
        "final states": sum(row["finals"] for row in rows),
        "answers ended by": counted(manifest["finish"]),
        "prompts dropped": counted(manifest["dropped"]) or "none",
        "left out of answers": counted(manifest.get("answers_left_out", {})) or "none",
        "layers": f"{manifest['layers']}, hidden size {manifest['hidden_size']}",
        "dtype": manifest["dtype"],
        "bytes": f"{size} ({size / manifest['predicted_bytes'] - 1:+.2%} of predicted)" if size else "0",
        "bytes per token": f"{size / max(tokens, 1):.0f}",
        "shards": f"{len(lists)} of {len(manifest['shards'])}",
        "key": manifest["key"][:SHOWN],
    } | {f"target {part}": str(value)[:SHOWN] for part, value in manifest["target"].items()}
    out = Table("traces", place.url, show_lines=False)
    for name, value in lines.items():
        out.add_row(name, str(value))
    return out


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def look(recipe: Recipe, switches: set[str]) -> None:
    """The whole stage. Raises RunError where there are no traces or where anything is wrong with them."""
    place = open_place(recipe.trace, Path(recipe.runs_dir) / recipe.name)
    place.pull()
    if place.empty():
        raise RunError(f"{place.url}: no traces; run `make trace` first")
    if not (place.folder / "manifest.json").exists() and not any((place.folder / "shards").glob("*")):
        units = len(list(place.folder.glob("answers/*.json")))
        raise RunError(f"{place.url}: no states yet ({units} finished units of answers); run `make trace` to its end")
    checks = switches & {"verify", "repair"}
    if "repair" in switches:
        found = repair(recipe)
    elif checks:
        found = verify(recipe, place, open_target(recipe.target, recipe.trace.layers))
    else:
        found = check_folder(place.folder, content=False)
    if found.manifest:
        console.print(table(place, found))
    report(found.faults)
    if found.faults:
        foreign = any("of another configuration" in f.what and f.file == "settings.json" for f in found.faults)
        way = ("these traces are another recipe's or target's: use another `name`" if foreign
               else "`--repair` removes what is broken and makes it again")
        raise RunError(f"{place.url}: {len(found.faults)} faults; {way}")
    if checks:
        print("every checksum, fingerprint and recomputed row holds")


def main(recipe: Recipe, switches: set[str]) -> None:
    if processes() > 1 and not recipe.target.tp_plan:
        raise ConfigError(f"make inspect: {processes()} processes were started; start one, without a launcher")
    if switches:
        lead(recipe.target, lambda: look(recipe, switches))
    else:  # needs no target
        look(recipe, switches)


COMMAND = Command("make inspect", "Prints what a trace folder holds; checks it; mends it.", main, {
    "verify": "check every file, fingerprint and tensor, and recompute a sample of rows (trace.verify_rows)",
    "repair": "remove what is broken and collect it again, then verify"})

if __name__ == "__main__":
    process(COMMAND)
