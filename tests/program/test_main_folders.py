"""Folders that are taken, not writable or oddly named: their files stay, and errors name them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from main_runs import SHORT


def test_a_refused_run_removes_no_files_of_the_user(folder: Path, run_here: Any):
    (folder / "kept").mkdir()
    (folder / "kept" / "notes.txt").write_text("mine")
    assert run_here("hydra.run.dir=kept", "callbacks.checkpoint_saver.monitor=nothing").code == 2
    assert (folder / "kept" / "notes.txt").read_text() == "mine"


def test_a_working_directory_that_cannot_be_written_is_named(tmp_path: Path, run_app: Any):
    (tmp_path / "outputs").write_text("a file where the folder should be")
    done = run_app(exit_code=2)
    assert done.stderr.startswith("error: hydra.run.dir: ") and f"'{tmp_path}/outputs" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_with_another_run_is_refused_and_unchanged(folder: Path, run_here: Any):
    arguments = (*SHORT, "hydra.run.dir=runs/a", "~callbacks.mlflow_logger")
    assert run_here(*arguments).code == 0
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    code, _, err = run_here(*arguments, "optimizer.lr=0.2")
    assert code == 2
    assert "runs/a/checkpoints" in err and "resume" in err
    after = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    assert after == before and any(path.name == "config.yaml" for path in after)


def test_folders_named_like_an_interpolation_are_taken_literally(tmp_path: Path, run_app: Any):
    folder = tmp_path / "it's ${seed}, a=b (é)"
    folder.mkdir()
    quiet = (*SHORT, "callbacks=[checkpoint_saver,console_summary]")
    typed = "hydra.run.dir='runs/x=1, \\${seed} \\'é\\''"
    first = run_app(*quiet, typed, folder=folder)
    run = folder / "runs" / "x=1, ${seed} 'é'"
    assert (run / "result.json").is_file() and [*tmp_path.iterdir()] == [folder]
    (command,) = (line for line in first.stdout.splitlines() if line.endswith("trainer.max_duration=4ep"))
    run_app(*shlex.split(command)[3:], folder=folder)
    assert "max_duration: 4ep" in (run / "config.yaml").read_text()


def test_characters_that_the_terminal_lacks_are_replaced(folder: Path, run_app: Any):
    env = {"PYTHONIOENCODING": "ascii", "COLUMNS": "50"}
    done = run_app(*SHORT, "callbacks=[console_summary]", 'run_name="é …"', env=env, real=True)
    assert done.stdout.startswith("? ?")
    run_app("help", "replay", env=env, real=True)
