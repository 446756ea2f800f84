"""The duration and the end of a run in `result.json`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kept_runs import QUIET

from runner import Callback

OWN = "timed_here"
SLOW = (f"+callbacks.slow._target_={OWN}.Slow", "model=mlp", "data.batch_size=400", *QUIET)


class Slow(Callback):
    """Sleeps at the start, in each batch, in evaluations and at the end; fails before batch 5."""

    def init(self, state: Any, logger: Any) -> None:
        time.sleep(1000)

    def batch_start(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == 4:
            raise RuntimeError("on purpose")
        time.sleep(2)

    def eval_start(self, state: Any, logger: Any) -> None:
        time.sleep(3)

    def close(self, state: Any, logger: Any) -> None:
        time.sleep(1000)


def test_the_seconds_of_a_run_count_only_training_and_evaluation(
    tmp_path: Path, run_here: Any, steady: Any, monkeypatch: pytest.MonkeyPatch
):
    def seconds(run: str) -> float:
        return json.loads((tmp_path / run / "result.json").read_text())["seconds"]

    # Named outside of the package `tests`, because a run records all files of the packages that it uses.
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    run_here(*SLOW, "trainer.max_duration=3ba", "hydra.run.dir=run", code=0)
    assert seconds("run") == pytest.approx(9)
    run_here("resume", "run", "trainer.max_duration=5ba", code=1)
    assert seconds("run") == pytest.approx(9 + 2)
    run_here("eval", "run", "hydra.run.dir=evaluated", code=0)
    assert seconds("evaluated") == pytest.approx(3)


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 2)])
def test_a_result_that_cannot_be_written_is_reported_once(run_here: Any, tmp_path: Path, fails: bool, code: int):
    (tmp_path / "run" / "result.json").mkdir(parents=True)
    wrong = ("callbacks.checkpoint_saver.monitor=missing",) if fails else ()
    done = run_here("model=mlp", "trainer.max_duration=1ba", *QUIET, *wrong, "hydra.run.dir=run", code=code)
    assert done.err.count("run/result.json was not written: ") == 1
    assert "Traceback" not in done.err and (tmp_path / "run" / "result.json").is_dir()


def test_resuming_an_interrupted_run_with_a_length_that_it_has_passed_is_refused(run_here: Any, tmp_path: Path):
    run_here("model=mlp", "trainer.max_duration=3ep", "callbacks=[checkpoint_saver]", "hydra.run.dir=run", code=0)
    file = tmp_path / "run" / "result.json"
    file.write_text(file.read_text().replace('"FINISHED"', '"KILLED"'))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for length, trained in (("2ep", "3ep"), ("20ba", "57ba")):
        refused = run_here("resume", "run", f"trainer.max_duration={length}", code=2)
        assert f"trainer.max_duration='{length}' is reached: this run has trained {trained} already" in refused.err
        assert {path: path.read_bytes() for path in before} == before
    run_here("resume", "run", code=0)  # nothing is left to train, and its end is recorded
    assert json.loads(file.read_text())["status"] == "FINISHED"
