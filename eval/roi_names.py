"""Targets, GPUs and drafters by the names that public points, claims and files of others give them."""

import re
from typing import Any

from recipes.cost import Format
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.hardware import Hardware, spelt
from recipes.model_shape import ModelShape
from recipes.named_shapes import named, short_shape
from recipes.speculation import IN_TURNS, KINDS, OVERLAP, Draft, Place, some_layers

DRAFT_VOCAB = 32000
ALIASES = {  # kind: what others call it, letters and digits only
    "eagle3": "eagle3 eagle3chain eagle3tree eagleiii",
    "eagle": "eagle eagle1 eagle2",
    "parallel": "parallel dflash pard peagle paralleleagle blockdiffusion parallelspec",
    "medusa": "medusa medusa1 medusa2 heads",
    "mtp": "mtp nextn deepseekmtp multitokenprediction",
    "lookup": "lookup ngram promptlookup pld suffix suffixdecoding",
    "none": "none ar autoregressive plain vanilla baseline nospeculation",
}
EAGLES = ("eagle3", "parallel")  # kinds of the same layers, taps and draft vocabulary
OWN_WEIGHTS = ("medusa", "small_lm")  # kinds without sizes in a file whose weights have bits of their own
KIND_OF = {word: kind for kind, words in ALIASES.items() for word in words.split()}


def kind_of(name: str) -> str:
    """The kind that this name means ('EAGLE-3', 'n-gram', 'DFlash'), or the name itself."""
    return KIND_OF.get(re.sub(r"[^a-z0-9]", "", name.lower()), name)


def hardware_named(name: str, custom: dict | None = None) -> Hardware:
    """An accelerator by the name that points and claims use: 'H100 SXM', 'A100 80G', 'RTX 3090'. ConfigError names the
    known ones."""
    return spelt(name, custom or {})[1]


def products_dtype(bits: float, gpu: Hardware) -> str:
    """The dtype in which an engine multiplies weights of so many bits on this GPU."""
    return "fp8" if 8 <= bits < 9 and "fp8" in gpu.tflops else "bfloat16"


def place_of(model: str, hw: str, ranks: int, bits: float, models: dict[str, Any]) -> Place:
    """A target of this name on GPUs of this name; `bits` 0: the model's own."""
    short = named(model, models)
    shape, gpu = short_shape(short, f"model {model}"), hardware_named(hw)
    bits = bits or short.get("bits", 16)
    keep = Format(bits, 16, 16, ranks)
    return Place(shape, keep, gpu.bandwidth_tb_s * 1e12, gpu.flops(products_dtype(bits, gpu)), gpu.link_gb_s * 1e9,
                 overlap=IN_TURNS if gpu.cpu else OVERLAP)


def eagle_size(shape: ModelShape, taps: int = 3, draft_vocab: int = DRAFT_VOCAB, layers: int = 1) -> DraftSize:
    """An EAGLE-3 drafter as wide as its target, with its heads; an MLA or expert target gives it the dense width that
    it has, or three times the hidden size."""
    a, H = shape.attention, shape.hidden
    dim = a.cached // (2 * a.kv_heads) if a.kv_heads else 128
    width = max((m.out for m in shape.matrices if m.name == "mlp in"), default=3 * H)
    return DraftSize(H, H, taps, a.heads, a.kv_heads or a.heads, dim, width, draft_vocab, shape.vocab, layers=layers)


def draft_of(name: str, shape: ModelShape, models: dict[str, Any] | None = None, layers: int = 0, vocab: int = 0,
             blocks: int = 1) -> Draft:
    """A drafter of this kind, or the standalone model of this name. `layers` of a layer_cut or a small_lm: 0 is a
    third of the target's; of EAGLE-3: 0 is one; `vocab` that it proposes: 0 is 32,000; `vocab`, `blocks` of Medusa's
    heads as in Draft. EAGLE of the first two papers reads one state and scores the whole vocabulary. ConfigError for
    neither."""
    kind = kind_of(name)
    if kind in EAGLES:
        return Draft(kind, eagle_size(shape, draft_vocab=vocab or DRAFT_VOCAB, layers=layers or 1))
    if kind == "eagle":
        return Draft("eagle3", eagle_size(shape, taps=1, draft_vocab=shape.vocab))
    if kind in ("layer_cut", "small_lm"):  # the second has weights of its own
        count = layers or max(1, shape.layers // 3)
        return Draft(kind, layers=count) if kind == "layer_cut" else Draft("model", model=some_layers(shape, count))
    if kind == "medusa":
        return Draft(kind, vocab=vocab, blocks=blocks)
    if kind in KINDS and kind != "model":
        return Draft(kind)
    try:
        short = named(name, models)
    except ConfigError as error:
        raise ConfigError(f"draft = {name}: no kind of drafter ({', '.join(ALIASES)}, layer_cut), and as a standalone "
                          f"model: {error}") from None
    return Draft("model", model=short_shape(short, f"draft {name}"), bits=short.get("bits", 16))
