"""The application as a user meets it: what a command leaves behind, what it says, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from main_runs import SHORT, query, run_folders
from python_process import PATIENCE, start_python
from stores import change

STEPS = list(range(1, 7))


def artifacts(folder: Path) -> set[str]:
    """Paths of all artifacts, without experiment and run."""
    (root,) = (folder / "outputs" / "mlartifacts").glob("*/artifacts")
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_help_and_the_config_are_quick(tmp_path: Path):
    slow = {"torch", "mlflow", "torchmetrics", "matplotlib", "sklearn", "pandas", "rich", "numpy"}
    program = f"""
import sys
from runner.__main__ import main
for command in (["--help"], ["--cfg", "job"], ["optimizer.lrr=1"], ["model=mpl"], ["callbacks=null"]):
    sys.argv = ["runner", *command]
    print("exit", main())
print("imported", sorted({slow!r} & set(sys.modules)))
"""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    after = os.times()
    # CPU time, because other processes may take most of the machine: about 2 s, where importing torch alone takes 1.3.
    assert after.children_user - before.children_user < 10
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("exit ")] == ["exit 0", "exit 0", "exit 2", "exit 2", "exit 2"]
    assert lines[-1] == "imported []"
    assert "activation_monitor, checkpoint_saver," in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_who_reads_no_more_ends_it_quietly(tmp_path: Path):
    command = f"{sys.executable} -m runner --help | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_log_that_is_full_or_closed_ends_no_run(tmp_path: Path, ranks: int):
    command = ["-m", "runner", *SHORT, "~callbacks.mlflow_logger", f"launch.nproc_per_node={ranks}"]
    with open("/dev/full", "wb") as full:
        full_out = start_python([*command, "hydra.run.dir=out"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
        full_both = start_python([*command, "hydra.run.dir=both"], cwd=tmp_path, stdout=full, stderr=full)
    program = "import os, runpy, sys; os.closerange(0, 3); sys.stdout = sys.stderr = None; sys.argv[0] = 'runner'; "
    program += "runpy.run_module('runner', run_name='__main__')"
    closed = start_python(["-c", program, *command[2:], "hydra.run.dir=closed"], cwd=tmp_path)
    with full_out as process:
        assert process.stderr is not None
        told = process.stderr.read().decode()
    assert [one.wait(PATIENCE) for one in (full_out, full_both, closed)] == [0, 0, 0], told
    assert told.count("WARNING: stdout cannot be written") == 1
    for name in ("out", "both", "closed"):
        assert json.loads((tmp_path / name / "result.json").read_text())["status"] == "FINISHED"
        assert (tmp_path / name / "checkpoints" / "ep2-ba6").exists()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The main job from a new folder, with its output; nothing is there before, the store included."""
    folder = tmp_path_factory.mktemp("story")
    command = [sys.executable, "-m", "runner", *SHORT, "+callbacks=lr_monitor"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_is_in_mlflow(story: Any):
    folder, _ = story
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
    assert any(path.endswith("learning_curves.png") for path in artifacts(folder))


def test_a_run_is_in_its_folder(story: Any):
    folder, _ = story
    (run_dir,) = run_folders(folder)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 400
    assert "experiment" not in config and "hydra" not in config
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text()) == [*SHORT, "+callbacks=lr_monitor"]
    assert (run_dir / "learning_curves.png").stat().st_size > 1000
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"ep1-ba3", "ep2-ba6", "latest"}
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep2-ba6"
    assert {path.name for path in folder.iterdir()} == {"outputs"}


def test_the_last_lines_say_where_it_lies_and_what_to_do_with_it(story: Any):
    folder, done = story
    (run_dir,) = run_folders(folder)
    assert all(line.startswith("saving to MLflow: ") for line in done.stderr.splitlines())
    path = str(run_dir.relative_to(folder))
    where, what, *commands = done.stdout.splitlines()[-5:]
    assert where.split() == ["run", path]
    assert what == "to evaluate it, train it for longer, compare it:"
    assert commands == [
        f"python -m runner eval {path}",
        f"python -m runner resume {path} trainer.max_duration=4ep",
        "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db",
    ]


def test_resume_goes_on_in_the_same_folder_and_the_same_mlflow_run(story: Any, tmp_path: Path, run_app: Any):
    shutil.copytree(story[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    (run_dir,) = run_folders(tmp_path)
    database = tmp_path / "outputs" / "mlflow.db"
    for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):  # moved with its folder
        change(database, f"update {table} set {column} = replace({column}, ?, ?)", str(story[0]), str(tmp_path))
    for file in (run_dir / "mlflow").glob("*.json*"):
        file.write_text(file.read_text().replace(str(story[0]), str(tmp_path)))
    before = query(tmp_path, "select run_uuid, name from runs")

    # A run that is refused changes nothing of what was finished.
    refused = run_app("resume", str(run_dir.relative_to(tmp_path)), exit_code=2)
    assert "max_duration='2ep' is reached" in refused.stderr
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]

    # Everything but what is given again is as the run was started: model, data, callbacks.
    run_app("resume", str(run_dir.relative_to(tmp_path)), "trainer.max_duration=3ep")
    assert run_folders(tmp_path) == [run_dir]
    assert query(tmp_path, "select run_uuid, name from runs") == before
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    for key in ("loss/train/total", "lr-SGD/group0"):
        rows = query(tmp_path, "select step from metrics where key = ? order by step", key)
        assert [step for (step,) in rows] == list(range(1, 10))
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep3-ba9"
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 400 and config["trainer"]["max_duration"] == "3ep"


def test_a_sweep_is_one_folder_and_one_run_a_job(folder: Path, run_app: Any):
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


def test_a_failure_in_training_is_a_trace_and_exit_code_1(folder: Path, run_app: Any):
    done = run_app(*SHORT, "+callbacks.mine._target_=own.Failing", exit_code=1)
    assert "Traceback" in done.stderr
    assert "RuntimeError: a callback that fails" in done.stderr
    assert "raised by 'mine' at BATCH_START, in epoch 1, after 1 batch" in done.stderr
    assert "failed" in done.stdout
    assert query(folder, "select status from runs") == [("FAILED",)]
    (trace,) = (folder / "outputs" / "mlartifacts").rglob("error.txt")
    assert "a callback that fails" in trace.read_text()
    (run_dir,) = run_folders(folder)
    assert (run_dir / "config.yaml").exists()
