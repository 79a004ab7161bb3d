"""What of a run may leave this machine: its report and recipe without names of folders, and no file with a key."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from data.evalsets import name_of
from drafters.export.serving import on_the_hub
from recipes.errors import ConfigError, RunError
from recipes.schema import Recipe

SECRETS = re.compile(r"hf_[A-Za-z0-9]{20,}|(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|"
                     r"github_pat_[A-Za-z0-9_]{20,}|AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY")
# Fields of a recipe that name places of this machine, and what a reader needs of them; None: a public name.
LOCAL = {("runs_dir",): "", ("target", "cache_dir"): "", ("trace", "url"): "", ("trace", "cache_dir"): "",
         ("trace", "engine_python"): "", ("generation", "log"): "", ("generation", "server"): {},
         ("drafter", "path"): None, ("drafter", "init_from"): None, ("eval", "prompts"): None}


def public_name(name: str) -> str:
    """A Hub id as it is, the last part of anything else that may be a path or an address."""
    return name if on_the_hub(name) else Path(name).name


def is_path(name: str) -> bool:
    """Whether a name that may be any text is that of a place on this machine."""
    return name.startswith(("/", "./", "../", "~")) or ("/" in name and Path(name).exists())


def set_names(recipe: Recipe) -> dict[str, str]:
    """Name in the report -> public name, of the evaluation sets that are named by a path; longest first.

    ConfigError where two sets would have one name.
    """
    names = [name_of(one) for one in recipe.eval.sets]
    public = [Path(name).name if is_path(name) else name for name in names]
    for number, name in enumerate(public):
        if name in public[:number]:
            raise ConfigError(f"eval.sets[{number}].name: would be published as {name!r}, as another set is; give it a "
                              "name and run `make eval` again")
    return {a: b for a, b in sorted(zip(names, public), key=lambda pair: -len(pair[0])) if a != b}


def renamed(value: Any, names: dict[str, str]) -> Any:
    """A JSON value with these texts replaced wherever they stand: a set's name is in keys and sentences too."""
    if isinstance(value, dict):
        return {renamed(key, names): renamed(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [renamed(inner, names) for inner in value]
    if isinstance(value, str):
        for name, public in names.items():
            value = value.replace(name, public)
    return value


def public_report(report: dict[str, Any], recipe: Recipe, base_model: str, texts: bool) -> dict[str, Any]:
    """report.json without names of this machine, and without texts of prompts unless `texts`."""
    report = renamed(json.loads(json.dumps(report)), set_names(recipe))
    report["target"]["model"] = base_model
    if not recipe.eval.sets:
        report["settings"]["prompts"] = public_name(report["settings"]["prompts"])
    for one in report["sets"].values():
        one["origin"] = public_name(one["origin"])
    if not texts:
        for answer in report["prompts"]:
            answer.pop("prompt", None)
            answer.pop("answer", None)
        for pair in report["total"]["rejections"]["frequent"]:
            pair.pop("examples", None)
    return report


def public_recipe(recipe: Recipe, base_model: str, texts: bool) -> dict[str, Any]:
    """The resolved recipe without names of this machine, and without `starts` unless `texts`."""
    values, names = asdict(recipe), set_names(recipe)
    for (*parents, leaf), value in LOCAL.items():
        node = values
        for part in parents:
            node = node[part]
        node[leaf] = public_name(node[leaf]) if value is None else value
    values["target"]["model"] = base_model
    for source in values["prompts"]["sources"]:
        source |= {"path": Path(source["path"]).name, "cache_dir": "", "name": public_name(source["name"])}
        if not texts:
            source["starts"] = []
    for one in values["eval"]["sets"]:
        one |= {"path": Path(one["path"]).name, "cache_dir": "", "dataset": public_name(one["dataset"]),
                "name": names.get(one["name"], one["name"])}
    for section in ("generation", "trace"):
        values[section]["engine"] = sorted(values[section]["engine"])  # which were set; values may be paths
    values["plan"]["custom"] = sorted(values["plan"]["custom"])
    return values


def texts_of(value: Any) -> Iterator[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_of(inner)


def check_words(folder: Path, recipe: Recipe, run: Path) -> None:
    """RunError where a file of the folder would carry a secret, a folder of this machine, or a path of the recipe."""
    places = {str(Path.home()), str(Path.cwd()), str(run.resolve())} - {"/"}
    paths = {text for text in texts_of(asdict(recipe)) if text.startswith("/") and text.strip("/")}
    named = re.compile("|".join([re.escape(place) for place in sorted(places)]
                                + [rf"(?<![\w.]){re.escape(path)}(?!\w)" for path in sorted(paths)]))
    token = get_token()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            continue
        text = path.read_text(encoding="utf-8")
        if SECRETS.search(text) or (token and token in text):
            raise RunError(f"not published: {path.name} holds what looks like a key or token; take it out of the "
                           "recipe or the prompts")
        place = named.search(text)
        if place:
            raise RunError(f"not published: {path.name} holds the name of a folder of this machine, {place[0]}")
