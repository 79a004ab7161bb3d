"""The report's figures in a tracker: same names, same numbers."""

import pytest
from test_report import sample_report

from eval.track import check_tracker, figures, log_figures
from recipes.errors import ConfigError
from recipes.schema import Eval, Recipe


def test_figures_are_the_reports_numbers():
    found = figures(sample_report())
    assert found["total.acceptance.mean_length"] == 2.14 and found["total.speed.by_batch.1.speedup"] == 0.91
    assert found["sets.builtin.categories.code.acceptance.mean_length"] == 2.61
    assert None not in found.values() and "total.latency.ttft_ms.baseline.p99" not in found


def test_an_unknown_tracker_is_named_before_the_work():
    check_tracker("none")
    with pytest.raises(ConfigError, match="eval.tracker = wandbb: not installed or not known; here: none"):
        check_tracker("wandbb")


def test_wandb_offline_writes_into_the_run(tmp_path, monkeypatch):
    """Without a key nothing leaves the machine: the files of one offline run are in the run's folder."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    log_figures(Recipe(eval=Eval(tracker="none")), sample_report(), tmp_path)
    assert not list(tmp_path.iterdir())
    log_figures(Recipe(eval=Eval(tracker="wandb")), sample_report(), tmp_path)
    stored, = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"total.acceptance.mean_length" in stored.read_bytes() and b"temperature 0 (greedy)" in stored.read_bytes()
