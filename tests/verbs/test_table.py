"""`runner table`: means and intervals in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from many_runs import write_seeds


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Eight seeds of two models at two learning rates; there is no verdict at the higher rate."""
    good = [0.95, 0.94, 0.96, 0.95, 0.94, 0.95, 0.96, 0.95]
    mixed = [0.94, 0.95, 0.95, 0.96, 0.94, 0.94, 0.96, 0.96]
    for model, lr, values in (
        ("mlp", 0.1, [value - 0.05 for value in good]),
        ("res|net_8", 0.1, good),
        ("mlp", 0.3, mixed),
        ("res|net_8", 0.3, good),
    ):
        write_seeds(tmp_path / f"outputs/{model[:3]}{lr}", values, model=model, lr=lr)
    return tmp_path / "outputs"


def test_markdown_marks_the_better_row_in_bold(outputs: Path, run_here: Any):
    lines = run_here("table", "--columns", "optimizer.lr", code=0).out.splitlines()
    assert lines[:4] == [
        "| model | 0.1 | 0.3 |",
        "| --- | ---: | ---: |",
        "| mlp | 0.9000 [0.8937, 0.9062] (8) | 0.9500 [0.9425, 0.9575] (8) |",
        "| res\\|net_8 | **0.9500 [0.9437, 0.9563]** (8) | 0.9500 [0.9437, 0.9563] (8) |",
    ]
    assert "<!-- model=mlp, optimizer.lr=0.1: outputs/mlp0.1/seed0 outputs/mlp0.1/seed1 " in "\n".join(lines)


def test_malicious_names_are_escaped_in_cells_and_comments(tmp_path: Path, run_here: Any):
    for name, model in (("a--->\x1b[2J", "[x](http://x)\\|"), ("b", "mlp")):
        write_seeds(tmp_path / "outputs" / name, [0.5, 0.5], model=model)
    text = run_here("table", code=0).out
    assert text.splitlines()[2] == "| [x\\](http://x)\\\\\\| | 0.5 [0.5, 0.5] (2) |"
    assert text.count("-->") == text.count("<!--") and "\x1b" not in text


def test_latex_is_escaped(outputs: Path, run_here: Any):
    text = run_here("table", "optimizer.lr=0.1", "--rows=model", "--format=latex", code=0).out
    assert "res|net\\_8 & \\textbf{0.9500 [0.9437, 0.9563]} (8) \\\\\n" in text
    assert "\\begin{tabular}{lr}\n\\toprule\nmodel & eval/MulticlassAccuracy \\\\\n\\midrule\n" in text
    assert text.startswith("% eval/MulticlassAccuracy: mean [95 % interval] (runs)")


def test_csv_has_a_line_for_each_cell(outputs: Path, run_here: Any):
    text = run_here("table", "--rows=optimizer.lr,model", "--metric=loss", "--format=csv", code=0).out
    rows = [*csv.DictReader(io.StringIO(text))]
    assert [(row["optimizer.lr"], row["model"], row["n"]) for row in rows] == [
        ("0.1", "mlp", "8"),
        ("0.1", "res|net_8", "8"),
        ("0.3", "mlp", "8"),
        ("0.3", "res|net_8", "8"),
    ]
    assert rows[0]["metric"] == "eval/loss" and float(rows[0]["mean"]) == pytest.approx(0.1)
    assert {row["is_best"] for row in rows} == {"false"}  # three cells have the same mean


def test_a_cell_whose_runs_differ_in_a_key_is_refused(outputs: Path, run_here: Any):
    assert "each mean is also taken over optimizer.lr" in run_here("table", "--rows", "model", code=0).out
    write_seeds(outputs / "more", [0.5] * 8, model="mlp", lr=0.5)
    error = run_here("table", "--rows", "model", code=2).err
    assert "the runs of model=mlp differ in optimizer.lr; add it to --rows or --columns" in error


def test_rows_with_different_budgets_have_no_verdict(outputs: Path, run_here: Any):
    write_seeds(outputs / "other", [0.5] * 8, model="gpt", config={"trainer": {"max_duration": "9ep"}})
    text = run_here("table", "optimizer.lr=0.1", "--rows", "model", code=0).out
    assert "**" not in text and "no verdict on the rows: " in text and "different budgets" in text


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--rows=modle"], "--rows='modle': no run has a value of this name"),
        (["--metric", "los"], "--metric='los': "),
        (["--format=pdf"], "--format='pdf': allowed: csv, latex, markdown"),
        (["model=gpt"], "RUNS='model=gpt': no trained run"),
        (["model=gpt", "--row", "model"], "--row: table has no such option; did you mean --rows? Allowed: --rows, "),
    ],
    ids=str,
)
def test_a_wrong_table_command_is_refused_in_one_line(outputs: Path, run_here: Any, typed: list[str], message: str):
    error = run_here("table", *typed, code=2).err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
