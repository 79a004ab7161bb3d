"""What is wrong with a trace folder: every file against its manifest, its lists, its checksums and itself.

Nothing here writes, and no target is needed. Legend: T tokens of a shard, F stored final states, n taps, H hidden.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data.backends.units import unit_intact
from data.codec import DTYPES, scaled
from data.settings import explicit, read_object
from data.store import FORMAT, final_positions, list_intact
from recipes.files import sha256_file, sha256_json
from recipes.provenance import differences

MANIFEST_FIELDS = {"key": str, "target": dict, "layers": list, "hidden_size": int, "vocab_size": int, "dtype": str,
                   "shards": list, "rows": int, "tokens": int, "supervised_tokens": int, "predicted_bytes": int,
                   "finish": dict, "dropped": dict}
ROW_FIELDS = {"id": str, "split": str, "tokens": int, "finals": int, "tail": list}
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `file` relative to the trace folder, `row` empty where it is the whole file."""

    file: str
    row: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {f'row {self.row}: ' if self.row else ''}{self.what}"


@dataclass
class Findings:
    """A folder's manifest (None: unusable), the lists of its readable shards, the faultless shards, the faults."""

    manifest: dict[str, Any] | None = None
    lists: dict[str, dict[str, Any]] = field(default_factory=dict)
    intact: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def check_folder(folder: Path, content: bool = True,
                 borrowed: Callable[[str], AbstractContextManager] = nullcontext) -> Findings:
    """Every fault of the folder; without `content` only manifest and lists are read. `borrowed(name)` has the tensors
    of a shard in the folder while they are read."""
    found = Findings()
    found.manifest, found.faults = read_manifest(folder)
    names = found.manifest["shards"] if found.manifest else None
    for name in names or []:
        listed, faults = read_list(folder, name, found.manifest)
        if listed is not None:
            found.lists[name] = listed
            if content and not faults:
                with borrowed(name):
                    faults = check_file(folder, name, listed, found.manifest)
        if not faults:
            found.intact.append(name)
        found.faults += faults
    if found.manifest and len(found.lists) == len(names):
        found.faults += check_totals(found.manifest, found.lists)
    found.faults += strays(folder, names)
    if names and len(found.intact) == len(names):
        found.faults += [Fault(path.relative_to(folder).as_posix(), "", "waits for no shard: left by a killed run")
                         for path in sorted(folder.glob("staged/[!.]*"))]
    return found


def lacking(value: Any, fields: dict[str, type]) -> str:
    """The first field that is absent or of another type; empty where none is."""
    if not isinstance(value, dict):
        return "object"
    return next((name for name, kind in fields.items() if not isinstance(value.get(name), kind)), "")


def read_manifest(folder: Path) -> tuple[dict[str, Any] | None, list[Fault]]:
    manifest = read_object(folder / "manifest.json")
    if manifest is None:
        return None, [Fault("manifest.json", "", "missing or unreadable")]
    if manifest.get("format") != FORMAT:
        return None, [Fault("manifest.json", "", f"format {manifest.get('format')!r}, this version reads {FORMAT!r}")]
    absent = lacking(manifest, MANIFEST_FIELDS) or ("" if manifest["dtype"] in DTYPES else "dtype")
    if absent or not all(isinstance(name, str) and Path(name).name == name for name in manifest["shards"]):
        return None, [Fault("manifest.json", "", f"field {absent or 'shards'} is missing or not as written")]
    return manifest, []


def read_list(folder: Path, name: str, manifest: dict[str, Any]) -> tuple[dict[str, Any] | None, list[Fault]]:
    """A shard's list (None: unusable) and what is wrong with it."""
    file = f"shards/{name}.json"
    listed = read_object(folder / file)
    if listed is None:
        return None, [Fault(file, "", "missing or unreadable")]
    absent = lacking(listed, {"key": str, "sha256": str, "bytes": int, "bad": dict, "rows": list})
    absent = absent or next(filter(None, (lacking(row, ROW_FIELDS) for row in listed["rows"])), "")
    if absent:
        return None, [Fault(file, "", f"field {absent} is missing or not as written")]
    if listed["key"] != manifest["key"]:
        return listed, [Fault(file, "", "belongs to another trace set")]
    if not list_intact(listed, name):
        other = listed.get("name", name)
        return listed, [Fault(file, "", f"was written as {other}" if other != name else "edited since it was written")]
    return listed, []


def check_file(folder: Path, name: str, listed: dict[str, Any], manifest: dict[str, Any]) -> list[Fault]:
    """What is wrong with a shard's tensors. Where the bytes are not those that were written, that is all it says."""
    file = f"shards/{name}.safetensors"
    path = folder / file
    if not path.is_file():
        return [Fault(file, "", "missing")]
    size = path.stat().st_size
    if size != listed["bytes"]:
        return [Fault(file, "", f"holds {size} bytes of {listed['bytes']}")]
    if sha256_file(path) != listed["sha256"]:
        return [Fault(file, "", "checksum differs")]
    try:
        with safe_open(path, framework="pt") as shard:
            wrong = check_shapes(shard, listed, manifest)
            return [Fault(file, "", what) for what in wrong] or [
                Fault(file, row, what) for row, what in check_rows(shard, listed, manifest["vocab_size"])]
    except SafetensorError as error:
        return [Fault(file, "", f"not a safetensors file: {error}")]


def check_shapes(shard: Any, listed: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Names, shapes and dtypes of a shard's tensors against what list and manifest promise."""
    T, F = (sum(row[part] for row in listed["rows"]) for part in ("tokens", "finals"))
    n, H, dtype = len(manifest["layers"]), manifest["hidden_size"], DTYPES[manifest["dtype"]]
    if manifest.get("mode", "store") != "store":
        n, H, dtype = 0, 0, torch.float32
    wanted = {"ids": ([T], torch.int64), "turns": ([T], torch.int16), "taps": ([T, n * H], dtype),
              "final": ([F, H], dtype)}
    if scaled(dtype):
        wanted |= {"taps_scale": ([T, n], torch.float32), "final_scale": ([F, 1], torch.float32)}
    if set(shard.keys()) != set(wanted):
        return [f"holds tensors {sorted(shard.keys())}, should hold {sorted(wanted)}"]
    wrong = []
    for name, (shape, kind) in wanted.items():
        part = shard.get_slice(name)
        held = part[:0].dtype
        if held != kind or part.get_shape() != shape and listed["rows"]:
            wrong.append(f"{name} is {held} {part.get_shape()}, should be {kind} {shape}")
    return wrong


def check_rows(shard: Any, listed: dict[str, Any], vocab_size: int) -> list[tuple[str, str]]:
    """(row id, what) for each fault inside the rows of a shard whose shapes are right."""
    faults = []
    token = final = 0
    for row in listed["rows"]:
        tokens, finals = slice(token, token + row["tokens"]), slice(final, final + row["finals"])
        token, final = tokens.stop, finals.stop
        ids, turns = shard.get_slice("ids")[tokens], shard.get_slice("turns")[tokens]
        if row["split"] not in SPLITS:
            faults.append((row["id"], f"split {row['split']!r} is neither of {', '.join(SPLITS)}"))
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            faults.append((row["id"], "token ids outside the target's vocabulary, or none"))
        if len(final_positions(turns)) != row["finals"]:
            faults.append((row["id"], f"{row['finals']} final states for {len(final_positions(turns))} loss positions"))
        for part, place in (("taps", tokens), ("final", finals)):
            if not bool(torch.isfinite(shard.get_slice(part)[place].float()).all()):
                faults.append((row["id"], f"NaN or Inf in {part}"))
            scales = shard.get_slice(f"{part}_scale")[place] if f"{part}_scale" in shard.keys() else torch.ones(1)
            if not bool((torch.isfinite(scales) & (scales > 0)).all()):
                faults.append((row["id"], f"a scale of {part} is not a positive number"))
    return faults


def check_totals(manifest: dict[str, Any], lists: dict[str, dict[str, Any]]) -> list[Fault]:
    """Rows counted over all shards against the manifest; an id that stands twice; no row at all (case 35)."""
    faults = []
    ids = [row["id"] for listed in lists.values() for row in listed["rows"]]
    bad = sum(len(listed["bad"]) for listed in lists.values())
    if len(ids) + bad != manifest["rows"]:
        faults.append(Fault("manifest.json", "", f"counts {manifest['rows']} rows, the shards list {len(ids)} and "
                                                 f"{bad} left out"))
    if not ids:
        faults.append(Fault("manifest.json", "", "no shard holds a row"))
    twice = {i for i, n in Counter(ids).items() if n > 1}
    for name, listed in lists.items():
        faults += [Fault(f"shards/{name}.json", row["id"], "stands in the store twice")
                   for row in listed["rows"] if row["id"] in twice]
    return faults


def strays(folder: Path, names: list[str] | None) -> list[Fault]:
    """Temporary files that a kill left, units that cannot be read, shards that the manifest (if any) does not name."""
    faults = []
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name == ".lock":  # of a run of several processes that was refused or has failed
            continue
        if path.name.startswith("."):
            faults.append(Fault(file, "", "temporary file of a run that was killed"))
        elif path.parent.name in ("prompts", "answers") and path.suffix == ".json":
            unit = read_object(path)
            if lacking(unit, {"key": str, "answers": list}):
                faults.append(Fault(file, "", "torn or not a unit of answers"))
            elif not unit_intact(unit):
                faults.append(Fault(file, "", "edited since it was written"))
        elif (path.parent.name == "shards" and path.suffix in (".json", ".safetensors")
              and names is not None and path.stem not in names):
            faults.append(Fault(file, "", "shard that the manifest does not name"))
    return faults


def check_settings(folder: Path, manifest: dict[str, Any], now: dict[str, Any]) -> list[Fault]:
    """Every section of the settings that is not the recipe's and target's as they are `now` (cases 30, 36), and a
    manifest that is not of these settings."""
    earlier = read_object(folder / "settings.json")
    if earlier is None:
        return [Fault("settings.json", "", "missing or unreadable")]
    faults = [Fault("settings.json", "", f"of another configuration: {d}")
              for d in differences(explicit(earlier), explicit(now))]
    if manifest["key"] != sha256_json(earlier):
        faults.append(Fault("manifest.json", "", "of another configuration than settings.json"))
    claimed = {"target": manifest["target"], "layers": manifest["layers"], "dtype": manifest["dtype"]}
    actual = {"target": now["target"], "layers": now["trace"]["layers"], "dtype": now["trace"]["dtype"]}
    return faults + [Fault("manifest.json", "", f"of another configuration: {d}") for d in differences(claimed, actual)]
