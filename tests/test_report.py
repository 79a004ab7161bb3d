"""The report: form of report.json, escaping and completeness of the page, and the terminal summary."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.report import render_html, summary_lines, write_report
from eval.summary import markdown
from recipes.errors import RunError

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCHEMA = json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8"))
JSON_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
              "null": type(None)}
RULES = {"type", "required", "properties", "additionalProperties", "items", "minItems", "maxItems", "$ref",
         "const", "enum", "pattern", "minimum", "maximum", "anyOf"}
NOTES = {"$schema", "$defs", "title", "description"}


def buckets(bounds: tuple, drafts: int, mean_length: float) -> list[dict]:
    return [{"from": bounds[0], "to": bounds[1], "drafts": drafts - 40, "mean_length": mean_length + 0.04},
            {"from": bounds[1], "to": bounds[2], "drafts": 40, "mean_length": mean_length - 0.3}]


def numbers(mean_length: float, drafts: int, prompts: int) -> dict:
    """The statistics of one prompt kind, consistent with each other for a draft length of 4."""
    accepted = mean_length - 1
    shares = (0.48, 0.28, 0.15, 0.09)
    positions = [accepted * share for share in shares]
    return {
        "prompts": prompts, "tokens": round(drafts * mean_length) - prompts, "drafts": drafts,
        "acceptance": {
            "rate": accepted / 4, "mean_length": mean_length,
            "per_position": positions,
            "conditional_per_position": [a / b for a, b in zip(positions, [1.0, *positions])],
            "by_context_bucket": buckets((0, 512, 2048), drafts, mean_length),
            "by_answer_position": buckets((0, 16, 64), drafts, mean_length),
            "ci95": [mean_length - 0.14, mean_length + 0.16]},
        "tokens_per_target_pass": mean_length - 0.03, "target_passes": drafts + 3,
        "repetition": {"share": 0.062, "tokens_per_target_pass_without": mean_length - 0.11},
        "vocabulary_misses": {"rejections": drafts - 80, "outside_draft_vocabulary": 31,
                              "share": 31 / (drafts - 80)},
    }


def times(scale: float, n: int) -> dict:
    return {"p50": 21.4 * scale, "p95": 29.8 * scale, "p99": None, "n": n,
            "reason": f"p99 needs 100 times, {n} were measured"}


def sample_report() -> dict:
    lengths = {"chat": 1.93, "code": 2.61, "maths": 2.34, "passage_qa": 2.05, "summarisation": 2.12,
               "translation": 1.78}
    total = numbers(2.14, 2538, 96)
    sets = {"builtin": numbers(2.14, 2538, 96) | {
        "categories": {name: numbers(length, 423, 16) for name, length in lengths.items()},
        "origin": "builtin", "sha256": "0b7d" * 16, "questions": 96, "dropped": {}, "turns_after_cut_answers": 0,
        "untemplated": 0}}
    total |= {
        "rejections": {
            "entropy": {"prompts": 16, "rejected": {"n": 412, "mean_nats": 1.62},
                        "accepted": {"n": 388, "mean_nats": 0.58},
                        "by_entropy": [{"from": 0.0, "to": 0.1, "accepted": 120, "rejected": 21},
                                       {"from": 4.0, "to": None, "accepted": 4, "rejected": 40}]},
            "frequent": [{"drafted": 28, "wanted": 30, "count": 61, "share": 0.025}]},
        "lossless": {"greedy": {"prompts": 24, "tokens": 1432, "mismatches": 0, "near_ties": 1,
                                "tie_gap": 1e-4},
                     "sampling": {"tests": 16, "max_tv": 0.0132, "p_value": 0.417}},
        "speed": {"baseline_tok_s": 31.7, "baseline_engine": "transformers generate",
                  "speculative_tok_s": 43.1, "speedup": 1.36, "ci95": [1.29, 1.44],
                  "predicted_speedup": 1.48, "prompts": 12,
                  "by_batch": [
                      {"batch": 1, "baseline_tok_s": 31.7, "speculative_tok_s": 43.1, "speedup": 1.36,
                       "engine": "transformers generate", "prompts": 12},
                      {"batch": 8, "baseline_tok_s": 142.0, "speculative_tok_s": 129.4, "speedup": 0.91,
                       "engine": "drafthouse plain loop", "prompts": 12}],
                  "draft_step_ms": 3.1, "target_step_ms": 30.9, "verify_ms": 34.6, "step_repeats": 15,
                  "cycle": {"cycles": 190, "cycle_ms": 48.9, "draft_ms": 12.6, "verify_ms": 32.7, "sample_ms": 0.4,
                            "cache_ms": 1.7, "other_ms": 1.5},
                  "engines": {"drafthouse plain loop": 30.2, "transformers generate": 31.7}},
        "memory": {"peak_bytes": 1_873_412_096},
        "latency": {"ttft_ms": {"baseline": times(3.9, 12), "speculative": times(4.1, 12)},
                    "itl_ms": {"baseline": {"p50": 30.1, "p95": 38.8, "p99": 44.0, "n": 564},
                               "speculative": {"p50": 22.0, "p95": 47.9, "p99": 51.3, "n": 564}},
                    "burst_ms": {"baseline": {"p50": 30.1, "p95": 38.8, "p99": 44.0, "n": 564},
                                 "speculative": {"p50": 47.3, "p95": 50.9, "p99": None, "n": 264,
                                                 "reason": "p99 needs n >= 500"}}},
    }
    return {
        "schema": "drafthouse.report/1", "name": "demo",
        "target": {"model": "embedded:smollm2-135m", "layers": [2, 15, 27],
                   "fingerprint": {"weights": "9f2c" * 16, "config": "51ab" * 16, "dtype": "float32"}},
        "drafter": {"kind": "eagle3", "checkpoint": "runs/demo/checkpoints/best", "parameters": 6_412_992,
                    "draft_vocab_size": 8192, "options": {"depth": 1, "hidden_noise": 0.05}},
        "stack": {"versions": {"torch": "2.13.0", "transformers": "5.20.1"}, "dtype": "float32",
                  "device": "cpu", "threads": 2, "OMP_WAIT_POLICY": "unset", "load_1m": 1.94,
                  "git": "cfc3741+changes", "time": "2026-02-11T14:03:21+00:00"},
        "settings": {"draft_length": 4, "temperature": 0.0, "max_tokens": 64, "batch_size": 16,
                     "prompts": "builtin", "prompts_sha256": "0b7d" * 16, "prompt_ids_sha256": "77e1" * 16,
                     "seed": 0},
        "total": total,
        "sets": sets,
        "prompts": [{"set": "builtin", "id": "chat-01", "category": "chat", "round": 0, "ids_sha256": "ab" * 8,
                     "prompt_tokens": 41, "tokens": 64, "passes": 30, "drafts": 30, "accepted": 34}],
        "verdict": {"decision": "deploy within batch 1 to 4", "range": "batch 1 to 4",
                    "reasons": ["Faster at batch 1: 1.36x, 95 % CI 1.29 to 1.44.",
                                "Slower at batch 8: 0.91x."]},
    }


def sample_curve() -> list[dict]:
    return [{"step": 50 * i, "tokens": 41_000 * i, "train_loss": 6.2 / i**0.5 + 0.8,
             "mean_length": 2.2 - 1.1 / i, "per_position": [0.5, 0.3, 0.2, 0.1]} for i in range(1, 9)]


class Page(HTMLParser):
    """Tags, ids, links and visible text of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.ids, self.links, self.words = [], [], [], []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        self.links += [value for key, value in attrs if key in ("href", "xlink:href", "src", "srcset")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self.words.append(data)


def violations(value: object, schema: dict, where: str = "report") -> list[str]:
    """What breaks the schema, by the keywords in RULES alone."""
    if schema is True:
        return []
    if "$ref" in schema:
        return violations(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    found = []
    kinds = schema.get("type", list(JSON_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, bool):
        return [] if "type" not in schema else [f"{where}: {value!r} is not {kinds}"]
    if not any(isinstance(value, JSON_TYPES[kind]) for kind in kinds):
        return [f"{where}: {value!r} is not {kinds}"]
    if "anyOf" in schema and all(violations(value, option, where) for option in schema["anyOf"]):
        found.append(f"{where}: no alternative holds")
    if value not in schema.get("enum", [schema.get("const", value)]):
        found.append(f"{where}: {value!r} is not allowed")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{where}: {value!r} does not match")
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    if isinstance(value, int | float) and not low <= value <= high:
        found.append(f"{where}: {value} is out of range")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where}: {len(value)} items")
        for i, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{where}[{i}]")
    if isinstance(value, dict):
        found += [f"{where}: {key} is missing" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            part = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            inner = f"{where}.{key}"
            found += [f"{inner} is unknown"] if part is False else violations(item, part, inner)
    return found


def schemas(schema: dict) -> list[dict]:
    """A schema and every schema inside it."""
    inner = [part for key in ("properties", "$defs") for part in schema.get(key, {}).values()]
    inner += schema.get("anyOf", [])
    inner += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return [schema, *(found for part in inner for found in schemas(part))]


def test_sample_follows_the_schema():
    assert violations(sample_report(), SCHEMA) == []
    assert {key for schema in schemas(SCHEMA) for key in schema} <= RULES | NOTES


@pytest.mark.parametrize("path, value, complaint", [
    ("total.acceptance.ci95", [1.0], "1 items"),
    ("total.acceptance.rate", 1.2, "out of range"),
    ("total.drafts", 12.5, "is not"),
    ("sets.builtin.drafts", None, "no alternative"),
    ("sets.builtin.prompts", None, "is not"),
    ("sets.builtin.categories.chat.extra", 1, "unknown"),
    ("total.latency.ttft_ms.baseline", {"p50": None, "p95": 1.0, "p99": 1.0, "n": 3}, "no alternative"),
    ("verdict.decision", "deploy within", "does not match"),
    ("schema", "drafthouse.report/2", "not allowed"),
])
def test_schema_refuses(path, value, complaint):
    report = sample_report()
    *parents, last = path.split(".")
    place = report
    for key in parents:
        place = place[key]
    place[last] = value
    found = violations(report, SCHEMA)
    assert len(found) == 1 and complaint in found[0]


def test_docs_explain_every_key():
    documented = set(re.findall(r"`([^`]+)`", (DOCS / "report.md").read_text(encoding="utf-8")))
    keys = {key for schema in schemas(SCHEMA) for key in schema.get("properties", {})}
    assert {key for key in keys if not any(key in re.split(r"\W+", text) for text in documented)} == set()


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html(sample_report(), sample_curve()))


def test_headline_numbers_carry_n_and_interval(page):
    text = page.text
    assert "2.14 tokens per draft 95 % CI 2.00 to 2.30 n = 2,538 drafts in 96 prompts" in text
    assert "1.36× at batch 1 95 % CI 1.29 to 1.44; n = 12 prompts" in text
    assert "43.1 against 31.7 tokens/s of transformers generate" in text
    assert "0 mismatches Greedy, against plain decoding: n = 24 prompts, 1,432 tokens; 1 near-tie" in text
    assert "Sampling test : p = 0.417, n = 16 tests" in text


def test_verdict_reasons_and_every_set_are_on_the_page(page):
    report = sample_report()
    kinds = report["sets"]["builtin"]["categories"]
    for part in (report["verdict"]["decision"], *report["verdict"]["reasons"], *kinds):
        assert part in page.text


def test_each_batch_names_its_baseline(page):
    """Case 23: the engine of a row is its own, not that of batch 1; step times are medians of their repeats."""
    assert "1 transformers generate 31.7 43.1 1.36×" in page.text
    assert "8 drafthouse plain loop 142.0 129.4 0.91×" in page.text
    assert "Medians of n = 15 calls at batch 1" in page.text
    assert "Burst latency , speculative 264 47.3 50.9 n/a" in page.text


def test_missing_percentiles_show_their_reason(page):
    assert "n/a for TTFT, baseline: p99 needs 100 times, 12 were measured" in page.text
    assert "n/a for TTFT, speculative: p99 needs 100 times, 12 were measured" in page.text
    assert "None" not in page.text


def test_names_are_escaped_everywhere():
    evil = "<script>alert('$x$')</script>"
    report = sample_report()
    report["target"]["model"] = report["name"] = report["drafter"]["checkpoint"] = evil
    report["stack"]["versions"][evil] = evil
    report["sets"]["builtin"]["categories"][evil] = report["sets"]["builtin"]["categories"]["chat"]
    report["sets"][evil] = report["sets"]["builtin"]
    report["verdict"]["reasons"] = [evil]
    report["sets"]["builtin"]["dropped"] = {evil: 1}
    report["total"]["rejections"]["frequent"][0] |= {
        "drafted_text": evil, "wanted_text": evil,
        "examples": [{"set": "builtin", "id": evil, "before": evil, "after": evil}]}
    report["prompts"][0] |= {"id": evil, "prompt": evil, "answer": evil}
    report["total"]["speed"]["engines"][evil] = 30.0
    report["total"]["latency"]["ttft_ms"]["baseline"]["reason"] = evil
    html = render_html(report, sample_curve())
    assert "<script" not in html
    assert evil in Page(html).text


def test_page_is_self_contained(page):
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert page.tags.count("svg") == 7


def test_page_without_a_curve_says_so():
    page = Page(render_html(sample_report(), []))
    assert page.tags.count("svg") == 6
    assert "No validation was recorded" in page.text


def test_same_report_gives_the_same_bytes():
    assert render_html(sample_report(), sample_curve()) == render_html(sample_report(), sample_curve())


@pytest.mark.parametrize("decision, style", [("deploy", "yes"), ("deploy within batch 1", "limited"),
                                             ("do not deploy", "no")])
def test_verdict_style(decision, style):
    report = sample_report()
    report["verdict"]["decision"] = decision
    assert f'class="verdict {style}"' in render_html(report, [])


def test_unknown_decision_is_an_error():
    report = sample_report()
    report["verdict"]["decision"] = "maybe"
    with pytest.raises(ValueError, match="maybe"):
        render_html(report, [])


def test_summary_lines():
    assert summary_lines(sample_report()) == [
        "Mean acceptance length  2.14 tokens per draft (95 % CI 2.00 to 2.30; n = 2,538 drafts)",
        "Speedup                 1.36x over transformers generate (95 % CI 1.29 to 1.44; n = 12 prompts)",
        "Lossless                0 mismatches in 24 prompts, 1,432 tokens; 1 near-tie",
        "Verdict                 deploy within batch 1 to 4, at temperature 0 (greedy)",
        "                        - Faster at batch 1: 1.36x, 95 % CI 1.29 to 1.44.",
        "                        - Slower at batch 8: 0.91x.",
    ]


def test_write_report(tmp_path):
    report = sample_report()
    before = copy.deepcopy(report)
    page = write_report(report, sample_curve(), tmp_path / "eval")
    assert page == tmp_path / "eval" / "report.html"
    assert json.loads((tmp_path / "eval" / "report.json").read_text(encoding="utf-8")) == report == before
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json", "report.md"]


def test_markdown_summary():
    """Verdict, three numbers with interval and n, kinds, percentiles without null, and the gate where there is one."""
    report = sample_report()
    report["target"]["model"] = "<b>|x"
    text = markdown(report, [{"metric": "total.speed.speedup", "value": 1.36, "bound": "min 1.2", "state": "held"}])
    assert text.startswith("### eagle3 drafter for \\<b\\>\\|x: deploy within batch 1 to 4, at temperature 0 (greedy)\n"
                           "\n- Faster at batch 1")
    for part in ("| mean acceptance length (tokens per draft) | 2.14 | 2.00 to 2.30 | 2,538 drafts, 96 prompts |",
                 "| speedup over transformers generate, batch 1 | 1.36x | 1.29 to 1.44 | 12 prompts |",
                 "| code | 2.61 | 2.47 to 2.77 | 2.58 | 16 |", "| total.speed.speedup | 1.36 | min 1.2 | held |",
                 "| inter-token latency, speculative (ms) | 22.0 | 47.9 | 51.3 | 564 |"):
        assert part in text
    assert "None" not in text and "gate" not in markdown(report)


def test_a_number_that_is_none_stops_the_report(tmp_path):
    report = sample_report()
    report["sets"]["builtin"]["categories"]["code"]["acceptance"]["ci95"][1] = float("nan")
    with pytest.raises(RunError, match=r"report\.sets\.builtin\.categories\.code\.acceptance\.ci95\.1 is nan"):
        write_report(report, [], tmp_path / "eval")
    assert not (tmp_path / "eval").exists()
