"""Each run leaves a folder from which you can compare it with others, resume it bit for bit, or run it again.

A headless browser compares runs in the MLflow UI as a user does: it selects the runs, and clicks Compare.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import Page, window
from main_runs import SHORT, query, run_folders
from stores import change

STEPS = list(range(1, 7))


def artifacts(folder: Path) -> set[str]:
    """Return the paths of all artifacts, relative to those of their run."""
    (root,) = (folder / "outputs" / "mlartifacts").glob("*/artifacts")
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The working directory and the process of a run that began in an empty folder, without an MLflow store."""
    folder = tmp_path_factory.mktemp("finished")
    command = [sys.executable, "-m", "runner", *SHORT, "+callbacks=lr_monitor"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return folder, process


def test_a_run_is_in_mlflow(finished: Any):
    folder, _ = finished
    (run_dir,) = run_folders(folder)
    name = f"{run_dir.name}-mlp-digits-{run_dir.parent.name}"
    assert query(folder, "select status, name from runs") == [("FINISHED", name)]
    assert query(folder, "select name from experiments where experiment_id > 0") == [("runner",)]
    parameters = dict(query(folder, "select key, value from params"))
    assert parameters["optimizer.lr"] == "0.1"
    assert parameters["model.module.hidden"] == "[128, 128]"
    assert parameters["trainer.max_duration"] == "2ep"

    def points(key: str) -> list[tuple[int, float]]:
        return query(folder, "select step, value from metrics where key = ? order by step", key)

    losses = points("loss/train/total")
    assert [step for step, _ in losses] == STEPS
    assert losses[0][1] > losses[-1][1] > 0
    assert [step for step, _ in points("lr-SGD/group0")] == STEPS
    for key in ("metrics/train/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy", "loss/eval/total"):
        assert [step for step, _ in points(key)] == [3, 6], key
    assert {"record/config.yaml", "record/overrides.yaml", "record/environment.json"} <= artifacts(folder)


def test_a_run_is_in_its_folder(finished: Any):
    folder, _ = finished
    (run_dir,) = run_folders(folder)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 400
    assert "experiment" not in config and "hydra" not in config
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text()) == [*SHORT, "+callbacks=lr_monitor"]
    assert (run_dir / "learning_curves.csv").stat().st_size > 100
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"ep1-ba3", "ep2-ba6", "latest"}
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep2-ba6"
    assert {path.name for path in folder.iterdir()} == {"outputs"}


def test_the_last_lines_show_the_folder_and_the_next_commands(finished: Any):
    folder, process = finished
    (run_dir,) = run_folders(folder)
    assert all(line.startswith("saving to MLflow: ") for line in process.stderr.splitlines())
    path = str(run_dir.relative_to(folder))
    location, heading, *commands = process.stdout.splitlines()[-5:]
    assert location.split() == ["run", path]
    assert heading == "to evaluate it, train it for longer, compare it:"
    assert commands == [
        f"python -m runner eval {path}",
        f"python -m runner resume {path} trainer.max_duration=4ep",
        "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db",
    ]


@pytest.fixture
def copied(finished: Any, tmp_path: Path) -> Path:
    """The run's folder in a copy of the working directory, with the new paths in its store and its MLflow files."""
    original, _ = finished
    shutil.copytree(original, tmp_path, dirs_exist_ok=True, symlinks=True)
    (run_dir,) = run_folders(tmp_path)
    database = tmp_path / "outputs" / "mlflow.db"
    for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
        change(database, f"update {table} set {column} = replace({column}, ?, ?)", str(original), str(tmp_path))
    for file in (run_dir / "mlflow").glob("*.json*"):
        file.write_text(file.read_text().replace(str(original), str(tmp_path)))
    return run_dir


def test_resume_continues_in_the_same_folder_and_the_same_mlflow_run(copied: Path, tmp_path: Path, run_app: Any):
    before = query(tmp_path, "select run_uuid, name from runs")

    # A refused command does not change the finished run.
    refused = run_app("resume", str(copied.relative_to(tmp_path)), exit_code=2)
    assert "max_duration='2ep' is reached" in refused.stderr
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]

    # Model, data and callbacks are those of the recorded run; only the length is typed again.
    run_app("resume", str(copied.relative_to(tmp_path)), "trainer.max_duration=3ep")
    assert run_folders(tmp_path) == [copied]
    assert query(tmp_path, "select run_uuid, name from runs") == before
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    for key in ("loss/train/total", "lr-SGD/group0"):
        rows = query(tmp_path, "select step from metrics where key = ? order by step", key)
        assert [step for (step,) in rows] == list(range(1, 10))
    assert (copied / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    config = yaml.safe_load((copied / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 400 and config["trainer"]["max_duration"] == "3ep"


def test_a_sweep_has_one_folder_and_an_mlflow_run_for_each_job(folder: Path, run_app: Any):
    run_app("-m", "seed=0,1", *SHORT, "~callbacks.learning_curves")
    (sweep,) = run_folders(folder, "outputs/sweeps/*/*")
    jobs = {"seed0-mlp-digits", "seed1-mlp-digits"}
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {*jobs, "mlflow", ".jobs"}
    names = query(folder, "select name, status from runs order by name")
    assert names == [(name, "FINISHED") for name in (*sorted(jobs), "sweep-seed-mlp-digits")]
    assert {value for (value,) in query(folder, "select value from params where key = 'seed'")} == {"0", "1", "0,1"}
    seeds = [yaml.safe_load((sweep / f"seed{seed}-mlp-digits" / "config.yaml").read_text())["seed"] for seed in (0, 1)]
    assert seeds == [0, 1]
    final = query(folder, "select value from metrics where key = 'loss/train/total' and step = 6")
    assert len({value for (value,) in final}) == 2
    assert run_folders(folder) == []


EPOCHS, BATCHES, SAMPLES = 40, 480, 48_000  # more batches than the 320 points that a chart requests


RATES = ["0.01", "0.03", "0.1"]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A window of a headless browser; `RUNNER_SCREENSHOTS` sets the folder for screenshots."""
    screenshots = Path(os.environ.get("RUNNER_SCREENSHOTS", tmp_path / "screenshots"))
    screenshots.mkdir(parents=True, exist_ok=True)
    with window(screenshots) as page:
        yield page


@pytest.mark.slow
def test_a_sweep_is_compared_in_the_browser(page: Page, mlflow_server: Any, run_app: Any) -> None:
    experiment = f"learning-rates-{uuid.uuid4().hex[:4]}"
    tiny = ["model=mlp", "data.batch_size=100", "data.eval_batch_size=300", f"trainer.max_duration={EPOCHS}ep"]
    env = {"MLFLOW_TRACKING_URI": mlflow_server.uri, "MLFLOW_EXPERIMENT_NAME": experiment}
    run_app("-m", f"optimizer.lr={','.join(RATES)}", *tiny, env=env)
    [(number,)] = mlflow_server.query("select experiment_id from experiments where name = ?", experiment)
    runs = f"{mlflow_server.uri}/#/experiments/{number}/runs"
    names = {f"lr{rate}-mlp-digits" for rate in RATES}

    page.driver.get(f"{runs}?compareRunsMode=CHART")
    for panel in ("mlflow.assistant.chat_panel.close", "mlflow_header.toggle_sidebar_button"):
        page.click(f"[data-component-id='{panel}']")
    check_charts(page, names)

    page.driver.get(runs)
    check_comparison(page, names)


def check_charts(page: Page, names: set[str]) -> None:
    """Assert that each chart shows the curves of all runs, by batch, by sample and by time."""
    page.find("input[placeholder='Search metric charts']")[0].send_keys("^loss/")

    def is_drawn(chart: int, end: float, points: int) -> bool:
        charts = page.charts()
        lines = list(charts[chart].values()) if len(charts) == 2 and charts[chart].keys() == names else []
        return len(lines) == 3 and all(len(line) == points and line[-1] == end for line in lines)

    page.wait(lambda: is_drawn(0, BATCHES, EPOCHS) and is_drawn(1, BATCHES, 320), "curves by batch")
    page.keep("charts")
    page.choose_axis("time/sample")
    page.wait(lambda: is_drawn(1, SAMPLES, 320), "curves of training by sample")
    page.choose_axis("time/eval/sample")
    page.wait(lambda: is_drawn(0, SAMPLES, EPOCHS), "curves of evaluations by sample")
    page.keep("charts-by-sample")
    page.choose_axis("Time (relative)")
    page.wait(
        lambda: len(ends := page.ends(1)) == 3 and all(0 < end < 60 for end in ends.values()), "curves by seconds"
    )
    page.choose_axis("Step")
    page.wait(lambda: is_drawn(0, BATCHES, EPOCHS), "curves by batch again")


def check_comparison(page: Page, names: set[str]) -> None:
    """Select the runs in the list, and assert that the comparison shows the parameters that differ, and the metrics."""
    for name in names:
        page.find(".ag-row a", name)
    page.keep("runs")
    for name in sorted(names):
        row = page.wait(lambda name=name: row_of(page, name), f"the row of {name}")
        page.click(f".ag-row[row-id='{row}'] input[aria-label^='Press Space to toggle row']")
    page.click("button", "Compare")

    page.find("h1,h2", "Comparing 3 Runs from 1 Experiment")
    page.click("[aria-label='Parameters - Show diff only']")
    page.wait(lambda: parameters(page) == [["optimizer.lr", *RATES]], "only the parameters that differ")
    page.keep("parameters")
    page.click("a", "loss/train/total")
    page.wait(lambda: page.ends(0) == dict.fromkeys(names, BATCHES), "curves of the metric")
    page.keep("metric")


def row_of(page: Page, name: str) -> str | None:
    """Return the id of a run's row in the list of runs."""
    link = page.find(".ag-row a", name)[0]
    return link.find_element("xpath", "ancestor::*[@row-id][1]").get_attribute("row-id")


def parameters(page: Page) -> list[list[str]]:
    """Return the rows of the table of parameters in a comparison."""
    switch = page.find("[aria-label='Parameters - Show diff only']")[0]
    table = switch.find_element("xpath", "ancestor::*[.//table][1]//table")
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", table)
    return [row.text.split() for row in table.find_elements("css selector", "tr")]
