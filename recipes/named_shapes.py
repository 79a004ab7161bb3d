"""Sizes of targets by name (recipes/shapes.json), in the short form that a claim or a set of public points uses.

Short form: L layers, d hidden, heads, kv_heads, head_dim, ff, V vocabulary, tied; of experts: experts, top_k,
expert_ff, shared_experts, dense_layers, dense_ff; `windowed` layers that see `window` positions only; `attention`
"MLA (...)"; bits of its weights where not 16. `as`: the sizes are those of another name.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from recipes.errors import ConfigError
from recipes.model_shape import Attention, Matrix, ModelShape

TABLE = Path(__file__).resolve().parent / "shapes.json"
MLA_HEAD = 128  # width of a head of keys and of values in every known MLA model
# Parts of a name that leave the sizes as they are: what it was tuned for, and the month of a release.
TUNED = re.compile(r"-(instruct|chat|base|it|hf|(thinking-)?\d{4}|v0\.\d|v1\.5)(?=-|$)")
SIZES = ("L", "d", "heads", "kv_heads", "head_dim", "ff", "V", "experts", "top_k", "expert_ff", "shared_experts",
         "dense_layers", "dense_ff", "windowed", "window")


@cache
def table() -> dict[str, dict[str, Any]]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def spelling(name: str) -> tuple[str, dict[str, Any]]:
    """(name as the table spells it, what else it says) of 'meta-llama/Llama-3.3-70B-Instruct' and the like."""
    short = name.strip().lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-").removeprefix("meta-")
    short = re.sub(r"^(llama|qwen|vicuna)-?(?=\d)", lambda m: m[1] + ("" if m[1] == "qwen" else "-"), short)
    said = {"bits": 8} if re.search(r"-fp8(?=-|$)", short) else {}
    return TUNED.sub("", re.sub(r"-fp8(?=-|$)", "", short)), said


def named(name: str, further: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The short form of this name, also in a usual spelling; `further` entries go before the table's, unless they have
    no sizes. ConfigError names the known ones."""
    short, said = spelling(name)
    for key, more in ((name, {}), (short, said)):
        for entries in (further or {}, table()):
            entry = entries.get(key)
            entry = table()[entry["as"]] if isinstance(entry, dict) and "as" in entry else entry
            if isinstance(entry, dict) and "L" in entry:
                return entry | more if more else entry
    raise ConfigError(f"model = {name}: unknown; known: {', '.join({**table(), **(further or {})})}")


def short_shape(c: dict[str, Any], where: str) -> ModelShape:
    """The sizes of a short form. ConfigError names one that is missing or no size."""
    for key in SIZES:
        if key in c and (isinstance(c[key], bool) or not isinstance(c[key], int) or c[key] < 0):
            raise ConfigError(f"{where}: {key} = {c[key]!r}: must be a whole number")
    try:
        return _read(c, where)
    except KeyError as error:
        raise ConfigError(f"{where}: has no {error.args[0]}") from None


def _read(c: dict[str, Any], where: str) -> ModelShape:
    L, d = c["L"], c["d"]
    attention, matrices = _latent(c) if str(c.get("attention", "")).startswith("MLA") else _grouped(c)
    matrices = [Matrix(m.name, m.out, m.inp, m.count * L) for m in matrices]
    E = c.get("experts", 0)
    dense = c.get("dense_layers", 0) if E else L
    if dense:
        width = c["dense_ff"] if E else c["ff"]
        matrices += [Matrix("mlp in", width, d, 2 * dense), Matrix("mlp out", d, width, dense)]
    if E:
        width, moe = c["expert_ff"], L - dense
        shared = c.get("shared_experts", 0)
        matrices += [Matrix("router", E, d, moe), Matrix("expert in", width, d, 2 * moe, E, c["top_k"]),
                     Matrix("expert out", d, width, moe, E, c["top_k"])]
        if shared:
            matrices += [Matrix("shared in", shared * width, d, 2 * moe), Matrix("shared out", d, shared * width, moe)]
    return ModelShape(where, L, d, c["V"], attention, tuple(matrices), (2 * L + 1) * d, bool(c.get("tied", False)),
                      c.get("windowed", 0), c.get("window", 0))


def _grouped(c: dict[str, Any]) -> tuple[Attention, list[Matrix]]:
    heads, kv, dim, d = c["heads"], c["kv_heads"], c["head_dim"], c["d"]
    cached, each = 2 * kv * dim, 4 * heads * dim
    return Attention(heads, kv, cached, cached, each, each), [
        Matrix("q", heads * dim, d), Matrix("kv", kv * dim, d, 2), Matrix("o", d, heads * dim)]


def _latent(c: dict[str, Any]) -> tuple[Attention, list[Matrix]]:
    found = {name: re.search(rf"{name} (\d+)", c["attention"]) for name in ("q_lora", "kv_lora", "rope")}
    q, latent, rope = (int(m[1]) if m else _no(name) for name, m in found.items())
    heads, d = c["heads"], c["d"]
    each = 2 * heads * (2 * MLA_HEAD + rope)
    return Attention(heads, 0, latent + rope, heads * (2 * MLA_HEAD + rope), 2 * heads * (2 * latent + rope), each), [
        Matrix("q down", q, d), Matrix("q up", heads * (MLA_HEAD + rope), q), Matrix("kv down", latent + rope, d),
        Matrix("kv up", 2 * heads * MLA_HEAD, latent), Matrix("o", d, heads * MLA_HEAD)]


def _no(name: str) -> int:
    raise KeyError(f"{name} in its attention")
