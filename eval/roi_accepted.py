"""Measured acceptance, as `make roi ARGS=plan` takes it: our report's, or a file's that a user fills in for an imported
drafter."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from eval import roi_refuse as refuse
from eval.figures import UNBOUNDED
from eval.roi_files import Steps
from eval.roi_names import EAGLES, OWN_WEIGHTS, draft_of, kind_of
from eval.roi_refuse import Conditions
from eval.roi_validate import read_json
from recipes.draft_cost import DraftSize
from recipes.errors import ConfigError
from recipes.loader import parse_into
from recipes.model_shape import ModelShape
from recipes.named_shapes import named
from recipes.schema import opt
from recipes.speculation import Draft

ACCEPTANCE = "drafthouse.acceptance/1"
FEWEST_DRAFTS = 30  # of a context bucket that counts as measured


@dataclass
class Acceptance:
    """What was measured of one drafter, with its conditions (drafthouse.acceptance/1)."""

    schema: str = opt(ACCEPTANCE, "version of this form")
    name: str = opt("drafter", "what the plan calls it")
    kind: str = opt("eagle3", "eagle3, parallel, medusa, mtp, lookup, layer_cut, or a named shape: a standalone draft "
                              "model")
    per_position: list[float] = opt([], "cumulative rate of each draft position")
    relative_sd: NonNegativeFloat = opt(0.05, "standard deviation of the acceptance length over its value")
    tokens_per_pass: NonNegativeFloat = opt(0.0, "lookup, tree, chain that stops early: kept tokens a target pass, "
                                                 "passes without a draft included; then no other draft length is "
                                                 "planned")
    topk: PositiveInt = opt(1, "tree: branches of a level")
    verified: NonNegativeInt = opt(0, "tree: tokens verified a row; 0 is a chain")
    domain: str = opt("", "prompts")
    temperature: NonNegativeFloat = opt(0.0, "of the answers")
    context: list[NonNegativeFloat] = opt([0.0, 0.0], "shortest and longest context measured")
    target: str = opt("", "the target's name")
    weight_bits: NonNegativeFloat = opt(16.0, "bits of its weights when it was measured")
    fingerprint: dict[str, Any] = opt({}, "of the target's weights, config, tokenizer, template")
    mode: str = opt("measured", "measured or synthetic")
    prompts: str = opt("chat", "chat: rendered with the target's chat template; completion, random: refused")
    engine: dict[str, Any] = opt({}, "engine of its own step times, where it has any")
    requests: NonNegativeInt = opt(0, "requests whose own acceptance length was recorded")
    slowest: NonNegativeFloat = opt(0.0, "acceptance length that 99 of 100 requests exceed; 0 is not recorded")
    training_gpu_hours: NonNegativeFloat = opt(0.0, "GPU hours that its training took, its data included; 0: not "
                                                    "known, or nothing was trained")
    size: dict[str, Any] = opt({}, "sizes of the drafter; empty: as wide as its target")
    layers: NonNegativeInt = opt(0, "of a layer_cut, small_lm: 0 is a third of the target's; of EAGLE-3, parallel: 0 "
                                    "is one")
    vocab: NonNegativeInt = opt(0, "EAGLE-3, parallel, Medusa: tokens that it can propose; 0: as the measured steps "
                                   "have it, else 32,000, of Medusa the target's vocabulary")
    blocks: PositiveInt = opt(1, "Medusa: residual blocks of a head")

    def kept(self, K: int) -> float:
        """Acceptance length of a draft of K, at most as long as the measured one."""
        return self.tokens_per_pass or 1.0 + sum(self.per_position[:K])

    def slowest_of(self, K: int) -> float:
        """Acceptance length that 99 of 100 requests exceed with a draft of K; 0 is not recorded. With a shorter draft
        than the measured one it is this much at least: a request's rates fall from position to position."""
        return 1 + (self.slowest - 1) * K / self.longest if self.slowest else 0.0

    @property
    def longest(self) -> int:
        return len(self.per_position)

    def conditions(self) -> Conditions:
        return Conditions(self.domain, self.temperature, tuple(self.context), self.target, self.weight_bits,
                          self.fingerprint)

    def check(self, where: str) -> None:
        """ConfigError for figures that no measurement gives."""
        K = self.longest
        if not K:
            raise ConfigError(f"{where}: per_position is missing")
        if not all(0 <= b <= a for a, b in pairwise([1.0, *self.per_position])):
            raise ConfigError(f"{where}: per_position = {self.per_position}: must be cumulative rates, none larger "
                              "than the one before or than 1")
        if len(self.context) != 2 or self.context[0] > self.context[1]:
            raise ConfigError(f"{where}: context = {self.context}: must be the shortest and the longest one")
        for name in ("tokens_per_pass", "slowest"):
            value = getattr(self, name)
            if value and not 1 <= value <= K + 1:
                raise ConfigError(f"{where}: {name} = {value:g}: must be 1 to {K + 1}, the longest draft and its bonus "
                                  "token, or 0")
        if self.size:
            parse_into(DraftSize, self.size, f"{where}: size")


def read_acceptance(path: Path, domain: str, bits: Mapping[str, float] | None = None) -> Acceptance:
    """Measured acceptance from eval/report.json or drafthouse.acceptance/1. `domain`: a set of the report, or empty;
    `bits`: of quantised targets by name, which a report does not tell. Refusal 1 for a domain that was not measured, 6
    for synthetic acceptance."""
    values = read_json(path)
    schema = values.get("schema", "") if isinstance(values, dict) else ""
    if schema == ACCEPTANCE:
        found = parse_into(Acceptance, values, str(path))
    elif str(schema).startswith("drafthouse.report/") and "server" in values:
        raise ConfigError(f"{path}: is of a running server, which does not say what drafter it runs; name the report "
                          f"of `make eval` without eval.server, or write what is known of it as {ACCEPTANCE}")
    elif str(schema).startswith("drafthouse.report/") and _is_lossy(values):
        raise ConfigError(f"{path}: of typical acceptance, which is lossy and which engines do not have; run "
                          "`make eval` with eval.acceptance: exact")
    elif str(schema).startswith("drafthouse.report/"):
        try:
            found = _of_report(values, domain, bits or {})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: is no whole report ({type(error).__name__}: {error}); run `make eval` "
                              "again") from None
    else:
        raise ConfigError(f"{path}: schema {schema!r}: must be an eval/report.json or {ACCEPTANCE}")
    found.check(str(path))
    refuse.made_up_acceptance(found.mode, found.prompts)
    return found


def _is_lossy(report: dict[str, Any]) -> bool:
    settings = report.get("settings")
    return isinstance(settings, dict) and bool(settings.get("lossy"))


def _of_report(report: dict[str, Any], domain: str, bits: Mapping[str, float]) -> Acceptance:
    sets = report["sets"]
    if domain and domain not in sets:
        refuse.moved_acceptance(Conditions(", ".join(sets)), Conditions(domain))
    block, used = (sets[domain], [sets[domain]]) if domain else (report["total"], list(sets.values()))
    acceptance, drafter, target = block["acceptance"], report["drafter"], report["target"]
    low, high = acceptance["ci95"]
    requests, slowest = slowest_answers(report, domain)
    topk, verified, whole = plan_in(report["settings"].get("plan") or {})
    counted = drafter["kind"] in ("lookup", "suffix") or not whole  # of drafts that are not all of one length
    per_pass = max(1.0, block["tokens_per_target_pass"]) if counted else 0.0
    return Acceptance(name=report["name"], kind=drafter["kind"], per_position=acceptance["per_position"],
                      relative_sd=(high - low) / 3.92 / acceptance["mean_length"], tokens_per_pass=per_pass,
                      topk=topk, verified=verified, domain=domain, temperature=report["settings"]["temperature"],
                      context=contexts(acceptance["by_context_bucket"]), target=target["model"],
                      weight_bits=bits_of(target["model"], report["stack"]["dtype"], bits),
                      fingerprint=target.get("fingerprint", {}),
                      prompts="completion" if any(one.get("untemplated") for one in used) else "chat",
                      requests=requests, slowest=slowest, **shape_of_kind(drafter))


def shape_of_kind(drafter: dict[str, Any]) -> dict[str, int]:
    """What a report says of a drafter whose sizes follow from its target's, as fields of Acceptance."""
    options = drafter.get("options", {})
    if drafter["kind"] == "medusa":
        return {"vocab": drafter.get("draft_vocab_size") or 0, "blocks": options.get("num_layers", 1)}
    if drafter["kind"] in EAGLES:
        return {"vocab": drafter.get("draft_vocab_size") or 0, "layers": options.get("num_layers", 1)}
    if options.get("sibling"):
        raise ConfigError(f"drafter.options.sibling = {options['sibling']}: the planner does not know its sizes; write "
                          f"what is known of it as {ACCEPTANCE}, with a named shape as kind")
    return {"layers": len(options.get("keep") or []) or options.get("layers", 0)}


def bits_of(model: str, dtype: str, quantised: Mapping[str, float]) -> float:
    """Bits of a report's target: of its checkpoint where that is known, of the named shape, else of the dtype."""
    try:
        return quantised.get(model) or float(named(model)["bits"])
    except (ConfigError, KeyError):  # a target that no table has, or one in its full width
        return {"float32": 32.0}.get(dtype, 16.0)


def plan_in(plan: dict[str, Any]) -> tuple[int, int, bool]:
    """(branches of a level, tokens verified a row, whether it is a whole chain) of a report's plan. A tree's rates at
    other depths are not known, nor are those of a chain that stops early."""
    kind = plan.get("kind", "chain")
    if kind == "chain":
        return 1, 0, not plan.get("confidence")
    levels = Counter(map(len, plan.get("paths", [])))
    return plan.get("top_k") or max(levels.values()), plan["nodes"] + 1, False


def contexts(buckets: list[dict[str, Any]]) -> list[float]:
    """[shortest, longest] context with enough drafts: the first run of neighbouring buckets that have them; the last
    bucket is open, so it only counts where it begins."""
    run: list[dict[str, Any]] = []
    for bucket in buckets:
        if bucket["drafts"] >= FEWEST_DRAFTS and (not run or bucket["from"] == run[-1]["to"]):
            run.append(bucket)
        elif run:
            break
    if not run:
        return [0.0, 0.0]
    last = run[-1]
    return [float(run[0]["from"]), float(last["from"] if last["to"] >= UNBOUNDED else last["to"])]


def slowest_answers(report: dict[str, Any], domain: str) -> tuple[int, float]:
    """(conversations, kept tokens a target pass that 99 of 100 answers exceed) from the counts of each answer, whose
    first token is the prefill's. Turns of a conversation depend on each other, so they count as one request."""
    rows = [p for p in report.get("prompts", []) if p["passes"] and domain in ("", p["set"])]
    if not rows:
        return 0, 0.0
    lengths = [max(1.0, (p["tokens"] - 1) / p["passes"]) for p in rows]
    return len({(p["set"], p["id"]) for p in rows}), float(np.percentile(lengths, 1))


def draft_for(found: Acceptance, shape: ModelShape, steps: Steps) -> Draft:
    """The drafter whose acceptance this is: the sizes it names, those of the measured steps where it is the same kind,
    else as wide as the target."""
    if found.size:
        return Draft(kind_of(found.kind), parse_into(DraftSize, found.size, f"{found.name}: size"),
                     bits=steps.drafter.get("bits", 16.0))
    kind = kind_of(found.kind)
    same = kind == kind_of(steps.drafter.get("kind", ""))
    if same and (steps.drafter.get("size") or kind == "medusa" and not found.vocab):
        timed = steps.draft()
        if kind in EAGLES and found.vocab:
            timed = replace(timed, size=replace(timed.size, draft_vocab=found.vocab, layers=found.layers or 1))
        return timed
    draft = draft_of(found.kind, shape, layers=found.layers, vocab=found.vocab, blocks=found.blocks)
    return replace(draft, bits=steps.drafter.get("bits", 16.0)) if same and kind in OWN_WEIGHTS else draft
