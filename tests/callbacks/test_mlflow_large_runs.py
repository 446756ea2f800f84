"""Runs with many values are resumed without reading all of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mlflow_runs import log_steps, logging_to, points
from python_process import wait_until

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow.spool import TAIL, Spool, read_entries


def read_by_this_process() -> int:
    """Return the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resumed_run_reads_only_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append_metrics([({"loss": 1.0, "more": 2.0}, step, 1.0) for step in range(1, 100_001)])
    position = spool.position(100_000)
    spool.append_metrics([({"loss": 1.0}, step, 1.0) for step in range(100_001, 100_101)])
    spool.close()
    resumed = Spool(tmp_path)
    resumed.since = position
    before = read_by_this_process()
    resumed.append_metrics([({"loss": 1.0}, step, 1.0) for step in range(100_001, 100_103)])
    assert read_by_this_process() - before < 4 * TAIL < spool.size / 10
    resumed.close()
    lines = [entry["s"] for entry, _ in read_entries(resumed.path, limit=None) if entry is not None]
    assert lines == [*range(1, 100_103)]


def test_a_run_resumed_while_it_trained_batches_again_logs_none_of_them_twice(folder: Path) -> None:
    """Its checkpoint lies before what the first session logged for later batches."""

    def train(steps: range, saved: dict[str, Any] | None, save_at: int = 0) -> dict[str, Any]:
        kept = {}
        logged = MLflowLogger()
        with logging_to(logged, "r", saved=saved) as (state, logger):
            for step in steps:
                log_steps(state, logger, range(step, step + 1))
                if step == save_at:
                    logger.flush()
                    kept = logged.state_dict()
        return kept

    first = train(range(1, 3001), None, save_at=2000)
    second = train(range(2001, 2501), first, save_at=2400)
    assert second["position"] == first["position"] > 0
    third = train(range(2401, 3501), second, save_at=3400)
    assert third["position"] > first["position"]
    train(range(3401, 3601), third)
    assert points("loss") == [(step, float(step)) for step in range(1, 3601)]


def test_a_position_in_a_spool_that_was_lost_does_not_count_in_its_successor(folder: Path) -> None:
    def train(steps: range, saved: dict[str, Any] | None) -> dict[str, Any]:
        logged = MLflowLogger()
        with logging_to(logged, "r", saved=saved) as (state, logger):
            log_steps(state, logger, steps)
            logger.flush()
            wait_until(lambda: logged.run_id is not None)
            return logged.state_dict()

    saved = train(range(1, 3001), None)
    shutil.rmtree(folder / "r" / "mlflow")
    train(range(3001, 3011), saved)
    train(range(3001, 3021), saved)
    assert points("loss") == [(step, float(step)) for step in range(1, 3021)]
