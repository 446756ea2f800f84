"""Runs with many values: they are sent in steps, thinned on request, and resumed without reading the whole spool."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow_runs import change, log_steps, logging_to, points, query
from python_process import wait_until

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow import thinning
from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.session import Session
from runner.callbacks._mlflow.spool import TAIL, Sent, Spool, read_entries, read_sent
from runner.callbacks._mlflow.target import make_target, resolve_uri
from runner.callbacks._mlflow.thinning import WINDOW, SendingRate, Thinning

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of MLflow, which otherwise only the writer imports
Values = list[tuple[dict[str, float], int, float]]


def deliver(values: Values, report: Callable[[dict[str, Any]], None] = lambda _: None, **fields: Any) -> bool:
    """Add values and the end of the run to the spool of run `r`, and send it to the default store."""
    folder = Path("r/mlflow").resolve()
    fields |= {"tracking_uri": resolve_uri(None), "by_key": False, "experiment_name": "e", "run_name": "r"}
    target = make_target({**fields, "spool": "a" * 32}, {}, ["train"])
    spool = Spool(folder)
    if not spool.is_resumed:
        spool.append({"start": target["start_time"], "spool": target["spool"], "name": "r"})
    if values:
        spool.append_metrics(values)
        spool.append({"status": "FINISHED", "t": 1})
    spool.close()
    return Delivery(folder.parent, target, report, live=False).run()


def stored() -> list[tuple[str, int, float]]:
    return sorted(query("select key, step, value from metrics"))


class Killed(BaseException):
    """Ends a delivery, as a kill of its process would."""


def test_values_sent_before_a_kill_are_not_sent_again(folder: Path) -> None:
    values = [({f"key{number}": float(step) for number in range(1000)}, step, 1.0) for step in range(5)]
    offsets = []

    def kill(report: dict[str, Any]) -> None:
        if report.get("offset"):
            offsets.append(report["offset"])
            if len(offsets) == 3:  # of the first line, and of two lines with metrics
                raise Killed

    with pytest.raises(Killed):
        deliver(values, kill)
    assert len(stored()) == 2000
    assert read_sent(folder / "r" / "mlflow", resolve_uri(None)).offset == offsets[-1] > 0
    assert deliver([])
    assert stored() == sorted((key, step, value) for metrics, step, _ in values for key, value in metrics.items())


def test_values_in_the_store_are_not_sent_again_if_sent_json_is_lost(folder: Path) -> None:
    values = [({"loss": float(step)}, step, 1.0 + step) for step in range(20)]
    assert deliver(values[:10])
    change("update metrics set value = -1 where step < 9")  # a value that is sent again would appear beside -1
    (folder / "r" / "mlflow" / "sent.json").unlink()
    assert deliver(values[10:])
    assert stored() == sorted(("loss", step, -1.0 if step < 9 else float(step)) for step in range(20))


def test_a_thinned_run_keeps_rare_values_and_the_last_of_each_key(folder: Path) -> None:
    values = [({"fast": float(step)} | ({} if step % 20 else {"rare": 0.5}), step, step / 10) for step in range(96)]
    assert deliver(values, max_values_per_second=2)
    assert points("rare") == [(step, 0.5) for step in range(0, 96, 20)]
    assert points("fast") == [(step, float(step)) for step in (*range(0, 96, 10), 95)]  # one value a second
    assert sum("m" in (entry or {}) for entry, _ in read_entries(folder / "r" / "mlflow" / "spool.jsonl")) == 96


def test_the_writer_thins_values_and_sends_the_last_one_at_the_end(folder: Path) -> None:
    with logging_to(MLflowLogger(max_values_per_second=1e-4), "r") as (state, logger):  # one value in three hours
        log_steps(state, logger, range(1, 101))
    assert points("loss") == [(1, 1.0), (100, 100.0)]
    assert query("select status from runs") == [("FINISHED",)]


def test_a_new_sender_chooses_the_same_values_as_an_uninterrupted_one() -> None:
    entries = [{"m": {"a": 1.0, f"b{step % 7}": 2.0}, "s": step, "t": step * 10} for step in range(500)]
    whole = Thinning(30, Sent(""))
    chosen = [whole.choose(entry) for entry in entries]
    sent = Sent("")
    for entry, expected in zip(entries, chosen, strict=True):
        restarted = Thinning(30, sent)
        Thinning(30, sent).choose(entry)  # a failed attempt changes nothing
        assert restarted.choose(entry) == expected
        sent.sent_at = restarted.sent_at
        sent.left_out = restarted.left_out
    assert 100 < sum(len(entry["m"]) for entry in chosen) < 5 * 30 + 8 + 1


@pytest.mark.slow
def test_a_store_slower_than_logging_gives_a_warning_during_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thinning, "WINDOW", 0.2)
    fields = {"tracking_uri": resolve_uri(None), "by_key": False, "experiment_name": "e", "run_name": "r"}
    target = make_target(fields, {}, ["train"])
    spool = Spool(folder / "r" / "mlflow")
    session = Session(folder / "r", **fields)
    delivery = Delivery(folder / "r", target, partial(session._receive, None), live=True)  # type: ignore[arg-type]
    sender = threading.Thread(target=delivery.run)
    sender.start()
    steps = iter(range(1_000_000))

    def has_warned() -> bool:
        spool.append_metrics([({f"key{n}": 0.0 for n in range(1000)}, next(steps), 1.0) for _ in range(10)])
        return "values are logged faster than the store accepts them" in caplog.text

    wait_until(has_warned)
    delivery.abandon()
    spool.close()
    sender.join()
    assert "callbacks.mlflow_logger.max_values_per_second=" in caplog.text


def test_a_backlog_that_shrinks_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rates = {"after an outage": SendingRate(), "from an empty spool": SendingRate(unsent=0)}
    reported: dict[str, list[float | None]] = {name: [] for name in rates}
    for window in range(1, 4):
        now = window * WINDOW
        for name, rate in rates.items():
            reported[name].append(rate.note(3000, 1000, 100_000 - window * 1000))
    assert reported == {"after an outage": [None] * 3, "from an empty spool": [100.0, None, None]}


def test_slow_uploads_of_files_are_not_reported_as_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = SendingRate(unsent=0)
    later = time.monotonic() + WINDOW
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert rate.note(0, 10, 100_000) is None


@pytest.mark.parametrize(
    "value", [1.0, None, "abc", [1.0, 2], [1.0, "x", None], {"a": 1, "b": 2, "c": 3}, [1.0, 1, "t"], [True, 1, 1]]
)
def test_a_sent_json_with_malformed_values_is_ignored(value: Any, tmp_path: Path) -> None:
    (tmp_path / "spool.jsonl").write_bytes(bytes(100))
    for left_out, offset in (({"loss": [0.5, 1, 1]}, 50), ({"loss": value}, 0)):
        content = {"tracking_uri": "sqlite:///x.db", "run_id": "a" * 32, "offset": 50, "left_out": left_out}
        (tmp_path / "sent.json").write_text(json.dumps(content))
        assert read_sent(tmp_path, "sqlite:///x.db").offset == offset


def bytes_read() -> int:
    """Return the number of bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resumed_run_reads_only_lines_logged_after_its_checkpoint(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append_metrics([({"loss": 1.0, "more": 2.0}, step, 1.0) for step in range(1, 100_001)])
    position = spool.position(100_000)
    spool.append_metrics([({"loss": 1.0}, step, 1.0) for step in range(100_001, 100_101)])
    spool.close()
    resumed = Spool(tmp_path, since=position)
    before = bytes_read()
    resumed.append_metrics([({"loss": 1.0}, step, 1.0) for step in range(100_001, 100_103)])
    assert bytes_read() - before < 4 * TAIL < spool.size / 10
    resumed.close()
    lines = [entry["s"] for entry, _ in read_entries(resumed.path, limit=None) if entry is not None]
    assert lines == [*range(1, 100_103)]


def test_a_long_line_of_the_last_batch_before_a_checkpoint_is_not_written_twice(tmp_path: Path) -> None:
    metrics = {f"a key of class {number}": 1.0 for number in range(5000)}
    spool = Spool(tmp_path)
    spool.append_metrics([(metrics, step, 1.0) for step in range(1, 11)])
    position = spool.position(10)
    spool.close()
    assert spool.size - position > TAIL
    resumed = Spool(tmp_path, since=position)
    resumed.append_metrics([(metrics, 10, 1.0)])
    resumed.close()
    assert resumed.size == spool.size


@pytest.mark.parametrize("position", [2**62, 2**70])
def test_a_position_beyond_the_end_of_the_spool_loses_no_values(position: int, folder: Path) -> None:
    destination = MLflowLogger()
    with logging_to(destination, "r") as (state, logger):
        log_steps(state, logger, range(1, 11))
        logger.flush()
        saved = destination.state_dict()
    with logging_to(MLflowLogger(), "r", saved=saved | {"position": position}) as (state, logger):
        log_steps(state, logger, range(11, 21))
    assert points("loss") == [(step, float(step)) for step in range(1, 21)]


def test_a_run_resumed_while_retraining_logs_no_batch_twice(folder: Path) -> None:
    """The checkpoint of the second session is of a batch that the first session had already logged."""

    def train(steps: range, saved: dict[str, Any] | None, save_at: int = 0) -> dict[str, Any]:
        checkpoint = {}
        destination = MLflowLogger()
        with logging_to(destination, "r", saved=saved) as (state, logger):
            for step in steps:
                log_steps(state, logger, range(step, step + 1))
                if step == save_at:
                    logger.flush()
                    checkpoint = destination.state_dict()
        return checkpoint

    first = train(range(1, 3001), None, save_at=2000)
    second = train(range(2001, 2501), first, save_at=2400)
    assert second["position"] == first["position"] > 0
    third = train(range(2401, 3501), second, save_at=3400)
    assert third["position"] > first["position"]
    train(range(3401, 3601), third)
    assert points("loss") == [(step, float(step)) for step in range(1, 3601)]


def test_a_position_in_a_lost_spool_is_ignored_by_the_next_spool(folder: Path) -> None:
    def train(steps: range, saved: dict[str, Any] | None) -> dict[str, Any]:
        destination = MLflowLogger()
        with logging_to(destination, "r", saved=saved) as (state, logger):
            log_steps(state, logger, steps)
            logger.flush()
            wait_until(lambda: destination.run_id is not None)
            return destination.state_dict()

    saved = train(range(1, 3001), None)
    shutil.rmtree(folder / "r" / "mlflow")
    train(range(3001, 3011), saved)
    train(range(3001, 3021), saved)
    assert points("loss") == [(step, float(step)) for step in range(1, 3021)]
