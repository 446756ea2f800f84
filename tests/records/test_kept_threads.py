"""A resumed run keeps its number of CPU threads, and warns if another number is set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.distributed.threads import cores

OWN = """
import torch
from runner import Callback

class Watcher(Callback):
    def fit_start(self, state, logger):
        print("threads", torch.get_num_threads())
"""
COMMAND = (
    "model=mlp",
    "algorithms=none",
    "callbacks=[console_summary,checkpoint_saver]",
    "+callbacks.watcher._target_=own.Watcher",
    "trainer.max_duration=1ep",
)
FREE: dict[str, str | None] = {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None}


def test_a_resumed_run_keeps_its_threads_unless_the_command_sets_them(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    assert "threads 3" in run_app(*COMMAND, "launch.threads=3", env=FREE).stdout
    (folder,) = tmp_path.glob("outputs/*/*")
    assert json.loads((folder / "environment.json").read_text())["threads"] == 3
    resume = ("resume", str(folder))
    kept = run_app(*resume, "launch.threads=null", "trainer.max_duration=2ep", env=FREE)
    assert "threads 3" in kept.stdout
    assert ("this is exact, but slow" in kept.stderr) == (cores() < 3)
    typed = run_app(*resume, "launch.threads=1", "trainer.max_duration=3ep", env=FREE)
    assert "threads 1" in typed.stdout
    assert "the run had 3 CPU threads and goes on with 1: the last bits" in typed.stderr
