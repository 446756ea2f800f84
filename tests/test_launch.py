from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.launch import Job, Ranks, is_rank_zero

OWN = '''
import hashlib
import json
from pathlib import Path

from runner import Callback, get_global_rank


class Witness(Callback):
    """Writes down what this rank trained with, and what came of it."""

    def fit_end(self, state, logger):
        weights = b"".join(value.numpy().tobytes() for value in state.unwrapped_model.state_dict().values())
        seen = {
            "config": state.config,
            "run_dir": str(state.run_dir),
            "run_name": state.run_name,
            "weights": hashlib.sha256(weights).hexdigest(),
            "samples": state.timestamp.sample,
            "seed": state.seed,
        }
        Path(f"rank{get_global_rank()}.json").write_text(json.dumps(seen))
'''


def torchrun(folder: Path, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    return subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def test_torchrun_makes_one_run_of_its_ranks(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    done = torchrun(
        tmp_path,
        *("trainer.max_duration=3ba", "model=mlp", "data.batch_size=400", "scheduler=none", "trainer.eval_interval=0"),
        *("+callbacks.witness._target_=own.Witness", "~callbacks.learning_curves"),
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first.pop("seed"), second.pop("seed")) == (0, 1)
    assert first == second
    assert first["samples"] == 1200
    assert first["config"]["data"]["batch_size"] == 400

    (run_dir,) = tmp_path.glob("outputs/20*/*")
    assert str(run_dir) == first["run_dir"]
    with contextlib.closing(sqlite3.connect(tmp_path / "outputs" / "mlflow.db")) as store:
        assert store.execute("select status, name from runs").fetchall() == [("FINISHED", first["run_name"])]
        (points,) = store.execute("select count(*) from metrics where key = 'loss/train/total'").fetchone()
    assert points == 3
    assert done.stdout.count("2 processes") == 1
    assert done.stdout.splitlines()[-1].split()[0] == "compare"


@pytest.mark.parametrize("argument", ["optimizer.lrr=1", "data.batch_size=0"])
def test_a_wrong_command_ends_all_ranks_with_one_message(tmp_path: Path, argument: str):
    """The first is found when composing, on rank 0 alone; the second when building, on all ranks."""
    start = time.monotonic()
    done = torchrun(tmp_path, argument, "~callbacks.mlflow_logger", timeout=60)
    assert time.monotonic() - start < 45
    assert done.returncode != 0
    messages = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(messages) == 1 and messages[0].startswith(f"error: {argument.partition('=')[0]}"), done.stderr
    # torchrun adds a report of its own, which ends in the exit code of each rank.
    assert "exitcode  : 2" in done.stderr
    assert "WrongConfig" not in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_jobs_reach_the_other_ranks_in_order(run_ranks: Any):
    def program():
        from runner.launch import Job, Ranks

        ranks = Ranks()
        if ranks.rank == 0:
            for seed in range(2):
                ranks.send(Job({"seed": seed, "callbacks": {"a": [1, None]}}, "/folder", f"run{seed}", ["x=1"]))
            ranks.dismiss(3)
        else:
            for job in ranks.receive():
                print(job)
        if ranks.rank == 0:
            import time

            time.sleep(2)  # its store is the meeting place

    done = run_ranks(program, 3, check=False)
    assert [one.returncode for one in done] == [0, 3, 3], done
    jobs = [Job({"seed": seed, "callbacks": {"a": [1, None]}}, "/folder", f"run{seed}", ["x=1"]) for seed in range(2)]
    assert done[1].stdout.splitlines() == done[2].stdout.splitlines() == [str(job) for job in jobs]


def test_a_rank_that_cannot_do_a_job_hears_whether_rank_0_could(run_ranks: Any):
    def program():
        import time

        from runner.launch import Job, Ranks

        ranks = Ranks()
        if ranks.rank == 0:
            ranks.send(Job({}, "", ""))
            time.sleep(2)
            ranks.dismiss(2)
            time.sleep(2)
        else:
            next(ranks.receive())
            print(ranks.hears_more(seconds=0.2), ranks.hears_more(seconds=20))

    done = run_ranks(program, 2)
    assert done[1].stdout.split() == ["False", "True"]


def test_alone_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert is_rank_zero()
    ranks = Ranks()
    ranks.send(Job({}, "", ""))
    ranks.dismiss(0)
    assert (ranks.rank, ranks.size) == (0, 1)
    assert "MASTER_ADDR" not in os.environ
    monkeypatch.setenv("RANK", "1")
    assert not is_rank_zero()
