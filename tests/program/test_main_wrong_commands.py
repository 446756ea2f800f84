"""Wrong commands: each is one message that shows the fault and what to write instead, and leaves nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from main_runs import query, run_folders
from tiers import one_in
from wrong_commands import WRONG


@pytest.mark.parametrize("command", one_in(6, WRONG))
def test_a_wrong_command_is_one_message_and_leaves_nothing(
    command: str, run_here: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if "submitit_slurm" in command:  # as on a machine without Slurm
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    (folder / "needy.py").write_text("import not_installed_at_all\n")
    (folder / "torn.py").write_text("class Mine(:\n")
    (folder / "failing.py").write_text("{}['key']\n")
    before = sorted(folder.rglob("*"))
    code, out, err = run_here(*command.split())
    assert code == 2, err
    assert not out or (out.startswith("sweep-") and len(out.splitlines()) == 1)  # a sweep says what it begins
    lines = err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert len(lines) <= 6 and "Traceback" not in err, err
    for part in WRONG[command]:
        assert part in err, err
    # The lock beside a store stays, when the writer that was started early has already opened it.
    passing = ("__pycache__", "mlflow.db.lock")
    left = {path for path in folder.rglob("*") if not {*passing} & {*path.parts}} - {*before}
    assert left == set()
    assert query(folder, "select count(*) from runs") == [(0,)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("data=digit",),
        ("optimizer.lrr=1",),
        ("callbacks=null",),
        ("--lr", "0.1"),
        ("resume", "missing", "seed=x"),
        ("-m", "model=mlp,mpl"),
        ("trainer.max_duration=5epochs", "callbacks=none"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_ends_a_process_with_2(run_app: Any, tmp_path: Path, arguments: tuple[str, ...]):
    done = run_app(*arguments, exit_code=2)
    assert done.stdout.count("\n") <= 1  # the title of what would have run
    assert done.stderr.count("error: ") == 1 and len(done.stderr.splitlines()) <= 2, done.stderr
    assert run_folders(tmp_path) == run_folders(tmp_path, "outputs/**/[0-9]*") == []
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_the_trace_of_a_wrong_configuration_is_there_for_the_asking(folder: Path, run_here: Any, monkeypatch: Any):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    code, _, err = run_here("+callbacks.mine._target_=own.Broken")
    assert code == 2
    assert "None + 1" in err and err.splitlines()[-1].startswith("error: callbacks.mine")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
