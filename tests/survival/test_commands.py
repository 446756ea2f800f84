"""The command line on two ranks: one of them is stopped or dies in backward, and the run is gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from python_process import PATIENCE

OWN = '''
import os
import time

from runner import Callback, get_global_rank


class Strikes(Callback):
    """Sends rank 1 a signal in the backward pass of the sixth batch, unless it was restarted."""

    def __init__(self, number: int):
        self.number = number

    def before_backward(self, state, logger):
        time.sleep(0.1)  # ranks agree on a signal about once a second
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if state.timestamp.batch == 5 and first and get_global_rank() == 1:
            state.loss.register_hook(lambda gradient: os.kill(os.getpid(), self.number))
'''
ARGUMENTS = (
    *("model=mlp", "model.module.dropout=0.2", "data.batch_size=400", "data.eval_batch_size=300"),
    *("trainer.max_duration=10ep", "callbacks=[checkpoint_saver]", "callbacks.checkpoint_saver.save_interval=2ba"),
)
TWO = "launch.nproc_per_node=2"


def strikes(number: int) -> list[str]:
    return ["+callbacks.strikes._target_=own.Strikes", f"+callbacks.strikes.number={int(number)}"]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep10-ba30"
    return torch.load(run_dir / "checkpoints" / "latest" / "model.pt", weights_only=True)


def status(run_dir: Path) -> str:
    return json.loads((run_dir / "result.json").read_text())["status"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The final weights of the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, "-m", "runner", *ARGUMENTS, TWO, "hydra.run.dir=run")
    return weights(folder / "run")


def run(folder: Path, *command: str, exit_code: int = 0) -> None:
    """Run Python in a folder, and end all that it has started where it takes too long."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == exit_code, (folder / "log").read_text()


@pytest.mark.slow
def test_a_rank_that_is_stopped_changes_nothing(tmp_path: Path, whole: dict[str, torch.Tensor]):
    (tmp_path / "own.py").write_text(OWN)
    left = tmp_path / "run"
    run(tmp_path, "-m", "runner", *ARGUMENTS, TWO, "hydra.run.dir=run", *strikes(signal.SIGTERM), exit_code=143)
    saved = json.loads((left / "checkpoints" / "latest" / "manifest.json").read_text())["timestamp"]["batch"]
    assert status(left) == "KILLED" and 6 <= saved < 30
    run(tmp_path, "-m", "runner", "resume=run")
    assert status(left) == "FINISHED"
    torch.testing.assert_close(weights(left), whole, rtol=0, atol=0)


@pytest.mark.slow
def test_a_rank_that_dies_in_backward_changes_nothing(tmp_path: Path, whole: dict[str, torch.Tensor]):
    """The other waits for it in a collective; torchrun begins again, from the newest checkpoint."""
    (tmp_path / "own.py").write_text(OWN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "-m", "runner")
    run(tmp_path, *torchrun, *ARGUMENTS, "hydra.run.dir=run", *strikes(signal.SIGKILL))
    assert "ep1-ba4" in (tmp_path / "run" / "config.yaml").read_text(), "not gone on from the newest checkpoint"
    torch.testing.assert_close(weights(tmp_path / "run"), whole, rtol=0, atol=0)
