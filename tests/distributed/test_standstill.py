"""A run that makes no progress reports what each rank does, saves its stacks, and ends so that it can be resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runner.distributed.launch import Launch

OWN = '''
import os, threading, time
import torch
import torch.distributed as dist
from runner import Callback, ClassificationModel
from runner.data import DatasetLoader, TensorLoader

class Late(Callback):
    def __init__(self, how):
        self.how = how

    def batch_end(self, state, logger):
        if state.timestamp.batch == 3 and os.environ["RANK"] == "1":
            if self.how == "waits" or (self.how == "waits once" and not os.path.exists("waited")):
                open("waited", "w").close()
                threading.Event().wait()
            end = time.monotonic() + 5
            while time.monotonic() < end:
                sum(range(1000))

class Stuck:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40:
            threading.Event().wait()
        return torch.zeros(64), 1

def read_by_workers():
    return DatasetLoader(Stuck(), 8, shuffle=False, num_workers=2), None

class Gathered(ClassificationModel):
    """A classifier whose loss needs a collective of all ranks."""

    def loss(self, outputs, batch):
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        return super().loss(outputs, batch)

def uneven():
    inputs, targets = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), torch.arange(9)
    return tuple(TensorLoader(inputs, targets, batch_size=4, shuffle=False) for _ in range(2))
'''
SHORT = ("model=mlp", "algorithms=none", "callbacks=[console_summary]", "trainer.max_duration=1ep")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def late(how: str) -> list[str]:
    return ["launch.nproc_per_node=2", "+callbacks.late._target_=own.Late", f"+callbacks.late.how={how}"]


def test_the_error_of_a_stuck_run_says_where_each_rank_is(here: Path, run_app: Any):
    finished = run_app(*SHORT, *late("waits"), "launch.patience=3s", "launch.restarts=0", exit_code=75)
    line = next(line for line in finished.stderr.splitlines() if "nothing has moved" in line)
    assert re.search(r"rank 0 (is in a backward pass|waits for other ranks in all_reduce)", line), line
    assert re.search(r"rank 1 is at BATCH_END at .*own.py:\d+, batch_end", line), line
    (folder,) = here.glob("outputs/*/*/stacks")
    assert "in batch_end" in (folder / "rank1.txt").read_text() and (folder / "rank0.txt").exists()


@pytest.mark.slow  # test_all_ranks_restart_after_a_failure_on_one, in tests/promises, restarts ranks in the first tier
def test_ranks_that_were_stuck_are_restarted_together(here: Path, run_app: Any):
    """All ranks end without closing anything, and the new ones start after the old ones are gone."""
    saving = ["callbacks=[checkpoint_saver]", "callbacks.checkpoint_saver.save_interval=1ba", "--json"]
    finished = run_app(*SHORT, *saving, *late("waits once"), "launch.patience=3s", "hydra.run.dir=run")
    warning = "WARNING: restart 1 of 3, from batch 2, because the machine failed: ERROR: nothing has moved"
    assert warning in finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["exit_code"] == 0 and answer["result"]["status"] == "FINISHED"


@pytest.mark.slow
def test_a_rank_that_computes_for_longer_than_the_patience_is_not_stuck(here: Path, run_app: Any):
    run_app(*SHORT, *late("works"), "launch.patience=2s")


@pytest.mark.slow
def test_the_error_of_a_process_that_waits_for_a_data_worker_names_the_worker(here: Path, run_app: Any):
    (here / "conf" / "data").mkdir(parents=True)
    (here / "conf" / "data" / "slow.yaml").write_text("_target_: own.read_by_workers\n")
    finished = run_app(
        *SHORT, "data=slow", "model.num_classes=10", "launch.patience=15s", "launch.restarts=0", exit_code=75
    )
    assert re.search(r"waits for batch 6 of epoch 1 from data worker 1 \(pid \d+, sleeping\)", finished.stderr)
    stack = finished.stderr.replace('"', "").replace(",", "")
    assert re.search(r"own.py\S* line \d+ in __getitem__", stack)


def test_a_loss_with_a_collective_is_evaluated_even_if_a_rank_has_no_sample(here: Path, run_app: Any):
    (here / "conf" / "data").mkdir(parents=True)
    (here / "conf" / "data" / "uneven.yaml").write_text("_target_: own.uneven\n")
    arguments = [*SHORT, "data=uneven", "model._target_=own.Gathered", "callbacks=[console_summary,json_lines_logger]"]
    losses = []
    for ranks in (1, 2):
        run_app(*arguments, f"launch.nproc_per_node={ranks}", "launch.patience=20s", "optimizer.lr=0")
        newest = max(here.glob("outputs/*/*/*.jsonl"), key=lambda file: file.stat().st_mtime)
        losses.append(re.findall(r'"loss/eval/total":([\d.]+)', newest.read_text()))
    assert losses[0] and [round(float(loss), 5) for loss in losses[0]] == [round(float(loss), 5) for loss in losses[1]]


@pytest.mark.parametrize("value", [0, "0s", "2ep", "soon", -1.0])
def test_a_patience_that_is_not_a_positive_time_is_refused(value: Any):
    with pytest.raises(ValueError, match=f"patience={value!r}"):
        Launch(patience=value)
    assert Launch(patience=90).patience_seconds == Launch(patience="1m30s").patience_seconds == 90
