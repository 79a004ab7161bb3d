"""The drafter that a training run begins with: a fresh one, or an existing one that goes on (`drafter.init_from`).

What a checkpoint fixes (sizes, variants, taps) comes from it, and must not be contradicted by recipe or target; how it
is trained comes from the recipe. V target vocabulary, D draft vocabulary, H hidden size.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters import checkpoint, vocab
from drafters.export.foreign import Imported
from drafters.export.kinds import MASK_EMBEDDING, MASK_TOKEN
from drafters.registry import entry, options_of
from drafters.source import FIELD, find, read
from drafters.target import Target, default_layers
from recipes.errors import ConfigError
from recipes.schema import Drafter as Section

# Rotary kinds whose frequencies do not depend on the longest position: the drafter is trained for the target's.
ANY_LENGTH = ("default", "linear", "llama3")


@dataclass
class Start:
    """A drafter ready to be trained. `origin` is what a resume compares (None: fresh), `notes` are for the user."""

    drafter: Any
    options: Any
    origin: dict[str, str] | None = None
    notes: list[str] = field(default_factory=list)


def begin(section: Section, target: Target, counts: dict[int, int], seed: int) -> Start:
    """The drafter of a recipe for a loaded target; `counts`: how often each target token is to be predicted.

    Raises ConfigError naming file, key and value where the checkpoint of `drafter.init_from` does not fit.
    """
    options = options_of(section.kind, section.options)
    if not section.init_from:
        return Start(entry(section.kind).code.build(options, target, counts, seed), options)
    folder = find(section.init_from)
    if (folder / checkpoint.META).is_file():
        same_kind(checkpoint.read_meta(folder)["kind"], section, folder)
    found, digest = read(folder)
    same_kind(found.kind, section, folder)
    layers = check_fit(found, target, str(folder))
    stated = {key: value for key, value in asdict(options).items() if key in section.options}
    chosen = resolve(found, stated, target, section.vocabulary, str(folder))
    size = chosen["draft_vocab_size"]
    ids = found.ids.sort().values if section.vocabulary == "keep" else rebuilt(found.ids, counts, size, target)
    options = options_of(section.kind, section.options | chosen)
    drafter = drafter_of(found, ids, layers, options, target, longer=True)
    new = int((~torch.isin(ids, found.ids)).sum())
    notes = [f"starting from {folder} ({found.layout} layout), layers {layers}, {size} draft tokens, {new} of them new",
             *found.notes, *other_target(found, target)]
    return Start(drafter, options, {"sha256": digest, "vocabulary": section.vocabulary}, notes)


def same_kind(kind: str, section: Section, folder: Path) -> None:
    if kind != section.kind:
        raise ConfigError(f"{folder}: a drafter of kind {kind}, but drafter.kind = {section.kind}")


def drafter_of(found: Imported, ids: Tensor, layers: list[int], options: Any, target: Target, longer: bool) -> Any:
    """The drafter of an imported checkpoint with draft vocabulary `ids` [D], on a loaded target that it fits. longer:
    it is to be trained, for all positions of the target, where its rotary kind knows no longest one."""
    tensors = {name: t.float() for name, t in found.tensors.items()}
    if found.own_row is not None:  # engines embed the masks by the target's row where the folder has no table
        tensors.setdefault(MASK_EMBEDDING, target.embedding[found.own_row].float().cpu())
    tensors |= {name: head_rows(head, found.ids, ids, target.head_weight)
                for name, head in heads_of(found, target).items()}
    tensors |= dict(zip(("d2t", "t2d"), vocab.maps(ids, target.vocab_size)))
    shape = found.shape | {"draft_vocab_size": len(ids), "target_layers": target.depth}
    if longer and shape.get("rope_parameters", {}).get("rope_type") in ANY_LENGTH:
        shape["max_position_embeddings"] = target.max_length
    return entry(found.kind).code.load(options, shape, layers, tensors, target)


def taps_of(found: Imported, target: Target, where: str) -> list[int]:
    """The layers that the drafter taps, none where it reads none. ConfigError naming what does not fit a target of
    these sizes."""
    model = target.section.model
    for name, have in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden),
                       ("hidden_size", target.hidden), ("target_layers", target.depth)):
        said = found.shape.get(name)
        if said is not None and said != have:
            more = "; a drafter of another width than its target is not supported" if name == "hidden_size" else ""
            raise ConfigError(f"{where}: {found.places[name]} = {said}, but target.model = {model} has {have}: the "
                              f"drafter is for another target{more}")
    if found.carried is not None and not same_values(found.carried, target.head_weight.cpu()[found.ids]):
        raise ConfigError(f"{where}: the projection of all heads is not the head of target.model = {model}: the "
                          "drafter is for another target, or trained its own")
    if entry(found.kind).reads != "taps":
        return []
    try:
        layers = default_layers(target.depth) if found.layers is None else found.layers
    except ConfigError:
        raise ConfigError(f"{where}: {found.places['layers']} is absent, and engines' default does not fit a target of "
                          f"{target.depth} layers; write down there which layers the drafter was trained on") from None
    if layers and layers[-1] > target.depth:
        raise ConfigError(f"{said_layers(found, layers, where)}, but target.model = {model} has {target.depth} layers")
    return layers


def said_layers(found: Imported, layers: list[int], where: str) -> str:
    return f"{where}: {found.places['layers']} = {layers}{' (absent: what engines take)' * (found.layers is None)}"


def check_fit(found: Imported, target: Target, where: str) -> list[int]:
    """The layers that the drafter taps. ConfigError naming what does not fit this target, or its traces."""
    model, layers = target.section.model, taps_of(found, target, where)
    if entry(found.kind).reads != "taps":
        return layers
    if layers != target.layers:
        raise ConfigError(f"{said_layers(found, layers, where)}, but the target is tapped at {target.layers}; set "
                          f"trace.layers: {layers} and run `make trace` under another name")
    tables = [] if found.embedding is None else without(found.own_row, found.embedding, target.embedding.cpu())
    if tables and not same_values(*tables):
        raise ConfigError(f"{where}: embed_tokens.weight is not the embedding of target.model = {model}, which the "
                          "drafter here reads: it is for another target, or trained its own")
    return layers


def without(row: int | None, *tables: Tensor) -> list[Tensor]:
    """The tables [V, H] without this row, where one is named."""
    return [t if row is None else torch.cat([t[:row], t[row + 1 :]]) for t in tables]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal where the wider of two precisions is rounded to the narrower: copies of one table (case 03)."""
    return torch.equal(a.to(b.dtype), b) or torch.equal(b.to(a.dtype), a)


def resolve(found: Imported, stated: dict[str, Any], target: Target, vocabulary: str, where: str) -> dict[str, Any]:
    """`drafter.options` that the checkpoint fixes. `stated`: those that the recipe names.

    Raises ConfigError where the two contradict each other, or neither says how the checkpoint is meant.
    """
    if "start" in stated:
        raise ConfigError(f"drafter.options.start = {stated['start']}: is for a fresh drafter; {FIELD} = {where} says "
                          "what this run starts from: leave one out")
    chosen = {}
    for name in (*found.options, *found.unsaid):
        if name in found.unsaid:
            if name not in stated:
                raise ConfigError(f"{where}: {found.unsaid[name]}; set drafter.options.{name}")
            continue
        chosen[name] = found.options[name]
        said = found.shape.get(name, found.options[name])  # a size of 0 is the target's
        wanted = stated.get(name, said)
        if name == "intermediate_size":
            wanted = wanted or target.config.intermediate_size
        if name == MASK_TOKEN and wanted == -1:
            wanted = said
        if name == "draft_vocab_size":
            wanted = wanted or target.vocab_size
        if name == "draft_vocab_size" and vocabulary == "rebuild":
            chosen[name] = wanted
        elif wanted != said:
            more = "; drafter.vocabulary: rebuild takes another size" if name == "draft_vocab_size" else ""
            raise ConfigError(f"drafter.options.{name} = {stated[name]!r}, but {where} has {said!r}: leave it out, or "
                              f"start from another drafter{more}")
    return chosen


def rebuilt(ids: Tensor, counts: dict[int, int], size: int, target: Target) -> Tensor:
    """Draft vocabulary [D] of the new data; places that its tokens leave free go to the earlier ones `ids`."""
    return vocab.build(dict.fromkeys(ids.tolist(), 0) | counts, size, target.vocab_size, vocab.forced(target))


def heads_of(found: Imported, target: Target) -> dict[str, Tensor]:
    """The heads [D, H] that the drafter has of its own, by name."""
    if found.head == "many":
        return {name: t for name, t in found.tensors.items() if name.startswith("lm_heads.")}
    return {"lm_head.weight": own_head(found, target)}


def own_head(found: Imported, target: Target) -> Tensor:
    """The checkpoint's head [D, H]; of a folder without one, the table that engines use instead."""
    if found.head == "own":
        return found.tensors["lm_head.weight"]
    return (target.head_weight if found.head == "head" else target.embedding).cpu()


def head_rows(head: Tensor, earlier: Tensor, ids: Tensor, fresh: Tensor) -> Tensor:
    """Float32 head [D, H] for draft `ids` [D]: a token's row of `head` where it is one of the `earlier` ids [D'] that
    `head` [D', H] is for, its row of `fresh` [V, H] otherwise.

    The target's head is what a fresh drafter starts with: the drafter's normed output is trained to be read by it, so
    a new token's logit is at once of the right size. A random row would win or lose against all others by chance.
    """
    place = torch.full((len(fresh),), -1)
    place[earlier] = torch.arange(len(earlier))
    at = place[ids]
    rows = fresh[ids.to(fresh.device)].float().cpu()
    rows[at >= 0] = head[at[at >= 0]].float()
    return rows


def other_target(found: Imported, target: Target) -> list[str]:
    """A note where the checkpoint was made for another target of the same shape: training adapts it (case 36)."""
    made_for = found.target.get("fingerprint")
    if not made_for:
        return []
    differ = ", ".join(part for part, value in target.fingerprint().items() if made_for.get(part) != value)
    return [f"it was made for {found.target['model']}, another target than this one: {differ}"] if differ else []
