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
from recipes.schema import Recipe


def parse_into(cls: type, values: dict[str, Any], where: str, flagged: Iterable[str] = ()) -> Any:
    """Builds dataclass `cls` from plain values. `where` names their file in an error; values of the dotted names
    `flagged` came from the command line.

    Raises ConfigError for an unknown key (naming the nearest valid one), a value of the wrong type, or a number that is
    not finite.
    """
    check_keys(cls, values, where, "", flagged)
    try:
        built = TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source(where, key, flagged)}: {key} = {first['input']!r}: {first['msg']}") from None
    check_finite(built, where, "", flagged)
    return built


def check_finite(value: Any, where: str, key: str, flagged: Iterable[str]) -> None:
    """ConfigError for a number in `value`, at any depth, that is NaN or infinite: every comparison with it would pass
    or fail whatever was meant."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source(where, key, flagged)}: {key} = {value}: must be a finite number")
    if is_dataclass(value):
        items: Iterable[tuple[Any, Any]] = ((f.name, getattr(value, f.name)) for f in fields(value))
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        check_finite(child, where, f"{key}.{name}" if key else str(name), flagged)


def source(where: str, key: str, flagged: Iterable[str]) -> str:
    """`where`, or the command line for a value that is, or lies in, one of the names `flagged`."""
    return "command line" if any(re.match(rf"{re.escape(name)}(\W|$)", key) for name in flagged) else where


def check_keys(cls: type, values: Any, where: str, prefix: str, flagged: Iterable[str] = ()) -> None:
    """Raises ConfigError for the first key of `values` that dataclass `cls` does not have."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {prefix.rstrip('.') or 'the recipe'} must be a mapping, not {values!r}")
    known = {f.name: f for f in fields(cls)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{source(where, f'{prefix}{key}', flagged)}: unknown key {prefix}{key!s}"
                              f"{nearest(f'{prefix}{key}', prefix, known)}")
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
    """One YAML mapping; `what`: what the file should be. Raises ConfigError naming the file where it is missing,
    unreadable or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read this {what}: {getattr(error, 'strerror', None) or error}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a {what} is a mapping of sections; this file holds {type(values).__name__}")
    return values


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
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{where}: --{name}: {part} = {node!r} in the file is not a mapping")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        mapping = isinstance(value, dict) and known.get(name)
        node[leaf] = text if name in known and not mapping else value  # a name may be 123


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
    if not recipe.name or "/" in recipe.name or recipe.name.startswith("."):
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
