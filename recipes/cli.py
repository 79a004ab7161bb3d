"""What every entry point shares: flags, exit codes, errors without a traceback, the run's folder."""

import difflib
import itertools
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

import yaml

from recipes.errors import INTERRUPTED, MAKE_ROOM, NO_SPACE, TERMINATED, ConfigError, DrafthouseError, RunError
from recipes.files import locked, write_text, written
from recipes.launched import Stopped, end_process, stoppable
from recipes.loader import dump_values, flags, load_options, load_recipe
from recipes.plain import read
from recipes.schema import Recipe

DEFAULT_RECIPE = "recipes/smollm2-135m/eagle3-demo.yaml"


@dataclass
class Command:
    """One stage as the user calls it. `switches` are flags without a value: name -> help. `options`: the dataclass of
    options that are no part of a recipe; `main` gets them third. `words`: what plain words on the command line mean;
    `main` gets their list last, and a list among the options takes all the words behind it."""

    name: str
    about: str
    main: Callable[..., None]  # (recipe, switches) and, where the command has them, options, words
    switches: dict[str, str] = field(default_factory=dict)
    options: type | None = None
    words: str = ""


def help_text(command: Command) -> str:
    words = "WORDS " if command.words else ""
    lines = [command.about, "", f'usage: {command.name} RECIPE=recipes/x.yaml ARGS="{words}--section.field value ..."',
             "or the command that it prints, with --config recipes/x.yaml --section.field value ...", ""]
    lines += [f"  WORDS  {command.words}"] if command.words else []
    lines += ["  --config FILE  the recipe", "  --cache-dir DIR  short for --target.cache_dir"]
    lines += ["  --debug  show the traceback of an error"]
    lines += [f"  --{name}  {about}" for name, about in command.switches.items()]
    for title, cls in (("options", command.options), ("recipe fields", Recipe)):
        if cls:
            lines += ["", f"{title}, each with its default:"]
            lines += [f"  --{name} {default!r}: {about}" for name, default, about in flags(cls)]
    lines += [textwrap.dedent("""
        exit codes: 0 done, 2 bad usage or configuration, 1 failed or gate broken,
        130 interrupted, 143 stopped by SIGTERM; the same command goes on""")]
    return "\n".join(lines)


def split_words(command: Command, argv: list[str]) -> tuple[list[str], list[str]]:
    """(argv without plain words, the words). The words behind an option that is a list become its one value."""
    lists = {f.name for f in fields(command.options) if get_origin(f.type) is list} if command.options else set()
    rest, words, left = [], [], list(argv)
    while left:
        item = left.pop(0)
        if not item.startswith("--"):
            words.append(item)
            continue
        rest.append(item)
        name = item.removeprefix("--")
        if name in lists:
            values = list(itertools.takewhile(lambda x: not x.startswith("--"), left))
            del left[: len(values)]
            rest.append(json.dumps(values))
        elif left and "=" not in name and name != "debug" and name not in command.switches:
            rest.append(left.pop(0))
    return rest, words


def parse_args(command: Command, argv: list[str]) -> tuple[str, dict[str, str], set[str], bool]:
    """Splits argv into (recipe path, overrides, switches, debug). Raises ConfigError for anything else."""
    path, overrides, switches, debug = DEFAULT_RECIPE, {}, set(), False
    items = iter(argv)
    for item in items:
        name, equals, value = item.removeprefix("--").partition("=")
        if not item.startswith("--"):
            raise ConfigError(f"{item}: not an option; options begin with --, see --help")
        if name in command.switches:
            if equals:
                raise ConfigError(f"--{name}: takes no value, got {value}")
            switches.add(name)
        elif name == "debug":
            debug = True
        else:
            if not equals:
                check_switch(command, name)
                value = next(items, None)
                if value is None:
                    raise ConfigError(f"--{name}: a value is missing")
            if name == "config":
                path = value
            else:
                overrides["target.cache_dir" if name == "cache-dir" else name] = value
    return path, overrides, switches, debug


def check_switch(command: Command, name: str) -> None:
    """ConfigError for the name of a flag with a value that is spelt more like one without than like any with one."""
    switches = {*command.switches, "debug", "help"}
    others = {leaf for full, _, _ in flags(Recipe) for leaf in (full, full.rpartition(".")[2])}
    others |= {"config", "cache-dir", *(f.name for f in (fields(command.options) if command.options else ()))}
    close = difflib.get_close_matches(name, [*others, *switches], n=1)
    if close and close[0] in switches:
        raise ConfigError(f"--{name}: unknown option; did you mean {close[0]}?")


def own_options(command: Command, overrides: dict[str, str]) -> list:
    """The command's own options, read and taken out of the overrides, in a list; empty where it has none.
    Raises ConfigError for a name close to one of them that is no part of a recipe."""
    if command.options is None:
        return []
    sections = {f.name for f in fields(command.options)}
    own = [name for name in overrides if name.partition(".")[0] in sections]
    for name in overrides:
        close = difflib.get_close_matches(name, sections, n=1)
        if close and "." not in name and name not in sections | {f.name for f in fields(Recipe)}:
            raise ConfigError(f"--{name}: unknown option; did you mean {close[0]}?")
    return [load_options(command.options, {name: overrides.pop(name) for name in own})]


def run(command: Command, argv: list[str] | None = None) -> None:
    """Runs a stage and ends in SystemExit with the code that DESIGN.md promises."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(help_text(command))
        sys.exit(0)
    debug = "--debug" in argv
    try:
        rest, words = split_words(command, argv) if command.words else (argv, [])
        path, overrides, switches, debug = parse_args(command, rest)
        options = own_options(command, overrides)
        recipe = load_recipe(path, overrides)
        with stoppable(), without_empty_folder(recipe):
            command.main(recipe, switches, *options, *([words] if command.words else []))
    except DrafthouseError as error:
        fail(command.name, str(error), error.exit_code, debug)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        advice = f"; {MAKE_ROOM}" if error.errno in NO_SPACE else ""
        fail(command.name, f"{place}{error.strerror or error}{advice}", RunError.exit_code, debug)
    except Stopped:
        fail(command.name, "stopped by SIGTERM; run the same command again to go on", TERMINATED, debug)
    except KeyboardInterrupt:
        fail(command.name, "interrupted; run the same command again to go on", INTERRUPTED, debug)
    sys.exit(0)


def process(command: Command) -> None:
    """`run` as the whole work of this process; never returns."""
    try:
        run(command)
    except SystemExit as stop:
        end_process(stop.code)


def fail(name: str, message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"{name}: error: {message}", file=sys.stderr)
    sys.exit(code)


def run_folder(recipe: Recipe) -> Path:
    """runs/<name>/, created. ConfigError where it cannot be."""
    folder = Path(recipe.runs_dir) / recipe.name
    with written(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def without_empty_folder(recipe: Recipe) -> Iterator[None]:
    """A run's folder that a refused command made and wrote nothing into goes again."""
    folder = Path(recipe.runs_dir) / recipe.name
    before = os.path.exists(folder)  # Path.exists raises for a name that is too long
    try:
        yield
    except DrafthouseError:
        if not before:
            with suppress(OSError):  # not made, or no longer empty
                folder.rmdir()
        raise


def write_resolved(recipe: Recipe, sections: Collection[str] = ()) -> None:
    """Writes the resolved recipe into the run's folder: by a stage that has accepted it, never before. Where there is
    one already, only these sections of it (empty: all): the others say what earlier stages worked with."""
    path = Path(recipe.runs_dir) / recipe.name / "recipe.yaml"
    values = asdict(recipe)
    # Two stages at once would each lose the other's sections.
    with written(path.parent), locked(path.parent, ".recipe.lock"):
        if sections and path.is_file():
            earlier = earlier_recipe(path)
            values = {name: value if name in sections else earlier.get(name, value) for name, value in values.items()}
        write_text(path, dump_values(values))


def earlier_recipe(path: Path) -> dict[str, Any]:
    """What a stage before wrote; nothing where it cannot be read."""
    try:
        values = read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
