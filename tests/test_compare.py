"""`make compare`: pairs and no pairs, significance, what may stand side by side, and the page."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from test_report import Page, sample_report

from eval.compare import COMMAND, as_markdown, compared, read_runs
from eval.paired import METRICS, conclusion, conversations, holm, judge, matched
from eval.plots import draw_comparison
from recipes.cli import run as run_command
from recipes.errors import ConfigError

LENGTH = next(m for m in METRICS if m.name == "mean_length")
SPEEDUP = next(m for m in METRICS if m.name == "speedup")
TIME = next(m for m in METRICS if m.name == "ms_per_token")


def prompts(gain: float, count: int = 40, seed: int = 0, named: str = "chat-%02d", timed: int = 12) -> list[dict]:
    """Counts of answers with `gain` accepted tokens a draft in the mean; prompts differ far more than runs do."""
    random = np.random.default_rng(0)  # the same prompts for every run
    noise = np.random.default_rng(seed)
    found = []
    for i in range(count):
        drafts = int(random.integers(10, 30))
        level = gain + random.normal(0, 0.5)
        accepted = int(max(0, round(drafts * (level + noise.normal(0, 0.03)))))
        one = {"set": "builtin", "id": named % i, "category": "chat", "round": 0, "ids_sha256": f"{i:016x}",
               "prompt_tokens": 40, "tokens": drafts + accepted + 1, "passes": drafts, "drafts": drafts,
               "accepted": accepted}
        if i < timed:
            one |= {"baseline_tokens": 30, "baseline_s": 1.0, "timed_tokens": 30, "timed_s": 1 / (1 + level / 3)}
        found.append(one)
    return found


def written(folder: Path, name: str, **changes) -> str:
    report = sample_report() | {"name": name, "prompts": prompts(1.2)} | changes
    path = folder / name / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(report))
    return str(path)


def sides(a: list[dict], b: list[dict]) -> tuple[dict, dict]:
    return conversations({"prompts": a}), conversations({"prompts": b})


def test_conversations_are_summed_over_turns():
    """Two turns of one conversation are one unit, known by its first ids; kept tokens exclude each prefill's."""
    two = [prompts(1.0, 1)[0], prompts(1.0, 1)[0] | {"round": 1, "ids_sha256": "f" * 16}]
    (key, (checksum, counts)), = conversations({"prompts": two}).items()
    assert key == ("builtin", "chat-00") and checksum == f"{0:016x}"
    assert counts[1] == 2 * two[0]["drafts"] and counts[2] == 2 * (two[0]["tokens"] - 1)


def test_a_small_gain_is_shown_by_pairs_only():
    """Prompts differ by much more than the runs: pairs see a gain of 0.1 that unpaired sides cannot."""
    a, b = prompts(1.2, seed=1), prompts(1.3, seed=2)
    pairs = judge(LENGTH, *sides(a, b), seed=0)
    assert pairs["paired"] and pairs["n"] == [40, 40]
    assert pairs["difference"] == pytest.approx(0.1, abs=0.03) and pairs["ci95"][0] > 0 and pairs["p_value"] < 0.01
    others = judge(LENGTH, *sides(a, [p | {"ids_sha256": "0" * 15 + "x"} for p in b]), seed=0)
    assert not others["paired"] and others["difference"] == pytest.approx(pairs["difference"])
    assert others["ci95"][0] < 0 < others["ci95"][1] and others["p_value"] > 0.05


def test_no_difference_is_rarely_shown():
    """Two runs of one level: p below 0.05 in few of 40 repetitions."""
    found = [judge(LENGTH, *sides(prompts(1.2, seed=2 * i + 1), prompts(1.2, seed=2 * i + 2)), seed=i)["p_value"]
             for i in range(40)]
    assert sum(p < 0.05 for p in found) <= 6


def test_metrics_by_hand():
    """Speedup is a ratio of sums; time per token is better when lower; untimed prompts do not count there."""
    a = [p | {"timed_s": 1.0} if "timed_s" in p else p for p in prompts(1.2)]
    b = [p | {"timed_s": 0.5} if "timed_s" in p else p for p in prompts(1.2)]
    speed = judge(SPEEDUP, *sides(a, b), seed=0)
    assert (speed["a"], speed["b"], speed["n"]) == (pytest.approx(1.0), pytest.approx(2.0), [12, 12])
    time = judge(TIME, *sides(a, b), seed=0)
    assert (time["a"], time["b"]) == (pytest.approx(1000 / 30), pytest.approx(500 / 30))
    assert conclusion(TIME, time | {"p_adjusted": 0.01}) == "better"
    assert conclusion(SPEEDUP, speed | {"p_adjusted": 0.2}) == "no difference shown"


def test_too_few_conversations_give_no_figure():
    found = judge(LENGTH, *sides(prompts(1.2, 4), prompts(1.2, 4)), seed=0)
    assert found["ci95"] is None and "needs 5 conversations" in found["reason"]
    assert conclusion(LENGTH, found | {"p_adjusted": None}) == "not judged"


def test_half_of_the_smaller_side_must_match():
    """20 of 40 shared: pairs; 19 of 40: unpaired over all."""
    a = prompts(1.2)
    b = prompts(1.2, named="other-%02d")
    assert judge(LENGTH, *sides(a, a[:20] + b[20:]), seed=0)["n"] == [20, 20]
    found = judge(LENGTH, *sides(a, a[:19] + b[19:]), seed=0)
    assert not found["paired"] and found["n"] == [40, 40]
    assert len(matched(*sides(a, a[:19] + b[19:]))) == 19


def test_holm_by_hand():
    """Smallest times the number, and so on; never falling; None is left out."""
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_other_stacks_need_a_flag(tmp_path):
    """Case 50: another version of torch is refused by name, and with --across listed."""
    stack = copy.deepcopy(sample_report()["stack"])
    stack["versions"]["torch"] = "2.14.0"
    paths = [written(tmp_path, "one"), written(tmp_path, "two", stack=stack)]
    with pytest.raises(ConfigError, match="stack.versions.torch was '2.13.0', now '2.14.0'.*--across"):
        read_runs(paths, allowed=False)
    assert read_runs(paths, allowed=True)[1].differs == ["stack.versions.torch was '2.13.0', now '2.14.0'"]
    target = sample_report()["target"] | {"fingerprint": {"weights": "other"}}
    with pytest.raises(ConfigError, match="target.weights was"):
        read_runs([paths[0], written(tmp_path, "three", target=target)], allowed=False)


@pytest.mark.parametrize("content, message", [
    (None, "cannot read this report"), ("{", "not JSON"), ("[]", "not a report of form drafthouse.report/1"),
    ('{"schema": "drafthouse.report/1"}',
     "name, target, drafter, stack, settings, total, sets, prompts, verdict missing"),
])
def test_files_that_are_no_reports(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_runs([written(tmp_path, "one"), str(path)], allowed=False)


def test_fewer_than_two(tmp_path):
    path = written(tmp_path, "one")
    for paths in ([], [path], [path, path]):
        with pytest.raises(ConfigError, match="make compare"):
            read_runs(paths, allowed=False)


def test_settings_that_differ_are_named(tmp_path):
    settings = sample_report()["settings"] | {"draft_length": 6}
    runs = read_runs([written(tmp_path, "one"), written(tmp_path, "two", settings=settings)], allowed=False)
    assert runs[1].differs == ["draft_length was 4, now 6"]


def test_the_command(tmp_path, capsys):
    """Three runs: JSON, a self-contained page that escapes, Markdown, and a table."""
    evil = "<script>|x"
    paths = [written(tmp_path, "base"), written(tmp_path, "good", prompts=prompts(1.6, seed=3)),
             written(tmp_path, "bad", prompts=prompts(0.9, seed=4), settings=sample_report()["settings"] | {
                 "prompts": evil})]
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, [*paths, "--out", str(tmp_path / "out"), "--runs_dir", str(tmp_path)])
    assert stop.value.code == 0 and "better" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    length = next(m for m in result["metrics"] if m["metric"] == "mean_length")
    assert [one["conclusion"] for one in length["against_first"]] == ["better", "worse"]
    html = (tmp_path / "out" / "compare.html").read_text()
    page = Page(html)
    assert "<script" not in html and evil in page.text and not {"script", "link", "img"} & set(page.tags)
    assert "A base" in page.text and page.tags.count("svg") == 2
    markdown = (tmp_path / "out" / "compare.md").read_text()
    assert "\\<script\\>\\|x" in markdown and markdown.count("\n|") == 2 + 2 * len(METRICS)


def test_a_lossy_report_is_marked_wherever_it_shows(tmp_path, capsys):
    """Label, so table, plots and page; summary; Markdown and terminal say why. The mark stands in front of a name that
    plots cut."""
    lossy = sample_report()["settings"] | {"acceptance": "typical", "lossy": True}
    long = "a-name-that-no-plot-has-room-for"
    paths = [written(tmp_path, "base"), written(tmp_path, long, prompts=prompts(1.6, seed=3), settings=lossy)]
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, [*paths, "--out", str(tmp_path / "out"), "--runs_dir", str(tmp_path)])
    out, label = capsys.readouterr().out, f"B LOSSY {long}"
    assert stop.value.code == 0 and f"{label}: typical acceptance" in out
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [(run["label"], run["lossy"]) for run in result["runs"]] == [("A base", False), (label, True)]
    assert {one["run"] for metric in result["metrics"] for one in metric["against_first"]} == {label}
    assert f"{label}: typical acceptance" in (tmp_path / "out" / "compare.md").read_text()
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert f"{label} : typical acceptance" in page.text and "lossy true" in page.text
    assert f"{label} 2." in draw_comparison(result["runs"])["length"]  # the plot's own words


def test_the_same_reports_give_the_same_comparison(tmp_path):
    paths = [written(tmp_path, "one"), written(tmp_path, "two", prompts=prompts(1.3))]
    one, two = (compared(read_runs(paths, False), seed=1) for _ in range(2))
    assert one == two and as_markdown(one) == as_markdown(two)


def test_servers_timed_at_other_concurrencies_need_a_flag(tmp_path):
    """Case 23: times at 4 and at 16 requests in flight say nothing of the drafters."""
    settings = sample_report()["settings"] | {"batch_size": 4}
    paths = [written(tmp_path, "one", server={}), written(tmp_path, "two", server={}, settings=settings)]
    with pytest.raises(ConfigError, match="was timed at concurrency 4, .* at concurrency 16; give --across"):
        read_runs(paths, allowed=False)
    assert "batch_size was 16, now 4" in read_runs(paths, allowed=True)[1].differs
    assert compared(read_runs(paths, allowed=True), 0)["timed_at"] == "concurrency 16"


def test_plots_leave_out_what_a_run_does_not_know():
    """A server without counters, or without a baseline: no point, and no plot where no run has one."""
    rows = [{"label": name, "mean_length": None, "ci95": None, "speedup": speedup, "speedup_ci95": ci95}
            for name, speedup, ci95 in (("A one", None, None), ("B two", 1.25, [1.0, 1.5]))]
    plots = draw_comparison(rows)
    assert plots["length"] is None and "B two 1.25" in plots["speedup"] and "A one" not in plots["speedup"]
