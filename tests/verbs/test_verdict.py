"""`runner verdict` calls settings better, worse or not decided, and refuses runs that cannot be compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from many_runs import EVALUATION, TRAINER, write_run, write_seeds


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep `a` with eight seeds."""
    monkeypatch.setenv("COLUMNS", "80")
    write_seeds(tmp_path / "outputs/a", [0.90, 0.91, 0.92, 0.90, 0.89, 0.91, 0.90, 0.89])
    return tmp_path / "outputs"


def compare_last(run_here: Any, *arguments: str) -> dict[str, Any]:
    """Run `verdict`, and return the JSON comparison of the last candidate."""
    return json.loads(run_here("verdict", *arguments, "--json").out)["result"]["comparisons"][-1]


def test_the_report_on_paired_seeds_shows_means_intervals_and_p(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95, 0.95, 0.96, 0.94, 0.95, 0.96, 0.95, 0.94], lr=0.3)
    assert (
        run_here("verdict", "outputs/a", "outputs/b", code=0).out
        == """\
B is better than A

A  outputs/a
B  outputs/b

   runs    mean  spread  minus A       95 % interval       p  verdict
A     8  0.9025    0.01
B     8    0.95  0.0076  +0.0475  +0.0425 to +0.0537  0.0078  better

metric   eval/MulticlassAccuracy, higher is better
test     paired: 8 pairs of runs with equal seeds (0, 1, 2, 3, 4, 5, 6, 7),
         signs flipped
anytime  p 0.012, interval +0.0397 to +0.058
         use it to check after each seed, p above if their number was fixed
differs  optimizer.lr 0.1 -> 0.3
"""
    )


def test_too_few_pairs_are_not_decided_and_the_missing_seeds_are_counted(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95, 0.95, 0.96])
    text = run_here("verdict", "outputs/a", "outputs/b", code=0).out
    assert text.startswith("Not decided: the difference may be chance\n")
    assert "the smallest p that they can have is 0.25" in text and "\nseeds    3 more of each would show" in text
    comparison = compare_last(run_here, "outputs/a", "outputs/b")
    assert (comparison["paired"], comparison["n"], comparison["p"], comparison["more_seeds"]) == (True, [3, 3], 0.25, 3)


def test_the_folds_of_a_seed_count_as_their_mean(outputs: Path, run_here: Any):
    for name, better in (("c", 0.0), ("d", 0.1)):
        for fold in range(4 if name == "c" else 3):
            config = {"trainer": TRAINER, "folds": {"held_out": fold}}
            write_seeds(outputs / f"{name}/{fold}", [0.8 + better + fold / 20] * 2, config=config)
    comparison = compare_last(run_here, "outputs/c", "outputs/d")
    assert (comparison["n"], comparison["pairs"], comparison["verdict"]) == ([2, 2], ["0", "1"], "not decided")
    assert comparison["means"] == pytest.approx([0.85, 0.95])  # the fold that only c has is not compared
    text = run_here("verdict", "outputs/c", "outputs/d", code=0).out
    assert "the folds of a seed count as their mean" in text.replace("\n         ", " ")
    table = run_here("table", "outputs/d", code=0).out
    assert "(2) |" in table and "each mean is also taken over folds.held_out" not in table


def test_copies_and_links_of_a_run_count_once(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95] * 8, lr=0.3)
    shutil.copytree(outputs / "a/seed2", outputs / "a/copy")
    (outputs / "a/link").symlink_to(outputs / "a/seed0")
    comparison = compare_last(run_here, "outputs/a", "outputs/b")
    assert comparison["n"] == [8, 8] and comparison["means"][0] == pytest.approx(0.9025)
    assert "(8)" in run_here("table", "outputs/a", code=0).out
    error = run_here("verdict", "outputs/a/seed2", "outputs/a/copy", code=125).err
    assert "contain the run outputs/a/seed2, of which outputs/a/copy is a copy by its result.json" in error


def test_candidates_are_chosen_by_conditions_and_a_lower_loss_is_better(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.8] * 8, lr=0.3)
    comparison = compare_last(run_here, "optimizer.lr=0.3", "outputs/* optimizer.lr<0.2", "--metric=loss")
    assert comparison["verdict"] == "better" and comparison["difference"] == pytest.approx(-0.1025)
    text = run_here("verdict", "--metric", "loss", "optimizer.lr=0.3", "optimizer.lr<0.2", code=0).out
    assert text.startswith("B is better than A\n")


def test_runs_with_different_seeds_are_not_paired(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95, 0.96, 0.94, 0.95], first=20)
    comparison = compare_last(run_here, "outputs/a", "outputs/b")
    assert (comparison["paired"], comparison["n"], comparison["verdict"]) == (False, [8, 4], "better")
    assert comparison["p"] == pytest.approx(1 / 495)
    assert "not paired, as seeds differ: 8 and 4 runs" in run_here("verdict", "outputs/a", "outputs/b", code=0).out


def test_p_is_corrected_for_the_number_of_candidates(outputs: Path, run_here: Any):
    for name in "bcdefgh":
        write_seeds(outputs / name, [0.95] * 8)
    comparison = compare_last(run_here, *(f"outputs/{name}" for name in "abcdefgh"))
    assert comparison["p"] == pytest.approx(7 * 2 / 256) and comparison["verdict"] == "not decided"
    text = run_here("verdict", *(f"outputs/{name}" for name in "abc"), code=0).out
    assert text.startswith("B, C are better than A\n")


def test_twenty_equal_settings_are_not_decided(tmp_path: Path, run_here: Any):
    generator = np.random.default_rng(0)
    names = [f"outputs/s{number}" for number in range(20)]
    for name in names:
        write_seeds(tmp_path / name, generator.normal(0.9, 0.01, 8).tolist())
    text = run_here("verdict", *names, "--json", code=0).out
    assert {comparison["verdict"] for comparison in json.loads(text)["result"]["comparisons"]} == {"not decided"}


def test_a_setting_that_diverges_with_some_seeds_is_not_better(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95] * 7)
    write_run(outputs / "b/seed7", status="DIVERGED", seed=7)
    assert compare_last(run_here, "outputs/a", "outputs/b")["verdict"] == "not decided"
    text = run_here("verdict", "outputs/a", "outputs/b", code=1).out
    assert "left out  B: 1 diverged" in text and "has runs that diverged" in text
    answer = json.loads(run_here("verdict", "outputs/a", "outputs/b", "--json", code=1).out)
    assert answer["error"]["message"] == "worse: some runs of outputs/b diverged"
    assert run_here("verdict", "outputs/b", "outputs/a").code == 0


def test_the_exit_code_says_whether_a_candidate_is_worse(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.80] * 8)
    assert run_here("verdict", "outputs/a", "outputs/b", code=1).out.startswith("B is worse than A\n")
    assert run_here("verdict", "outputs/b", "outputs/a", code=0).out.startswith("B is better than A\n")
    write_seeds(outputs / "c", [0.95] * 8, status="DIVERGED")
    assert run_here("verdict", "outputs/a", "outputs/c", code=1).out == "worse: all runs of outputs/c diverged\n"
    assert "none of its runs has finished (8 diverged)" in run_here("verdict", "outputs/c", "outputs/a", code=125).err


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"evaluation": EVALUATION | {"eval:data": "d2"}}, "their evaluation differs in its data: d1 and d2"),
        ({"evaluation": EVALUATION | {"eval:size": "100"}}, "differs in its size: 597 and 100"),
        ({"evaluation": EVALUATION | {"eval/MulticlassAccuracy": "c9"}}, "differs in its metric's code: c2 and c9"),
        ({"config": {"trainer": {"max_duration": "9ep"}}}, "have different budgets: 2ep and 9ep; runner verdict"),
        ({"objective_name": "eval/loss"}, "--metric: the runs have no objective in common"),
        ({"metrics": {"eval/loss": 0.1}}, "has no finite value for it; its metrics: eval/loss"),
        (
            {"metrics": {"eval/MulticlassAccuracy": 1e200, "\x1b[2J": 0.1}},
            "has no finite value for it; its metrics: eval/MulticlassAccuracy, \\x1b[2J",
        ),
        ({"status": "FAILED"}, "RUNS='outputs/b': none of its runs has finished (8 failed)"),
    ],
    ids=str,
)
def test_runs_that_cannot_be_compared_are_refused_in_one_line(
    outputs: Path, run_here: Any, facts: dict[str, Any], message: str
):
    write_seeds(outputs / "b", [0.95] * 8, **facts)
    _, out, err = run_here("verdict", "outputs/a", "outputs/b", code=125)
    assert err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""


def test_budget_any_compares_different_budgets(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95] * 8, config={"trainer": {"max_duration": "9ep"}})
    assert compare_last(run_here, "outputs/a", "outputs/b", "--budget=any")["verdict"] == "better"


def test_a_candidate_may_vary_a_key_only_if_the_other_varies_it_too(outputs: Path, run_here: Any):
    for lr in (0.1, 0.3):
        write_seeds(outputs / f"mlp/{lr}", [0.95] * 3, lr=lr, config={"trainer": TRAINER, "model": {"width": 1}})
    error = run_here("verdict", "outputs/a", "outputs/mlp", code=125).err
    assert "its runs differ in more than the seed: optimizer.lr is 0.1 and 0.3; choose one setting" in error
    for lr in (0.1, 0.3):
        write_seeds(outputs / f"wide/{lr}", [0.99] * 3, lr=lr, config={"trainer": TRAINER, "model": {"width": 2}})
    comparison = compare_last(run_here, "outputs/mlp", "outputs/wide")
    assert comparison["n"] == [6, 6] and comparison["pairs"][0] == "0 0.1" and comparison["verdict"] == "better"


def test_an_evaluation_of_saved_weights_is_left_out(outputs: Path, run_here: Any):
    write_seeds(outputs / "b", [0.95] * 8, lr=0.3)
    weights = {"load_path": "outputs/b/0/checkpoints/latest"}  # an evaluation of saved weights, not of a new model
    write_seeds(outputs / "evaluated", [0.1], lr=0.3, config={"trainer": {**TRAINER, **weights}})
    (run,) = (outputs / "evaluated").iterdir()
    (run / "environment.json").write_text('{"verb": "eval"}')
    comparison = compare_last(run_here, "optimizer.lr=0.1", "optimizer.lr=0.3")
    assert (comparison["n"], comparison["verdict"]) == ([8, 8], "better")
    assert "RUNS='verb=eval': no trained run" in run_here("verdict", "outputs/a", "verb=eval", code=125).err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["outputs/a"], "RUNS='outputs/a': is a single setting; name another to compare it with"),
        (["outputs/a", "outputs/c"], "RUNS='outputs/c': no such folder"),
        (["outputs/a", "model=mlp"], "RUNS='model=mlp': no trained run"),
        (["outputs/a", "modle=mlp"], "RUNS='modle=mlp': no run has a value of this name"),
        (["outputs/a", "outputs/a"], "both 'outputs/a' and 'outputs/a' contain the run"),
        (["outputs/a", "outputs/a", "--budget=all"], "--budget='all': allowed: any, same"),
        (
            ["outputs/a", "outputs/a", "--metrics=loss"],
            "--metrics: verdict has no such option; did you mean --metric? ",
        ),
        (["outputs/a", "x='"], 'RUNS="x=\'": No closing quotation'),
    ],
    ids=str,
)
def test_a_wrong_verdict_command_is_refused_in_one_line(outputs: Path, run_here: Any, typed: list[str], message: str):
    _, out, err = run_here("verdict", *typed, code=125)
    assert err.startswith(f"error: {message}") and err.count("\n") == 1 and out == ""
