"""Short sweeps, files of a user beside them, and the files that they leave in a working directory."""

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
    """Notes each batch; seed 1 ends at its fifth batch as asked, once; all wait there as long as asked."""

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
    return sorted(folder.glob("outputs/sweeps/20*/*"))


def batches(folder: Path) -> list[str]:
    """The batches trained since they were last asked for."""
    file = folder / "batches.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def six(*names: str) -> list[str]:
    return [f"{name} {batch}" for name in names for batch in range(6)]


def statuses(sweep: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in sweep.glob("*/result.json")}
