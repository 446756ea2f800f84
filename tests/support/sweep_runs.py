"""Overrides for short sweeps, a module of a user for them, and functions that read the files they leave."""

from __future__ import annotations

import json
from pathlib import Path

SHORT = ("model=mlp", "data.batch_size=400", "data.eval_batch_size=300", "trainer.max_duration=2ep")  # 6 batches
QUIET = (*SHORT, "callbacks=[checkpoint_saver]", "+callbacks.own._target_=own.Watch")
LOGGED = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]", "+callbacks.own._target_=own.Watch")

OWN = '''
import os
import signal
import time
from pathlib import Path

from runner import Callback


class Watch(Callback):
    """Writes a line for each batch, waits at the fifth batch of each run, and ends seed 1 there.

    Args:
        ends: how seed 1 ends the first time: "error" raises, the name of a signal sends it, "" does not end it.
        seconds: how long each run waits, until the file `interrupted` exists.
    """

    def __init__(self, ends: str = "", seconds: float = 0.0) -> None:
        self.ends = ends
        self.seconds = seconds

    def batch_start(self, state, logger):
        with open("batches.txt", "a") as file:
            file.write(f"{state.run_name} {state.timestamp.batch}\\n")
        if state.timestamp.batch == 4 and not Path("interrupted").exists():
            time.sleep(self.seconds)
        if self.ends and "seed1" in state.run_name and state.timestamp.batch == 4 and not Path("ended").exists():
            Path("ended").touch()
            if self.ends == "error":
                raise RuntimeError("a callback that fails")
            os.kill(os.getpid(), getattr(signal, self.ends))
'''


def sweeps(folder: Path) -> list[Path]:
    """Return the folders of sweeps below a working directory, the oldest first."""
    return sorted(folder.glob("outputs/sweeps/20*/*"))


def batches(folder: Path) -> list[str]:
    """Return a line for each batch trained since the last call."""
    file = folder / "batches.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def six(*names: str) -> list[str]:
    """Return the lines that `Watch` writes for the six batches of each run."""
    return [f"{name} {batch}" for name in names for batch in range(6)]


def statuses(sweep: Path) -> dict[str, str]:
    """Return the status of each finished job of a sweep, by the name of its folder."""
    return {path.parent.name: json.loads(path.read_text())["status"] for path in sweep.glob("*/result.json")}
