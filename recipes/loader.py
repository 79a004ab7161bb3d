"""Reads a recipe: YAML file plus `--section.field value` flags into the typed sections, strictly.

An unknown key, in the file or on the command line, is an error that names the nearest valid one.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import TypeAdapter, ValidationError

from recipes.errors import ConfigError
from recipes.plain import DEEPEST, Refused, read, said, shown
from recipes.schema import Recipe

LISTS = (list, tuple)


def parse_into(cls: type, values: dict[str, Any], where: str, flagged: Iterable[str] = ()) -> Any:
    """Builds dataclass `cls` from plain values. `where` names their file in an error; values of the dotted names
    `flagged` came from the command line.

    Raises ConfigError for an unknown key (naming the nearest valid one), a value of the wrong type, a number that is
    not finite, or a text that no file can be named by.
    """
    check_keys(cls, values, where, "", flagged)
    try:
        built = TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source(where, key, flagged)}: {key} = {shown(first['input'])}: "
                          f"{first['msg'].removeprefix('Value error, ')}") from None
    check_values(built, values, where, "", flagged)
    return built


def check_values(value: Any, given: Any, where: str, key: str, flagged: Iterable[str]) -> None:
    """ConfigError for what no type tells, at any depth of `value`, which was built of `given`."""
    fault = fault_of(value, given)
    if fault:
        raise ConfigError(f"{source(where, key, flagged)}: {key} = {shown(given)}: {fault}")
    if is_dataclass(value):
        children: dict[Any, Any] = {f.name: getattr(value, f.name) for f in fields(value)}
    else:
        children = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, LISTS) else {}
    origins = dict(enumerate(given)) if isinstance(given, LISTS) else given if isinstance(given, dict) else {}
    for name, child in children.items():
        inner = f"{key}.{name}" if key else str(name)
        if fault_of(name, name):
            raise ConfigError(f"{source(where, inner, flagged)}: key {shown(inner)}: {fault_of(name, name)}")
        check_values(child, origins.get(name, child), where, inner, flagged)


def fault_of(value: Any, given: Any) -> str:
    """What is wrong with a plain value that was read from `given`; empty where nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"  # every comparison with it would pass or fail whatever was meant
    if isinstance(value, bool) != isinstance(given, bool) and isinstance(given, (int, float)):  # bool is an int
        return "must be a number, not true or false" if isinstance(given, bool) else "must be true or false"
    if isinstance(value, str) and "\0" in value:
        return "holds a NUL character, which no file name can"
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        return "holds half a character (a surrogate, or a byte that is not UTF-8), which cannot be written"
    return ""


def source(where: str, key: str, flagged: Iterable[str]) -> str:
    """`where`, or the command line for a value that is, or lies in, one of the names `flagged`."""
    return "command line" if any(re.match(rf"{re.escape(name)}(\W|$)", key) for name in flagged) else where


def check_keys(cls: type, values: Any, where: str, prefix: str, flagged: Iterable[str] = ()) -> None:
    """Raises ConfigError for the first key of `values` that dataclass `cls` does not have."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {prefix.rstrip('.') or 'the recipe'} must be a mapping, not "
                          f"{shown(values)}")
    known = {f.name: f for f in fields(cls)}
    for key, value in values.items():
        if key not in known:
            name = f"{prefix}{key}"
            raise ConfigError(f"{source(where, name, flagged)}: unknown key "
                              f"{name if name.isprintable() else shown(name)}{nearest(name, prefix, known)}")
        kind = known[key].type
        if is_dataclass(kind):
            check_keys(kind, value, where, f"{prefix}{key}.", flagged)
        elif get_origin(kind) is list and is_dataclass(get_args(kind)[0]) and isinstance(value, list):
            for i, item in enumerate(value):
                check_keys(get_args(kind)[0], item, where, f"{prefix}{key}[{i}].", flagged)


def nearest(key: str, prefix: str, known: dict[str, Any]) -> str:
    """'; did you mean X?': a sibling spelt alike, else that name in another section, else anything spelt alike."""
    here = [f"{prefix}{name}" for name in known]
    everywhere = [*here, *(name for name, _, _ in flags(Recipe))]
    parent, dot, leaf = key.rpartition(".")
    siblings = [c.rpartition(".")[2] for c in here if c.rpartition(".")[0] == parent]
    found = [f"{parent}{dot}{name}" for name in difflib.get_close_matches(leaf, siblings, n=1)]
    found += [name for name in everywhere if name.rpartition(".")[2] == leaf]
    found += difflib.get_close_matches(key, everywhere, n=1)
    return f"; did you mean {found[0]}?" if found else f"; valid keys here: {', '.join(here)}"


def flags(cls: type, prefix: str = "") -> list[tuple[str, Any, str]]:
    """Every leaf field of a dataclass as (dotted name, default, help)."""
    rows = []
    for f in fields(cls):
        if is_dataclass(f.type):
            rows += flags(f.type, f"{prefix}{f.name}.")
            continue
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        rows.append((f"{prefix}{f.name}", default, f.metadata.get("help", "")))
    return rows


def read_yaml(path: Path, what: str = "recipe") -> dict[str, Any]:
    """One YAML mapping; `what`: what the file should be. Raises ConfigError as `yaml_value`, and where it is none."""
    values = yaml_value(path, what)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a {what} is a mapping of sections; this file holds {type(values).__name__}")
    return values


def yaml_value(path: Path, what: str) -> Any:
    """The value of a YAML file. Raises ConfigError naming the file where it is missing, unreadable, or not plain
    (recipes/plain.py)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read this {what}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return read(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {'' if isinstance(error, Refused) else 'not valid YAML: '}{said(error)}") from None


def texts(cls: type, prefix: str = "") -> dict[str, bool]:
    """Dotted name of every field of text -> whether it may be a mapping instead."""
    found: dict[str, bool] = {}
    for f in fields(cls):
        if is_dataclass(f.type):
            found |= texts(f.type, f"{prefix}{f.name}.")
        elif isinstance(f.default, str):
            found[f"{prefix}{f.name}"] = any(get_origin(kind) is dict for kind in get_args(f.type))
    return found


def override(values: dict[str, Any], overrides: dict[str, str], known: dict[str, bool], where: str) -> None:
    """Puts each override, dotted name to YAML text, into the nested `values`. `known`: the fields of text (`texts`),
    whose values are taken as they stand."""
    for name, text in overrides.items():
        node = values
        *parents, leaf = name.split(".")
        if len(parents) > DEEPEST:
            raise ConfigError(f"command line: --{name[:80]}...: more than {DEEPEST} levels deep")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{where}: --{name}: {part} = {shown(node)} in the file is not a mapping")
        value = text if known.get(name) is False else of_flag(name, text)
        node[leaf] = text if name in known and not isinstance(value, dict) else value  # a name may be 123


def of_flag(name: str, text: str) -> Any:
    """The value of a flag's YAML, or its text where it is none. ConfigError for what a recipe cannot mean."""
    try:
        return read(text)
    except Refused as error:
        raise ConfigError(f"command line: {name} = {shown(text)}: {error.problem}") from None
    except yaml.YAMLError:
        return text


def load_options(cls: type, overrides: dict[str, str]) -> Any:
    """A command's own options as the dataclass `cls`, from its defaults and the command line; strict as a recipe."""
    known = dict.fromkeys(name for name, _, _ in flags(cls))
    for name in overrides:
        if name not in known:
            raise ConfigError(f"--{name}: unknown option{nearest(name, '', known)}")
    values: dict[str, Any] = {}
    override(values, overrides, texts(cls), "command line")
    return parse_into(cls, values, "command line")


def load_recipe(path: str | Path, overrides: dict[str, str] | None = None) -> Recipe:
    """The typed recipe of a file with the command line's overrides applied.

    Args: path, a YAML file; overrides, dotted name to YAML text ("train.lr" -> "1e-4").
    Raises ConfigError (exit code 2) for anything that is not exactly a valid recipe.
    """
    values = read_yaml(Path(path))
    check_keys(Recipe, values, str(path), "")
    known = dict.fromkeys(name for name, _, _ in flags(Recipe))
    for name in overrides or {}:
        if name not in known and not name.startswith("drafter.options."):
            raise ConfigError(f"--{name}: unknown option{nearest(name, '', known)}")
    override(values, overrides or {}, texts(Recipe), str(path))
    recipe = parse_into(Recipe, values, str(path), overrides or ())
    if not recipe.name.isprintable() or not recipe.name or "/" in recipe.name or recipe.name.startswith("."):
        raise ConfigError(f"{source(str(path), 'name', overrides or ())}: name = {recipe.name!r}: must be a plain "
                          "folder name")
    addresses = [("trace.url", recipe.trace.url, "give credentials to fsspec (docs/store.md)"),
                 ("generation.server.base_url", recipe.generation.server.base_url, "name the key's variable in "
                                                                                   "generation.server.api_key_env"),
                 *((f"eval.sets[{i}].path", one.path, "download the file and name it")
                   for i, one in enumerate(recipe.eval.sets) if "://" in one.path)]
    for name, url, advice in addresses:
        check_url(url, f"{source(str(path), name, overrides or ())}: {name}", advice)
    return recipe


def check_url(url: str, where: str, advice: str) -> None:
    """ConfigError, which does not show it, for a URL with credentials: the run's copy of the recipe would keep them. A
    user name alone is one where HTTP sends it (https://TOKEN@host); elsewhere it may be part of the place."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if parts.password or parts.query or (parts.username and parts.scheme in ("http", "https")):
        raise ConfigError(f"{where}: holds a password or a query, or a token before @, and may have none: {advice}")


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out."""
    return dump_values(dataclasses.asdict(recipe))


def dump_values(values: dict[str, Any]) -> str:
    """YAML of a recipe's sections."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
