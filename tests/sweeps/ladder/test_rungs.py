"""The rungs of a ladder and their law, from made-up results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sweep_results import sweep

from runner.pictures.figure import render
from runner.records.result import Result
from runner.sweeps.ladder.plot import draw_ladder
from runner.sweeps.ladder.rungs import Ladder, make_ladder
from runner.sweeps.settings import group_jobs, rank_jobs

FLOPS = ("1e9", "2e9", "4e9", "8e9")


def job(flop: str, width: int, seed: int, loss: float, lower: bool = True) -> Result:
    """Return the result of a job, which has diverged if the loss is not finite."""
    overrides = [f"budget={flop}flop", f"model.module.width={width}", f"seed={seed}"]
    status = "FINISHED" if math.isfinite(loss) else "DIVERGED"
    return Result(status, "-".join(overrides), "id", overrides, loss, "eval/loss", lower, {"eval/loss": loss})


def ladder(changed: dict[tuple[str, int, int], float] | None = None, seeds: int = 2, lower: bool = True) -> Ladder:
    """Return a ladder whose best loss is 2 (C / 1e9)^-0.5, of width 4 at two small budgets C and of 16 at two large.

    Args:
        changed: losses that differ, by the texts of budgets, widths and seeds.
        seeds: the number of seeds.
        lower: whether lower values of the objective are better.
    """
    results = []
    for index, flop in enumerate(FLOPS):
        for width, is_best in ((4, index < 2), (16, index >= 2)):
            for seed in range(seeds):
                loss: float = 2.0 * float(flop[0]) ** -0.5 * (1.0 if is_best else 1.2) * (1.01 if seed else 0.99)
                results.append(job(flop, width, seed, (changed or {}).get((flop, width, seed), loss), lower))
    return make_ladder(group_jobs(rank_jobs(results, sweep())), lower)


def test_the_law_is_fitted_to_the_best_size_of_all_rungs_but_the_last():
    surprising = ladder({("8e9", 16, 0): 0.99, ("8e9", 16, 1): 1.01, ("8e9", 4, 0): 5.0})
    assert [rung.flop for rung in surprising.rungs] == [1e9, 2e9, 4e9, 8e9]
    assert [rung.best.values["model.module.width"] for rung in surprising.rungs] == [4, 4, 16, 16]
    assert surprising.extrapolation is not None
    assert surprising.extrapolation.law.exponent == pytest.approx(0.5, abs=1e-3)
    assert surprising.extrapolation.predicted == pytest.approx(2 * 8**-0.5, 1e-3)
    assert surprising.is_inside is False
    assert "measured 1 +- 0.014: not as predicted" in dict(surprising.lines())["predicted"]
    assert surprising.metrics()["ladder/measured"] == 1.0
    assert ladder().is_inside is True and ladder().sizes == ["width=4", "width=16"]


def test_the_table_shows_losses_and_the_law():
    columns, rows = ladder().tabulate()
    assert columns == ["flop", "best size", "eval/loss", "spread", "n", "law", "used"]
    assert [row[-1] for row in rows] == ["to fit"] * 3 + ["held out"]
    assert [row[2] for row in rows] == [pytest.approx(row[5], 1e-3) for row in rows]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({("2e9", width, 0): math.nan for width in (4, 16)}, "at 2e+09 flop no size has a finite loss for every seed"),
        ({("8e9", width, 0): math.inf for width in (4, 16)}, "at 8e+09 flop, which is held out, no size has a loss"),
        ({("1e9", 4, 0): -1.0}, "eval/loss is not above 0 everywhere"),
    ],
)
def test_a_missing_law_is_explained(changed: dict[tuple[str, int, int], float], problem: str):
    without_law = ladder(changed)
    assert without_law.extrapolation is None and without_law.problem.startswith(f"no law was fitted: {problem}")
    assert without_law.as_json()["law"] is None and without_law.as_json()["problem"] == without_law.problem
    assert without_law.lines() == [("note", without_law.problem)] and without_law.metrics() == {}
    assert render(draw_ladder(without_law), "svg")


def test_an_objective_that_is_maximized_has_no_law():
    assert "choose a loss, such as objective=eval/loss" in ladder(lower=False).problem


def test_notes_name_reasons_to_doubt_a_law():
    assert ladder().problem == "width=16, the largest, is best at 8e+09 flop; a larger one may be better"
    small = ladder({("8e9", 4, seed): 0.1 for seed in (0, 1, 2)})
    assert "width=4, the smallest, is best at 8e+09 flop; a smaller one may be better" in small.problem
    assert "one seed cannot show the noise" in ladder(seeds=1).problem and ladder(seeds=1).is_inside is None
    left_out = ladder({("2e9", 16, 0): math.nan})
    assert "1 settings without a loss" in left_out.problem and left_out.extrapolation is not None
    flat = ladder({(flop, width, seed): 2.0 + seed for flop in FLOPS for width in (4, 16) for seed in (0, 1)})
    assert "the loss may not fall with compute at all" in flat.problem


def test_the_picture_names_each_size(tmp_path: Path):
    text = render(draw_ladder(ladder()), "svg").decode()
    assert all(part in text for part in ("width=4", "width=16", "law", "predicted, 95 %", "8e+09"))
