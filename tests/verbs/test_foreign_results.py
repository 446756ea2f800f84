"""`runner verdict`, `runner table` and `runner.verdict` with results of other programs: CSV, JSON, pandas, MLflow."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from many_runs import write_seeds
from mlflow import MlflowClient

import runner

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow and its imports warn

A = [0.90, 0.91, 0.92, 0.90, 0.89, 0.91, 0.90, 0.89]
B = [0.95, 0.95, 0.96, 0.94, 0.95, 0.96, 0.95, 0.94]
FIGURES = ("verdict", "paired", "pairs", "n", "means", "difference", "interval", "p", "anytime", "effect", "more_seeds")
UNKNOWN = "evaluation data and training length are unknown"


def make_rows(**columns: Any) -> list[dict[str, Any]]:
    """Return a row for each run of the settings `plain` and `fast`, with `columns` added to each."""
    return [
        {"setting": setting, "seed": seed, "accuracy": value, **columns}
        for setting, values in (("plain", A), ("fast", B))
        for seed, value in enumerate(values)
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def log_to_mlflow(rows: list[dict[str, Any]], name: str = "theirs") -> MlflowClient:
    """Log rows to the default store as runs, each with a worse accuracy at step 0."""
    client = MlflowClient(f"sqlite:///{Path.cwd()}/outputs/mlflow.db")
    experiment = client.create_experiment(name, artifact_location="outputs/theirs")
    for row in rows:
        run = client.create_run(experiment).info.run_id
        for key, value in row.items():
            if key == "accuracy":
                client.log_metric(run, key, 0.1, step=0)
                client.log_metric(run, key, value, step=1)
            else:
                client.log_param(run, key, value)
        client.set_terminated(run)
    return client


def figures(run_here: Any, *words: str) -> dict[str, Any]:
    """Run `verdict`, and return the figures of its only comparison."""
    (comparison,) = json.loads(run_here("verdict", *words, "--json").out)["result"]["comparisons"]
    return {name: comparison[name] for name in FIGURES}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_files_and_mlflow_give_the_same_figures(here: Path, run_here: Any, folder: Path):
    write_seeds(here / "outputs/a", A)
    write_seeds(here / "outputs/b", B, lr=0.3)
    metric = "eval/MulticlassAccuracy"
    listed = run_here("runs", "--format=csv", code=0).out
    values = {row["folder"]: float(row[metric]) for row in csv.DictReader(listed.splitlines())}
    rows = make_rows()
    names = [f"outputs/{name}/seed{seed}" for name in "ab" for seed in range(8)]
    for row, name in zip(rows, names, strict=True):
        row["accuracy"] = values[name]
    write_csv(here / "results.csv", rows)
    (here / "results.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log_to_mlflow([{**row, "random_seed": row["seed"]} for row in rows])
    expected = figures(run_here, "outputs/a", "outputs/b")
    assert expected["verdict"] == "better" and expected["p"] == 2 / 256
    for words in (
        ["results.csv"],
        ["results.jsonl"],
        ["results.csv setting=plain", "results.csv setting=fast"],
        ["mlflow:theirs"],
        [
            "mlflow:theirs params.setting = 'plain'",
            "mlflow:theirs params.setting = 'fast'",
            "--seed-column=random_seed",
        ],
    ):
        assert figures(run_here, *words) == expected, words
    frame = pd.DataFrame(rows)
    for tables in ([rows], [frame], [frame[frame.setting == "plain"], frame[frame.setting == "fast"]]):
        answer = runner.verdict(*tables).to_dict()
        assert json.loads(json.dumps(answer["comparisons"][0])).items() >= expected.items()
    assert str(runner.verdict("results.csv")) == run_here("verdict", "results.csv").out.removesuffix("\n")


def test_guessed_columns_and_unknown_facts_are_printed(here: Path, run_here: Any):
    write_csv(here / "results.csv", make_rows())
    screen = run_here("verdict", "results.csv", code=0).out
    assert "A  results.csv setting=plain\nB  results.csv setting=fast\n" in screen
    assert "\nmetric   accuracy, higher is better\n" in screen
    assert "\nguessed  the seed is seed, the setting is setting, the metric is accuracy\n" in screen
    assert screen.count("unknown") == 1 and f"\nwarning  {UNKNOWN}" in screen
    options = ("--metric=accuracy", "--seed-column=seed", "--setting-column=setting")
    assert "guessed" not in run_here("verdict", "results.csv", *options).out
    table = run_here("table", "results.csv", code=0).out
    assert "| fast | **0.9500 [0.9437, 0.9563]** (8) |" in table and f"<!-- warning: {UNKNOWN}" in table


@pytest.mark.parametrize(("metric", "lower"), [("val_loss", True), ("RMSE", True), ("certainty", False)])
def test_the_direction_follows_the_name_of_the_metric_unless_given(here: Path, metric: str, lower: bool):
    rows = [{"method": row["setting"], "seed": row["seed"], metric: row["accuracy"]} for row in make_rows()]
    assert runner.verdict(rows).lower_is_better is lower
    assert runner.verdict(rows, better="higher" if lower else "lower").lower_is_better is not lower


def test_columns_with_repeated_values_are_settings(here: Path, run_here: Any):
    rows = [
        {"lr": lr, "seed": seed, "accuracy": value, "minutes": value * 7, "path": f"{lr}/{seed}"}
        for lr, values in ((0.1, A), (0.3, B))
        for seed, value in enumerate(values)
    ]
    write_csv(here / "results.csv", rows)
    comparison = figures(run_here, "results.csv lr=0.1", "results.csv lr=0.3", "--metric=accuracy")
    assert comparison == figures(run_here, "results.csv", "--metric=accuracy")
    assert "(accuracy, minutes); name a metric" in run_here("verdict", "results.csv", code=125).err
    mixed = [{**row, "lr": 0.1 + row["seed"] % 2, "setting": "a"} for row in rows[:8]]
    write_csv(here / "mixed.csv", mixed)
    error = run_here("verdict", "mixed.csv", "results.csv lr=0.3", "--metric=accuracy", code=125).err
    assert "its runs differ in more than the seed: lr is 0.1 and 1.1; choose one setting" in error


@pytest.mark.parametrize("is_logged", [False, True])
def test_different_data_and_budgets_are_refused(here: Path, run_here: Any, folder: Path, is_logged: bool):
    rows = make_rows(dataset="digits", epochs=5)
    for row in rows[8:]:
        row["dataset"] = "letters"
    source = "mlflow:theirs" if is_logged else "results.csv"
    log_to_mlflow(rows) if is_logged else write_csv(here / "results.csv", rows)
    error = run_here("verdict", source, "--setting-column=setting", code=125).err
    assert "their evaluation differs in its data: dataset=digits and dataset=letters" in error
    longer = make_rows(epochs=5)
    for row in longer[8:]:
        row["epochs"] = 9
    write_csv(here / "results.csv", longer)
    assert "have different budgets: epochs=5 and epochs=9" in run_here("verdict", "results.csv", code=125).err
    assert run_here("verdict", "results.csv", "--budget=any", code=0).out.startswith("B is better than A\n")
    assert "evaluation data is unknown" in run_here("verdict", "results.csv", "--budget=any").out


def test_runs_are_compared_with_results_in_a_file(here: Path, run_here: Any):
    write_seeds(here / "outputs/a", A)
    write_csv(here / "b.csv", [{"seed": seed, "eval/MulticlassAccuracy": value} for seed, value in enumerate(B)])
    screen = run_here("verdict", "outputs/a", "b.csv", code=0).out
    assert screen.startswith("B is better than A\n") and f"warning  {UNKNOWN}" in screen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "RUNS='results.csv': has no rows"),
        ("setting,seed,accuracy\n", "RUNS='results.csv': has no rows"),
        ("setting,accuracy\na,0.1\nb,0.2\n", "--seed-column='seed': no such column; the columns are setting, accuracy"),
        ("setting,seed,accuracy\na,0,0.1\na,0,0.2\nb,0,0.3\n", "results.csv:2 and results.csv:3 have the same setting"),
        ("setting,seed,accuracy\na,0,0.1\na,1,nan\nb,0,0.3\n", "results.csv:3 has no finite value for it"),
        ("setting,seed,accuracy\na,0,0.1\na,1,good\nb,0,0.3\n", "results.csv:3 has no finite value for it"),
        ("setting,seed,accuracy\na,0,0.1\na,,0.2\nb,0,0.3\n", "--seed-column='seed': results.csv:3 has no seed"),
        ("setting,seed,accuracy\na,0\n", "RUNS='results.csv': line 2 has 2 cells instead of 3"),
        ("seed,seed,accuracy\n0,0,1\n", "RUNS='results.csv': two columns have the name 'seed'"),
        ('{"seed": 1}\n[1]\n', "RUNS='results.csv': line 2 is not a JSON object"),
        ("seed,accuracy\n0,0.1\n1,0.2\n", "RUNS='results.csv': is a single setting"),
        ("setting,seed,\xff", "RUNS='results.csv': must be text in UTF-8"),
    ],
    ids=range(12),
)
def test_a_wrong_file_is_refused_in_one_line(here: Path, run_here: Any, text: str, message: str):
    (here / "results.csv").write_bytes(text.encode("latin-1"))
    metric = "--metric=accuracy" if "\na,1" in text else "--metric="
    _, out, err = run_here("verdict", "results.csv", metric, code=125)
    assert err.startswith("error: ") and message in err and err.count("\n") == 1 and out == ""


def test_missing_mlflow_stores_are_refused_in_one_line(here: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch):
    def error(text: str) -> str:
        _, out, err = run_here("table", text, code=2)
        assert err.count("\n") == 1 and out == ""
        return err

    assert "there is no store" in error("mlflow:theirs") and not (here / "outputs").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in error("mlflow:theirs")
    assert "must be mlflow:NAME" in error("mlflow:")


def test_unknown_names_in_mlflow_are_refused(here: Path, run_here: Any, folder: Path):
    log_to_mlflow(make_rows()[:1])
    assert "no such experiment; there are: theirs" in run_here("table", "mlflow:ours", code=2).err
    assert "no run of this experiment meets" in run_here("table", "mlflow:theirs params.seed = '9'", code=2).err
    assert "MlflowException" in run_here("table", "mlflow:theirs params.seed ~ 9", code=2).err
    assert "RUNS='mlflow:theirs': is a single setting" in run_here("verdict", "mlflow:theirs", code=125).err


def test_torch_and_hydra_are_not_imported(here: Path):
    write_csv(here / "results.csv", make_rows())
    program = "import runner, sys; runner.verdict('results.csv'); assert not {'torch', 'hydra'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True)
