"""The trace store: a manifest, then safetensors shards, each complete or absent.

A shard holds whole rows end to end. `NAME.safetensors` is renamed into place first and `NAME.json` (row ids,
lengths, checksum) after it: a shard without its list does not exist for a reader. States stored in 8 bits have
their scales beside them (data/codec.py); the reader returns them as float32.
Legend: T tokens of a shard, F positions with a stored final state, n*H tapped states, R rows.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.codec import decode, encode, scaled
from recipes import storage
from recipes.errors import MAKE_ROOM, ConfigError, RunError
from recipes.files import sha256_file, sha256_json, sync_folder, write_json

FORMAT = "drafthouse.traces/1"


@dataclass
class TraceRow:
    """One traced conversation, ready for a drafter.

    ids [T] int64, turns [T] int64 (assistant turn number; -1 in a marked user turn, see trace.user_turns; 0
    otherwise), taps [T, n*H], final [F, H] after the final norm at exactly the positions of `final_at` [F]: those
    whose next token has a turn.
    tail: greedy tokens beyond the answer's end, so that a replay knows what the last drafts met.
    off_policy: the answers were given (generation.answers: keep), not the target's own.
    finish: how the last answer ended, "stop" or "length"; empty in folders from before it was listed.
    """

    id: str
    split: str
    ids: Tensor
    turns: Tensor
    taps: Tensor
    final: Tensor
    tail: list[int]
    off_policy: bool = False
    finish: str = ""

    @property
    def final_at(self) -> Tensor:
        return final_positions(self.turns)


def final_positions(turns: Tensor) -> Tensor:
    """Positions p whose next token p+1 has a turn: [F] int64."""
    return turns[1:].nonzero()[:, 0]


def row_bytes(tokens: int, finals: int, taps_width: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes that one row takes in a shard of this storage dtype, headers aside; taps_width 0: without states."""
    return storage.row_bytes(tokens, finals, taps_width // hidden, hidden, dtype.itemsize, scaled(dtype))


@dataclass
class Shard:
    """Rows laid end to end and encoded, ready to be written, and what their list says of each."""

    tensors: dict[str, Tensor]
    rows: list[dict[str, Any]]


def shard_of(rows: list[TraceRow], dtype: torch.dtype) -> Shard:
    """The rows as a shard, to be made by the thread that computes: arithmetic of another one has threads of its own,
    and once they are more than the cores, OpenMP lets all of them sleep at each barrier (docs/results.md)."""
    return Shard(pack(rows, dtype), [
        {"id": r.id, "split": r.split, "tokens": len(r.ids), "finals": len(r.final), "tail": r.tail,
         "off_policy": r.off_policy} | ({"finish": r.finish} if r.finish else {}) for r in rows])


def pack(rows: list[TraceRow], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a shard: ids [T], turns [T], taps [T, n*H], final [F, H], for 8 bits taps_scale [T, n] and
    final_scale [F, 1]."""
    if not rows:
        empty = {"taps": torch.zeros(0, 0, dtype=dtype), "final": torch.zeros(0, 0, dtype=dtype)}
        scales = {"taps_scale": torch.zeros(0, 0), "final_scale": torch.zeros(0, 0)} if scaled(dtype) else {}
        return {"ids": torch.zeros(0, dtype=torch.long), "turns": torch.zeros(0, dtype=torch.int16)} | empty | scales
    tensors = {"ids": torch.cat([r.ids for r in rows]).long(), "turns": torch.cat([r.turns for r in rows]).short()}
    hidden = max(1, rows[0].final.shape[1])  # 0 in rows without states
    for part, n in (("taps", rows[0].taps.shape[1] // hidden), ("final", 1)):
        tensors[part], scales = encode(torch.cat([getattr(r, part) for r in rows]), n, dtype)
        if scales is not None:
            tensors[f"{part}_scale"] = scales
    return tensors


def write_shard(folder: Path, name: str, shard: Shard, bad: dict[str, str], key: str | None = None) -> None:
    """Writes a shard: temporary name, fsync, rename, then its list. `bad` names rows left out
    and why; `key` is the manifest's, which ties the shard to its trace set.
    Raises RunError where the file system refuses it (full, read-only); no temporary file is left."""
    path = folder / f"{name}.safetensors"
    temporary = folder / f".{name}.tmp"
    try:
        save_file(shard.tensors, temporary)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        checksum, size = sha256_file(temporary), temporary.stat().st_size
        os.replace(temporary, path)
        sync_folder(folder)
        listed = {"name": name, "key": key, "sha256": checksum, "bytes": size, "bad": bad, "rows": shard.rows}
        write_json(folder / f"{name}.json", listed | {"list_sha256": list_digest(listed)})
    except (OSError, SafetensorError) as error:
        needed = sum(t.nbytes for t in shard.tensors.values()) / 1e6
        raise RunError(f"{path}: cannot be written ({needed:.0f} MB): {getattr(error, 'strerror', None) or error}; "
                       f"{MAKE_ROOM}") from None
    finally:
        temporary.unlink(missing_ok=True)


def list_digest(listed: dict[str, Any]) -> str:
    """Checksum of a shard's list, itself left out."""
    return sha256_json({key: value for key, value in listed.items() if key != "list_sha256"})


def list_intact(listed: dict[str, Any], name: str) -> bool:
    """True where the list is as it was written and under its own name; lists before these two fields pass."""
    return listed.get("name", name) == name and listed.get("list_sha256") in (None, list_digest(listed))


def shard_complete(folder: Path, name: str, ids: list[str], key: str) -> bool:
    """True where the shard exists, is whole, of this trace set, and holds exactly these rows (bad ones counted)."""
    try:
        listed = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        size = (folder / f"{name}.safetensors").stat().st_size
        own = listed["key"] == key and list_intact(listed, name)
        present = sorted([r["id"] for r in listed["rows"]] + list(listed["bad"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return own and size == listed["bytes"] and present == sorted(ids) and (
        sha256_file(folder / f"{name}.safetensors") == listed["sha256"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a trace folder. Raises RunError where there is none of this format."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RunError(f"{folder / 'manifest.json'}: missing or unreadable; run `make trace` first") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise RunError(f"{folder}: format {found!r}, this version reads {FORMAT!r}")
    return manifest


def check_mode(folder: Path, manifest: dict[str, Any], mode: str) -> None:
    """ConfigError where the folder is not of this mode: one without states is never taken for a store."""
    held = manifest.get("mode", "store")
    if held != mode:
        fits = "store" if held == "store" else "online or cache"
        raise ConfigError(f"{folder}: was traced for trace.mode = {held}; set trace.mode to {fits}, or run `make "
                          "trace` under another name")


def bad_rows(folder: Path, name: str) -> int:
    """Rows that a complete shard lists as left out."""
    return len(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["bad"])


@dataclass
class _Place:
    shard: str
    token: int
    final: int
    listed: dict[str, Any]


class Listed:
    """What the lists tell of rows by index, without reading one."""

    places: list

    def __len__(self) -> int:
        return len(self.places)

    def tokens(self, index: int) -> int:
        """Length of a row without reading it."""
        return self.places[index].listed["tokens"]

    def supervised(self, index: int) -> int:
        """Supervised tokens of a row without reading it."""
        return self.places[index].listed["finals"]

    def overrun(self, index: int) -> int:
        """Greedy tokens beyond the end of a row, without reading it."""
        return len(self.places[index].listed["tail"])

    def shard(self, index: int) -> str:
        """The shard that holds a row, without reading it."""
        return self.places[index].shard

    def split(self, name: str) -> list[int]:
        """Indices of the rows of a split, in stored order."""
        return [i for i, place in enumerate(self.places) if place.listed["split"] == name]


class ShardReader(Listed):
    """Rows of complete shards by index, read by mmap; every shard's checksum is verified when it is opened.
    States come back in their storage precision, those stored in 8 bits as float32."""

    def __init__(self, shards: Path, key: str) -> None:
        """Opens nothing yet. `shards`: their folder; `key`: the trace set that they must belong to."""
        self.shards, self.key = shards, key
        self.places: list[_Place] = []
        self.files: dict[str, Any] = {}
        self.scaled: dict[str, bool] = {}

    def index(self, name: str) -> None:
        """Adds the rows of a shard. Raises RunError where it is not complete, not intact, or of another set."""
        path = self.shards / f"{name}.safetensors"
        places: list[_Place] = []
        try:
            listed = json.loads((self.shards / f"{name}.json").read_text(encoding="utf-8"))
            if sha256_file(path) != listed["sha256"]:
                raise RunError(f"{path}: checksum differs from its list; `make inspect ARGS=--repair` makes it again")
            if listed["key"] != self.key:
                raise RunError(f"{path}: belongs to another trace set; `make inspect ARGS=--repair` makes it again")
            file = safe_open(path, framework="pt")
            token = final = 0
            for row in listed["rows"]:
                places.append(_Place(name, token, final, row))
                token += row["tokens"]
                final += row["finals"]
            held = [file.get_slice(part).get_shape()[0] for part in ("ids", "turns", "taps", "final")]
            has_scales = "taps_scale" in file.keys()
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            raise RunError(f"{path}: missing or torn; run `make trace` again to write it") from None
        if held != [token, token, token, final]:
            raise RunError(f"{path}: its list counts {token} tokens and {final} final states, the shard holds {held}; "
                           "`make inspect ARGS=--repair` makes it again")
        if not list_intact(listed, name):
            raise RunError(f"{self.shards / f'{name}.json'}: renamed or edited since it was written; `make inspect "
                           "ARGS=--repair` makes it again")
        self.places += places
        self.files[name], self.scaled[name] = file, has_scales

    def states(self, shard: str, part: str, place: slice) -> Tensor:
        """Stored states of a shard in float precision: [rows of `place`, width]."""
        file = self.files[shard]
        scales = file.get_slice(f"{part}_scale")[place] if self.scaled[shard] else None
        return decode(file.get_slice(part)[place], scales)

    def __getitem__(self, index: int) -> TraceRow:
        place = self.places[index]
        file, row = self.files[place.shard], place.listed
        tokens = slice(place.token, place.token + row["tokens"])
        finals = slice(place.final, place.final + row["finals"])
        return TraceRow(
            id=row["id"], split=row["split"], tail=row["tail"], off_policy=row.get("off_policy", False),
            finish=row.get("finish", ""),
            ids=file.get_slice("ids")[tokens], turns=file.get_slice("turns")[tokens].long(),
            taps=self.states(place.shard, "taps", tokens), final=self.states(place.shard, "final", finals),
        )


class TraceReader(ShardReader):
    """Rows of a finished trace folder."""

    def __init__(self, folder: Path, shards: list[str] | None = None, mode: str = "store") -> None:
        """Opens the folder, or only the named shards. Rows of a folder of mode `online` have states of width 0
        (data/online.py). Raises RunError where they are not a complete store of this format, ConfigError where the
        folder is of another mode."""
        self.manifest = read_manifest(folder)
        check_mode(folder, self.manifest, mode)
        super().__init__(folder / "shards", self.manifest.get("key"))
        self.folder = folder
        for name in self.manifest["shards"] if shards is None else shards:
            self.index(name)
        if not self.places:
            raise RunError(f"{folder}: holds no rows")
