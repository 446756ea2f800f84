"""The command as a user meets it: imports, output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from main_runs import SHORT, query, run_folders
from python_process import PATIENCE, start_python


def test_help_and_config_errors_import_no_slow_library(tmp_path: Path):
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
    # CPU time, because other processes may load the machine: about 2 s, and importing torch would add 1.3 s.
    assert after.children_user - before.children_user < 10
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("exit ")] == ["exit 0", "exit 0", "exit 2", "exit 2", "exit 2"]
    assert lines[-1] == "imported []"
    assert "activation_monitor, checkpoint_saver," in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_help_quietly(tmp_path: Path):
    command = f"{sys.executable} -m runner --help | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_survives_a_full_or_closed_stdout(tmp_path: Path, ranks: int):
    command = ["-m", "runner", *SHORT, "~callbacks.mlflow_logger", f"launch.nproc_per_node={ranks}"]
    with open("/dev/full", "wb") as full:
        full_out = start_python([*command, "hydra.run.dir=out"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
        full_both = start_python([*command, "hydra.run.dir=both"], cwd=tmp_path, stdout=full, stderr=full)
    program = "import os, runpy, sys; os.closerange(0, 3); sys.stdout = sys.stderr = None; sys.argv[0] = 'runner'; "
    program += "runpy.run_module('runner', run_name='__main__')"
    closed = start_python(["-c", program, *command[2:], "hydra.run.dir=closed"], cwd=tmp_path)
    with full_out as process:
        assert process.stderr is not None
        stderr = process.stderr.read().decode()
    assert [process.wait(PATIENCE) for process in (full_out, full_both, closed)] == [0, 0, 0], stderr
    assert stderr.count("WARNING: cannot write to stdout") == 1
    for name in ("out", "both", "closed"):
        assert json.loads((tmp_path / name / "result.json").read_text())["status"] == "FINISHED"
        assert (tmp_path / name / "checkpoints" / "ep2-ba6").exists()


def test_an_error_in_training_shows_a_trace_and_exits_with_1(folder: Path, run_app: Any):
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
