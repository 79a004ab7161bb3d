"""The model card of a published drafter: numbers from the evaluation's report, never computed here.

Everything that comes from a recipe or report is escaped: a name cannot add markup to the card.
"""

import html
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from eval.licences import LICENCES, Start, TargetTerms
from eval.plans import in_words
from eval.settings import beyond_greedy, measured_at
from recipes.errors import ConfigError

METRICS = (  # of the model-index: name, path in the report's total
    ("mean_acceptance_length", "Mean acceptance length (tokens per draft)", ("acceptance", "mean_length")),
    ("acceptance_rate", "Acceptance rate", ("acceptance", "rate")),
    ("tokens_per_target_pass", "Tokens per target pass", ("tokens_per_target_pass",)),
    ("speedup", "Speedup over plain decoding at batch 1", ("speed", "speedup")),
)


@dataclass(frozen=True)
class CardFacts:
    """What a card says besides the report."""

    repo: str
    licence: str
    terms: TargetTerms
    data: list[tuple[str, str]]
    notices: list[str]
    layout: str
    prompts_shown: bool
    serve: str  # SERVE.md
    recipe: str  # as YAML, without local names
    start: Start | None = None
    answers_kept: bool = False  # generation.answers: keep
    positions: int = 0  # that the drafter is labelled for; 0: not said


def plain(value: Any) -> str:
    """Text inside a card: no markup, no table cell or line of its own."""
    text = " ".join(str(value).split())
    return html.escape(text, quote=False).replace("|", "\\|").replace("`", "'").replace("[", "\\[")


def metadata(facts: CardFacts, report: dict[str, Any]) -> str:
    """The card's YAML header with the metrics as a model-index."""
    total, settings = report["total"], report["settings"]
    dataset = "builtin" if settings["prompts"] == "builtin" else "custom"
    results = []
    for kind, name, path in METRICS:
        value = total
        for key in path:
            value = value[key]
        results.append(EvalResult(
            task_type="text-generation", task_name=f"Speculative decoding, {beyond_greedy(settings) or 'greedy'}",
            dataset_type=dataset,
            dataset_name=f"Drafthouse {dataset} prompts", dataset_args={"sha256": settings["prompts_sha256"]},
            metric_type=kind, metric_name=name, metric_value=round(float(value), 4),
            metric_args={"draft_length": settings["draft_length"], "plan": settings["plan"]["kind"],
                         "prompts": total["prompts"], "drafts": total["drafts"]}))
    known = facts.licence in LICENCES
    data = ModelCardData(
        model_name=facts.repo.rpartition("/")[2], base_model=facts.terms.base_model,
        license=facts.licence if known else "other", license_name=None if known else facts.licence,
        pipeline_tag="text-generation", eval_results=results,
        tags=["speculative-decoding", report["drafter"]["kind"], "draft-model"])
    return data.to_yaml()


def model_card(facts: CardFacts, report: dict[str, Any]) -> str:
    """README.md."""
    return f"---\n{metadata(facts, report)}\n---\n{body(facts, report)}"


def body(facts: CardFacts, report: dict[str, Any]) -> str:
    terms, drafter = facts.terms, report["drafter"]
    titles = LICENCES.get(facts.licence)
    lines = [
        f"# {plain(facts.repo.rpartition('/')[2])}", "",
        f"A draft model ({plain(drafter['kind'])}, {drafter['parameters']:,} parameters, draft vocabulary of "
        f"{drafter['draft_vocab_size']:,}) for speculative decoding with `{plain(terms.base_model)}`. It changes no "
        "output: the target verifies every token. It is of no use by itself, nor with another or a fine-tuned target.",
        ""]
    if terms.origin:
        lines += [f"**The target was {plain(terms.origin)}.** Its weights are not those of `{plain(terms.base_model)}` "
                  "bit for bit, and acceptance with the latter was not measured.", ""]
    lines += ["## Measured", "", *measured(report), "", "## Use", "", used(facts.serve), "", "## Training", ""]
    lines += [*trained(facts), "",
              "Prompt texts are " + ("in evaluation_prompts.jsonl." if facts.prompts_shown else "not published."), "",
              "<details><summary>Recipe</summary>", "",
              *("    " + line for line in html.escape(facts.recipe, quote=False).splitlines()), "", "</details>", "",
              "## Licence", "",
              f"{plain(titles.title if titles else facts.licence)}. Target: {plain(terms.licence)}.", ""]
    lines += [f"- {plain(notice)}" for notice in facts.notices]
    found = limits(report)
    if facts.positions:
        found.append(f"Labelled for {facts.positions:,} positions; contexts beyond them are not for this drafter.")
    lines += ["", "## Limits", "", *(f"- {limit}" for limit in found), ""]
    return "\n".join(lines)


def trained(facts: CardFacts) -> list[str]:
    """What the drafter was trained on, as far as this run knows."""
    data = [f"- {plain(what)}: {plain(licence)}" for what, licence in facts.data]
    if facts.start and facts.start.itself:
        return ["Not trained by the recipe below, which evaluated and exported it. On what it was trained is its "
                "authors' to say. Its origin:", "", *data]
    return ["Training data, by source:", "", *data,
            "- answers: those that came with the prompts; hidden states: the target's own" if facts.answers_kept
            else "- answers and hidden states: the target's own"]


def measured(report: dict[str, Any]) -> list[str]:
    """The acceptance table, with sample sizes and intervals."""
    total, K = report["total"], report["settings"]["draft_length"]
    low, high = total["acceptance"]["ci95"]
    speed = total["speed"]
    rows = [("all", total), *report["sets"].items()]
    lines = [
        f"Mean acceptance length **{total['acceptance']['mean_length']:.2f}** tokens per draft (95 % interval "
        f"{low:.2f} to {high:.2f}; {total['drafts']:,} drafts, {total['prompts']:,} prompts), "
        f"{plain(in_words(report['settings']['plan']))}, {beyond_greedy(report['settings']) or 'greedy'}. "
        f"Speedup {speed['speedup']:.2f} over {plain(speed['baseline_engine'])} at batch 1 "
        f"({speed['prompts']} prompts, {plain(report['stack']['device'])}, {plain(report['stack']['dtype'])}).", "",
        "Cumulative acceptance: the share of drafts whose first tokens, up to this position, the target accepted.", "",
        "| prompts | n | mean length | " + " | ".join(f"position {i + 1}" for i in range(K)) + " |",
        "|---" * (3 + K) + "|"]
    for name, numbers in rows:
        shares = " | ".join(f"{100 * rate:.1f} %" for rate in numbers["acceptance"]["per_position"])
        length = numbers["acceptance"]["mean_length"]
        lines.append(f"| {plain(name)} | {numbers['prompts']:,} | {length:.2f} | {shares} |")
    greedy, sampling = total["lossless"]["greedy"], total["lossless"]["sampling"]
    verdict, versions = report["verdict"], {key: plain(value) for key, value in report["stack"]["versions"].items()}
    lines += ["", f"Lossless: {greedy['mismatches']} of {greedy['prompts']} greedy answers differ from plain decoding "
              f"({greedy['near_ties']} near-ties); sampled tokens against the target's distribution, p = "
              f"{sampling['p_value']:.3g} in {sampling['tests']} tests.", "",
              f"Verdict: {plain(verdict['decision'])} ({plain('; '.join(verdict['reasons']))}).", "",
              f"Measured with torch {versions.get('torch')}, transformers {versions.get('transformers')}, "
              f"drafthouse {plain(report['stack']['git'])}. "
              "Figures of another engine or version are to be measured there."]
    return lines


def used(serve: str) -> str:
    """SERVE.md one heading lower, without its title."""
    return "\n".join("#" + line if line.startswith("## ") else line for line in serve.splitlines()[2:])


def limits(report: dict[str, Any]) -> list[str]:
    """Where the numbers do not hold, a sentence each."""
    total, plan, found = report["total"], report["settings"]["plan"], []
    if plan["kind"] != "chain" or plan["confidence"]:
        found.append(f"Measured with {in_words(plan)}; the commands above draft plain chains, whose acceptance is "
                     "another.")
    found.append(f"Measured at {measured_at(report['settings'])}; requests at other settings accept otherwise.")
    buckets = total["acceptance"]["by_context_bucket"]
    longest = max((bucket["to"] for bucket in buckets), default=0)
    found.append(f"Contexts of up to {longest:,} tokens were measured; longer ones were not.")
    weak = [name for name, numbers in report["sets"].items()
            if numbers["acceptance"]["mean_length"] < 0.85 * total["acceptance"]["mean_length"]]
    if weak:
        found.append(f"Clearly weaker on {', '.join(plain(name) for name in weak)}.")
    share = total["vocabulary_misses"]["share"]
    if share is not None:
        found.append(f"{100 * share:.0f} % of rejected drafts met a token outside the draft vocabulary.")
    found.append("Speed depends on hardware, batch size and engine; at large batches speculation can be slower than "
                 "none.")
    found.append("Languages and domains other than the training prompts' were not measured unless listed above.")
    return found


def check_report(report: dict[str, Any]) -> None:
    """ConfigError where a report lacks what a card shows."""
    try:
        measured(report), limits(report)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"eval/report.json: {error!r}: not a whole report; run `make eval` again") from None
