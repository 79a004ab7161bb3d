"""What an evaluation drafts each cycle, from its recipe."""

from typing import Any

from drafters.registry import plans_of
from drafters.tree import DynamicTree, Plan, StaticTree, chain
from recipes.errors import ConfigError
from recipes.schema import Eval


def plan_of(section: Eval, kind: str, options: dict[str, Any] | None = None) -> Plan:
    """The chain or tree of `eval`; ConfigError names the field where that is none, or where a drafter of this kind
    with these `drafter.options` cannot follow it. With eval.choose it is the longest chain, and the choice is made from
    measurements."""
    tree = section.tree
    if section.choose != "given" and (tree.depth or tree.paths or section.confidence):
        raise ConfigError(f"eval.choose = {section.choose}: leave eval.tree.depth, eval.tree.paths and eval.confidence "
                          "at their defaults, or set eval.choose to given")
    if tree.depth and tree.paths:
        raise ConfigError("eval.tree: depth is for a dynamic tree and paths for a static one; set one of them")
    if (tree.depth or tree.paths) and section.confidence:
        raise ConfigError(f"eval.confidence = {section.confidence}: only a chain stops early; set eval.tree.depth to 0 "
                          "and eval.tree.paths to []")
    asked = {"dynamic trees": ("eval.tree.depth", tree.depth), "static trees": ("eval.tree.paths", tree.paths),
             "confidence": ("eval.confidence", section.confidence)}
    follows = plans_of(kind, options or {})
    for name, (field, value) in asked.items():
        if value and name not in follows:
            raise ConfigError(f"drafter.kind = {kind} drafts {' and '.join(follows)} only: leave {field} unset")
    if tree.depth:
        return DynamicTree(tree.depth, tree.top_k, tree.total)
    if not tree.paths:
        return chain(section.draft_length, section.confidence)
    try:
        return StaticTree(tuple(map(tuple, tree.paths)))
    except ValueError as error:
        raise ConfigError(f"eval.tree.paths: {error}") from None


def check_longest(tokens: int, drafter: Any, field: str) -> None:
    """ConfigError, naming the field, where a draft is to have more tokens than the drafter ever proposes."""
    longest = getattr(drafter, "longest", None)  # none: as many as are asked for
    if longest is not None and tokens > longest:
        raise ConfigError(f"{field} = {tokens}: this drafter of kind {drafter.kind} proposes at most {longest} tokens "
                          f"a draft; set it to {longest} or fewer")


def room_of(section: Eval, plan: Plan) -> int:
    """Most places that a draft takes, whatever is chosen."""
    return max(plan.room, section.tree.total) if section.choose == "tree" else plan.room


def described(plan: Plan) -> dict[str, Any]:
    """A plan for a report's settings."""
    if isinstance(plan, DynamicTree):
        return {"kind": "dynamic tree", "depth": plan.depth, "top_k": plan.top_k, "nodes": plan.nodes}
    if plan.narrow:
        return {"kind": "chain", "depth": plan.depth, "nodes": plan.nodes, "confidence": plan.stop}
    return {"kind": "static tree", "depth": plan.depth, "nodes": plan.nodes, "paths": [list(p) for p in plan.paths]}


def in_words(described: dict[str, Any]) -> str:
    """What was drafted each cycle, of a report's settings.plan."""
    kind, depth = described["kind"], described["depth"]
    if kind != "chain":
        return f"{kind}s of depth {depth} and {described['nodes']} tokens"
    stop = described["confidence"]
    return f"chains of up to {depth} that end behind a token below {stop:g}" if stop else f"chains of {depth}"
