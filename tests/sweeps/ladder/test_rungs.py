"""The rungs of a ladder and their law, from results that nobody trained."""

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
    overrides = [f"budget={flop}flop", f"model.module.width={width}", f"seed={seed}"]
    status = "FINISHED" if math.isfinite(loss) else "DIVERGED"
    return Result(status, "-".join(overrides), "id", overrides, loss, "eval/loss", lower, {"eval/loss": loss})


def ladder(changed: dict[tuple[str, int, int], float] | None = None, seeds: int = 2, lower: bool = True) -> Ladder:
    """Width 4 is best at little compute and width 16 at much; the best loss is 2 (C / 1e9)^-0.5."""
    results = []
    for place, flop in enumerate(FLOPS):
        for width, best in ((4, place < 2), (16, place >= 2)):
            for seed in range(seeds):
                loss: float = 2.0 * float(flop[0]) ** -0.5 * (1.0 if best else 1.2) * (1.01 if seed else 0.99)
                results.append(job(flop, width, seed, (changed or {}).get((flop, width, seed), loss), lower))
    return make_ladder(group_jobs(rank_jobs(results, sweep())), lower)


def test_the_law_is_that_of_the_best_size_of_each_rung_but_the_last():
    found = ladder({("8e9", 16, 0): 0.99, ("8e9", 16, 1): 1.01, ("8e9", 4, 0): 5.0})
    assert [rung.flop for rung in found.rungs] == [1e9, 2e9, 4e9, 8e9]
    assert [rung.best.values["model.module.width"] for rung in found.rungs] == [4, 4, 16, 16]
    assert found.extrapolation is not None and found.extrapolation.law.exponent == pytest.approx(0.5, abs=1e-3)
    assert found.extrapolation.predicted == pytest.approx(2 * 8**-0.5, 1e-3)
    assert found.is_inside is False and "measured 1 +- 0.014: not as predicted" in dict(found.lines())["predicted"]
    assert found.metrics()["ladder/measured"] == 1.0
    assert ladder().is_inside is True and ladder().sizes == ["width=4", "width=16"]


def test_the_table_has_the_law_beside_the_losses():
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
def test_why_there_is_no_law_is_said(changed: dict[tuple[str, int, int], float], problem: str):
    found = ladder(changed)
    assert found.extrapolation is None and found.problem.startswith(f"no law was fitted: {problem}")
    assert found.as_json()["law"] is None and found.as_json()["problem"] == found.problem
    assert found.lines() == [("note", found.problem)] and found.metrics() == {}
    assert render(draw_ladder(found), "svg")


def test_what_grows_with_compute_is_no_loss():
    assert "choose a loss, such as objective=eval/loss" in ladder(lower=False).problem


def test_what_makes_a_law_doubtful_is_said():
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
