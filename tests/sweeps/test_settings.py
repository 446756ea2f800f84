"""Rankings, tables and verdicts of settings, compared with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from sweep_results import GRID, result, sweep

from runner.sweeps.settings import group_jobs, rank_jobs, tabulate_jobs, tabulate_settings, without_empty


def test_settings_are_ranked_by_mean_and_those_with_missing_seeds_come_last():
    """The best job, with 0.9, belongs to a setting whose other seed is not finite."""
    settings = group_jobs(rank_jobs(GRID, sweep()))
    assert [setting.name for setting in settings] == ["lr=0.01", "lr=10", "lr=0.1", "lr=1"]
    assert [setting.mean for setting in settings] == [pytest.approx(0.6), pytest.approx(0.4), 0.9, 0.8]
    # The spread is the standard deviation of the sample, with n - 1.
    assert [setting.spread for setting in settings] == [pytest.approx(0.02**0.5), 0.0, None, None]
    assert [setting.describe_missing() for setting in settings] == ["", "", "1 not finite", "1 failed"]
    assert [[job.values["seed"] for job in setting.jobs] for setting in settings] == [[0, 1]] * 4


def test_a_setting_without_results_is_last():
    jobs = [result(None, "lr=1", status="FAILED"), result(0.1, "lr=2", "seed=0"), result(math.nan, "lr=2", "seed=1")]
    assert [setting.name for setting in group_jobs(rank_jobs(jobs, sweep()))] == ["lr=2", "lr=1"]


@pytest.mark.parametrize(("direction", "lower", "best"), [("", False, 0.9), ("", True, 0.5), ("minimize", False, 0.5)])
def test_the_direction_of_the_sweeper_overrides_that_of_the_metric(direction: str, lower: bool, best: float):
    jobs = [result(value, f"lr={number}", lower=lower) for number, value in enumerate((0.7, 0.5, 0.9))]
    assert rank_jobs(jobs, sweep(direction))[0].result.objective == best
    assert group_jobs(rank_jobs(jobs, sweep(direction)))[0].mean == best


def test_the_table_of_settings_has_means_of_all_metrics():
    columns, rows = tabulate_settings(group_jobs(rank_jobs(GRID, sweep()))[:3], ["train/acc"])
    assert columns == ["lr", "eval/acc", "spread", "n", "verdict", "train/acc", "seconds", "missing"]
    assert rows[0] == [0.01, pytest.approx(0.6), pytest.approx(0.02**0.5), 2, "leads", 0.5, 1.23, ""]
    assert rows[2] == [0.1, 0.9, None, 1, "", 0.5, 1.23, "1 not finite"]
    assert without_empty(columns, [rows[2]])[0] == ["lr", "eval/acc", "n", "train/acc", "seconds", "missing"]


def test_jobs_without_an_objective_are_last_in_the_table():
    columns, rows = tabulate_jobs(rank_jobs(GRID, sweep()))
    assert columns == ["job", "lr", "seed", "eval/acc", "train/acc", "seconds", "status"]
    assert [row[:4] for row in rows[:2]] == [["0.1-0", 0.1, 0, 0.9], ["1.0-1", 1.0, 1, 0.8]]
    assert math.isnan(rows[6][3]) and rows[6][-2:] == [1.23, "FINISHED"]
    assert rows[7] == ["1.0-0", 1.0, 0, None, None, 1.23, "FAILED"]


def test_jobs_without_a_seed_are_settings_of_one_job():
    jobs = rank_jobs([result(0.5, "lr=1", "algorithms=[a,b]"), result(0.6, "lr=1", "algorithms=[a]")], sweep())
    assert [(setting.name, setting.objectives) for setting in group_jobs(jobs)] == [
        ("algorithms=a lr=1", [0.6]),
        ("algorithms=a+b lr=1", [0.5]),
    ]


def test_a_sweep_of_seeds_is_one_setting():
    (setting,) = group_jobs(rank_jobs([result(0.1 * seed, f"seed={seed}") for seed in (10, 2)], sweep()))
    assert (setting.name, setting.objectives, setting.mean) == ("all runs", [0.2, 1.0], 0.6)


def test_the_folds_of_a_seed_count_as_their_mean():
    jobs = [
        result(0.1 * fold + lr, f"lr={lr}", "seed=0", f"folds.held_out={fold}") for lr in (0, 1) for fold in range(8)
    ]
    settings = group_jobs(rank_jobs(jobs, sweep()))
    assert [(len(setting.objectives), setting.scores, setting.verdict) for setting in settings] == [
        (8, {"0": pytest.approx(-1.35)}, ""),
        (8, {"0": pytest.approx(-0.35)}, ""),
    ]


def verdicts(*values: list[float], data: str = "") -> dict[str, str]:
    """Return the verdicts on settings with these objectives, one per seed; the last was evaluated on `data`."""
    jobs = []
    for number, objectives in enumerate(values):
        for seed, value in enumerate(objectives):
            jobs.append(result(value, f"lr={number}", f"seed={seed}"))
            jobs[-1].evaluation = {"eval:data": data if number == len(values) - 1 else ""}
    return {setting.name: setting.verdict for setting in group_jobs(rank_jobs(jobs, sweep()))}


def test_a_setting_is_best_only_if_all_others_are_worse():
    good, close, bad = [0.1 * seed + 5 for seed in range(8)], [0.1 * seed + 5 for seed in range(8)], [0.1] * 8
    close[0] -= 0.01
    assert verdicts(good, bad) == {"lr=0": "best", "lr=1": "worse"}
    assert verdicts(good, close, bad) == {"lr=0": "leads", "lr=1": "tied", "lr=2": "worse"}
    assert verdicts(good[:3], bad[:3]) == {"lr=0": "leads", "lr=1": "tied"}  # three seeds are too few
    assert verdicts(good[:1], bad[:1]) == {"lr=0": "", "lr=1": ""}


def test_settings_with_other_data_or_failures_have_no_verdict():
    assert verdicts([1.0] * 8, [0.0] * 8, data="other") == {"lr=0": "", "lr=1": ""}
    assert verdicts([1.0] * 8, [0.5] * 7 + [math.nan], [0.0] * 8) == {"lr=0": "best", "lr=1": "", "lr=2": "worse"}
