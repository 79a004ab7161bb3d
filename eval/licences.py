"""Licence and naming terms of a drafter's target and training data, and what they allow a published drafter.

Not legal advice: a table of what the licence texts ask of a model made from a licensed model or its outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.hf_api import HfApi

from drafters.embedded import EMBEDDED
from recipes.errors import ConfigError
from recipes.schema import Drafter, Prompts, PromptSource

OWN = Path(__file__).resolve().parent.parent / "recipes"  # whose prompt files are this project's
PRIVATE = "private"


@dataclass(frozen=True)
class Licence:
    """`binding`: what is made from the model, or from its outputs, has the same licence. `prefix`: how such a model's
    name must begin. `notice`: what has to be shown with it."""

    title: str
    binding: bool = False
    non_commercial: bool = False
    prefix: str = ""
    notice: str = ""


def llama(title: str, prefix: str = "Llama", notice: str = "Built with Llama") -> Licence:
    return Licence(title, binding=True, prefix=prefix, notice=notice)


LICENCES = {
    "apache-2.0": Licence("Apache License 2.0"),
    "mit": Licence("MIT License"),
    "bsd-3-clause": Licence("BSD 3-Clause License"),
    "cc0-1.0": Licence("CC0 1.0"),
    "cc-by-4.0": Licence("CC BY 4.0", notice="attribution to its authors is required"),
    "cc-by-sa-4.0": Licence("CC BY-SA 4.0", notice="attribution to its authors is required"),
    "cc-by-nc-4.0": Licence("CC BY-NC 4.0", non_commercial=True, notice="attribution to its authors is required"),
    "cc-by-nc-sa-4.0": Licence("CC BY-NC-SA 4.0", non_commercial=True, notice="attribution is required"),
    "odc-by": Licence("ODC-By 1.0", notice="attribution to its authors is required"),
    "llama2": llama("Llama 2 Community License", "", "Llama 2 is licensed under the LLAMA 2 Community License, "
                                                     "Copyright (c) Meta Platforms, Inc. All Rights Reserved."),
    "llama3": llama("Meta Llama 3 Community License", "Llama 3", "Built with Meta Llama 3"),
    "llama3.1": llama("Llama 3.1 Community License"),
    "llama3.2": llama("Llama 3.2 Community License"),
    "llama3.3": llama("Llama 3.3 Community License"),
    "llama4": llama("Llama 4 Community License"),
    "gemma": Licence("Gemma Terms of Use", binding=True, notice="Gemma is provided under and subject to the Gemma "
                                                                "Terms of Use found at ai.google.dev/gemma/terms"),
}


@dataclass(frozen=True)
class TargetTerms:
    """What is known of the target: its public name, its licence, and how its weights came here."""

    base_model: str
    licence: str
    origin: str = ""  # of weights that are not those of the public name


@dataclass(frozen=True)
class Start:
    """Another drafter that this one is (`itself`) or was trained on from: what it is called, and its licence."""

    what: str
    licence: str
    itself: bool


def target_terms(model: str, base_model: str, licence: str, endpoint: str, token: str | None) -> TargetTerms:
    """The terms of `target.model`; `base_model` and `licence` are the user's word, empty where not given.

    Raises ConfigError where they are not known and have to be said.
    """
    origin = ""
    if model.startswith("embedded:"):
        source = EMBEDDED[model.removeprefix("embedded:")]
        base_model, licence, origin = source.origin.split(",")[0], source.licence, source.origin
    elif Path(model).is_dir():
        found = card_licence(Path(model) / "README.md")
        if found and licence and found != licence:
            raise ConfigError(f"--target_licence {licence}: {model}/README.md says {found}")
        licence = licence or found
        if not base_model:
            raise ConfigError(f"--base_model: target.model = {model} is a folder: name the Hub model that it is, or "
                              "that it was made from")
    else:
        base_model = model
        licence = licence or hub_licence(model, endpoint, token)
    if not licence:
        raise ConfigError(f"--target_licence: the licence of target.model = {model} is not stated with it; say which "
                          "it is, e.g. apache-2.0 or llama3.1")
    return TargetTerms(base_model, licence, origin)


def card_licence(path: Path) -> str:
    """`license` of a model card, empty where there is none."""
    try:
        found = ModelCard.load(path, ignore_metadata_errors=True).data.license
    except (OSError, ValueError, HFValidationError):
        return ""
    return found if isinstance(found, str) else ""


def hub_licence(model: str, endpoint: str, token: str | None) -> str:
    """`license` of a Hub repository, empty where it cannot be had."""
    try:
        data = HfApi(endpoint=endpoint, token=token).model_info(model).card_data
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, httpx2.HTTPError):
        return ""
    return str(data.get("license") or "") if data else ""


def start_terms(drafter: Drafter, stated: str, endpoint: str, token: str | None) -> Start | None:
    """The drafter of somebody, or of an earlier run, that the recipe's one is or was started from. None: it began
    afresh. Names of local folders are not part of the result.

    stated: licence, or PRIVATE, of one that says nothing. Raises ConfigError where neither says it, or they differ.
    """
    field, given = ("path", drafter.path) if drafter.path else ("init_from", drafter.init_from)
    if not given:
        return None
    local = Path(given).is_dir()
    found = card_licence(Path(given) / "README.md") if local else hub_licence(given, endpoint, token)
    if found and stated and found != stated:
        raise ConfigError(f"--start_licence {stated}: the card of drafter.{field} = {given} says {found}")
    if not found and not stated:
        raise ConfigError(f"--start_licence: the licence of drafter.{field} = {given} is not stated with it; say which "
                          f"it is, e.g. mit, or {PRIVATE} for one of your own that is not published")
    what = "a drafter in a local folder" if local else f"the drafter {given}"
    return Start(what, stated or found, bool(drafter.path))


def data_terms(section: Prompts, base: TargetTerms, stated: str) -> list[tuple[str, str]]:
    """(what, licence) of every source of training prompts. Answers and states are the target's own.

    stated: licence, or PRIVATE, of sources that say nothing. Raises ConfigError where one says nothing and nor does
    the user. Names of local files are not part of the result.
    """
    found = []
    for number, source in enumerate(section.sources or [PromptSource(kind="synthesis")]):
        if source.kind == "synthesis":
            found.append(("prompts written by the target itself", base.licence))
        elif source.kind != "hub" and Path(source.path).resolve().is_relative_to(OWN):
            found.append((f"prompts of this project ({Path(source.path).name})", "apache-2.0"))
        elif not stated:
            what = source.name if source.kind == "hub" else source.path
            raise ConfigError(f"--data_licence: prompts.sources[{number}] ({source.kind} {what}) has no licence that "
                              f"is known here; say which, or {PRIVATE} for data of your own that is not published")
        else:
            found.append((f"data set {source.name}" if source.kind == "hub" else f"prompts ({source.kind})", stated))
    return found


def problems(repo: str, licence: str, target: TargetTerms, data: list[tuple[str, str]],
             start: Start | None = None) -> Iterator[str]:
    """What the terms forbid of a drafter published as `repo` under `licence`, a sentence each."""
    name = repo.rpartition("/")[2]
    made_from = [("target", target.licence)] + ([("drafter", start.licence)] if start else [])
    for what, source in made_from:
        terms = LICENCES.get(source)
        if source == PRIVATE and what == "drafter":
            continue
        if terms is None:
            yield (f"{what} licence {source}: its terms are not in eval/licences.py; read them, and pass "
                   "--terms-read if they allow this")
            continue
        if terms.binding and licence != source:
            yield (f"--licence {licence}: what is made from a model under {source} stays under it; use "
                   f"--licence {source}")
        if terms.prefix and not name.lower().replace("-", " ").startswith(terms.prefix.lower()):
            yield f"REPO={repo}: the {terms.title} asks that the name begins with {terms.prefix}"
    if start and start.itself and licence != start.licence and start.licence != PRIVATE:
        yield (f"--licence {licence}: this is {start.what}, which is under {start.licence}; use --licence "
               f"{start.licence}")
    for what, source in [("the target", target.licence), *data]:
        limits = LICENCES.get(source)
        own = LICENCES.get(licence)
        if limits and limits.non_commercial and not (own and own.non_commercial):
            yield f"--licence {licence}: {what} is under {source}, which allows no commercial use"


def notices(target: TargetTerms, data: list[tuple[str, str]]) -> list[str]:
    """What has to be shown, a sentence each."""
    found = [(f"The target, {target.base_model}", target.licence), *data]
    return list(dict.fromkeys(f"{what}: {LICENCES[licence].notice}" for what, licence in found
                              if licence in LICENCES and LICENCES[licence].notice))
