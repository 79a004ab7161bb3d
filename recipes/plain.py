"""Reads the YAML of recipes and flags: mappings, lists, texts, numbers, booleans, null, and nothing that cannot be
meant. A recipe holds no dates: 2026-11-30 is the text that it looks like."""

from collections.abc import Callable
from typing import Any

import yaml

DEEPEST = 32  # levels of mappings and lists within each other
MOST = 100_000  # values of a text, with what aliases repeat: a few lines of aliases can stand for billions
SHOWN = 100  # characters of a value in a message
DATE = "tag:yaml.org,2002:timestamp"


class Refused(yaml.MarkedYAMLError):
    """What YAML has a form for and a recipe cannot mean."""


def shown(value: Any) -> str:
    """A value as an error shows it, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def said(error: yaml.YAMLError) -> str:
    """The error in one line, with the place where it has one."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    parts = [f"line {mark.line + 1}, column {mark.column + 1}"] if mark else []
    return ": ".join([*parts, *(part for part in (error.context, error.problem) if part)])


def read(text: str) -> Any:
    """The value of one YAML document. Raises yaml.YAMLError for what is none, Refused for what a recipe cannot mean."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node)
        return loader.construct_document(node)
    except (ValueError, OverflowError) as error:  # of an escape such as "\UFFFFFFFF"
        raise Refused(problem=str(error), problem_mark=loader.get_mark() if loader else None) from None
    finally:
        if loader:
            loader.dispose()


def _check(root: yaml.Node) -> None:
    """Refused for a key that stands twice in a mapping, and for more or deeper values than any recipe has."""
    left, values = [(root, 1)], 0
    while left:
        node, depth = left.pop()
        values += 1
        if depth > DEEPEST:
            raise Refused(problem=f"more than {DEEPEST} levels deep", problem_mark=node.start_mark)
        if values > MOST:
            raise Refused(problem=f"more than {MOST:,} values, those of aliases included")
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    raise Refused(problem=f"key {shown(key.value)} stands twice in one mapping",
                                  problem_mark=key.start_mark)
                keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            left += [(value, depth + 1) for pair in node.value for value in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += [(value, depth + 1) for value in node.value]


def _scalar(construct: Callable[[Any, yaml.Node], Any]) -> Callable[[Any, yaml.Node], Any]:
    """A constructor that refuses a text of the form of a number or boolean which is none, and numbers beyond 64
    bits."""
    def checked(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
        try:
            value = construct(loader, node)
        except (ValueError, LookupError, OverflowError):
            raise Refused(problem=f"{shown(node.value)} cannot be read as a number or boolean; put a text in quotes",
                          problem_mark=node.start_mark) from None
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Refused(problem=f"{shown(node.value)} is too large", problem_mark=node.start_mark)
        return value

    return checked


class _Loader(yaml.SafeLoader):
    """No dates, binaries and sets, and no value within itself."""

    yaml_implicit_resolvers = {first: [(tag, form) for tag, form in forms if tag != DATE]
                               for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    yaml_constructors = {
        "tag:yaml.org,2002:null": yaml.SafeLoader.construct_yaml_null,
        "tag:yaml.org,2002:str": yaml.SafeLoader.construct_yaml_str,
        "tag:yaml.org,2002:seq": yaml.SafeLoader.construct_yaml_seq,
        "tag:yaml.org,2002:map": yaml.SafeLoader.construct_yaml_map,
        "tag:yaml.org,2002:bool": _scalar(yaml.SafeLoader.construct_yaml_bool),
        "tag:yaml.org,2002:int": _scalar(yaml.SafeLoader.construct_yaml_int),
        "tag:yaml.org,2002:float": _scalar(yaml.SafeLoader.construct_yaml_float),
        None: yaml.SafeLoader.construct_undefined}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.open: list[str | None] = []  # anchors of the values that are being read

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.open:
                raise Refused(problem=f"alias *{event.anchor} stands within what it names",
                              problem_mark=event.start_mark)
            return super().compose_node(parent, index)
        if len(self.open) == DEEPEST:
            raise Refused(problem=f"more than {DEEPEST} levels deep", problem_mark=event.start_mark)
        self.open.append(event.anchor)
        node = super().compose_node(parent, index)
        self.open.pop()
        return node
