from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_files import limited_files
from tiny_runs import make_data, tiny_trainer
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Event, Trainer, save_checkpoint
from runner.callbacks import EventTrace, InMemoryLogger

SLEEP = 0.005  # seconds
TICK = 1e-6  # seconds by which each reading advances the virtual clock

Rows = dict[tuple[str, str], dict[str, float]]


class Slow(Callback):
    """Sleeps at the end of each batch, and records all events."""

    def __init__(self):
        self.events: list[Event] = []

    def run_event(self, event, state, logger):
        self.events.append(event)
        if event is Event.BATCH_END:
            time.sleep(SLEEP)


class SlowOutside(Callback):
    """Sleeps outside of training batches."""

    def fit_start(self, state, logger):
        time.sleep(10 * SLEEP)

    def epoch_start(self, state, logger):
        time.sleep(10 * SLEEP)

    eval_batch_end = epoch_end = epoch_checkpoint = fit_end = epoch_start


class Clock(Callback):
    """Measures training steps, from the request for a batch to BATCH_END."""

    def __init__(self):
        self.seconds = 0.0

    def before_dataloader(self, state, logger):
        self.start = time.perf_counter()

    def batch_end(self, state, logger):
        self.seconds += time.perf_counter() - self.start


class Nothing(Algorithm):
    @torch.no_grad()  # decorated methods have the attribute __wrapped__
    def batch_start(self, state, logger):
        pass


class Fails(Callback):
    def batch_end(self, state, logger):
        raise RuntimeError("on purpose")


@pytest.fixture
def ticking(steady: Any) -> None:
    """Let each reading advance the virtual clock, so that slices nest."""
    steady.tick = round(1e9 * TICK)


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    data = make_data(8)
    defaults: dict[str, Any] = {
        "train_dataloader": data,
        "eval_dataloader": data,
        "max_duration": "3ep",
        "algorithms": [Nothing()],
        "run_dir": run_dir,
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def rows(memory: InMemoryLogger) -> Rows:
    """Return the logged table by callback and event."""
    table = memory.tables["event_trace"]
    return {(row[0], row[1]): dict(zip(table["columns"][2:], row[2:], strict=True)) for row in table["rows"]}


def parts(table: Rows) -> tuple[Rows, Rows]:
    """Return the rows of events in a step, and the other rows."""
    inside = {key: row for key, row in table.items() if row["share of step"] is not None}
    return inside, {key: row for key, row in table.items() if key not in inside}


def slices(path: Path, category: str) -> list[dict[str, Any]]:
    """Return the slices of a category, sorted by start."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == category), key=lambda event: event["ts"])


def depths(path: Path) -> list[tuple[int, str]]:
    """Return the depth and name of each slice, nested as in a trace viewer."""
    nested, open_ends = [], []
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):  # a stable sort
        while open_ends and open_ends[-1] <= event["ts"] + 1e-3:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1] + 1e-3, f"{event} crosses the end of another slice"
        nested.append((len(open_ends), event["name"]))
        open_ends.append(end)
    return nested


def test_durations_come_from_a_real_clock(tmp_path: Path):
    memory = InMemoryLogger()
    start = time.perf_counter()
    with make_trainer(tmp_path, Slow(), EventTrace(), loggers=[memory]) as trainer:
        trainer.fit()
    table = rows(memory)
    assert 12e3 * SLEEP <= table["slow", "batch_end"]["ms"] < sum(cells["ms"] for cells in table.values())
    assert sum(cells["ms"] for cells in table.values()) <= 1e3 * (time.perf_counter() - start)


@pytest.mark.usefixtures("ticking")
def test_the_table_has_the_costs_of_callbacks(tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, Slow(), EventTrace(), loggers=[memory]) as trainer:
        start = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - start
    table = rows(memory)
    slow = table["slow", "batch_end"]
    assert slow["calls"] == 12
    assert slow["ms"] == pytest.approx(12e3 * (SLEEP + TICK))
    assert slow["us per call"] == slow["us per step"] == pytest.approx(slow["ms"] * 1e3 / 12)
    assert table["slow", "eval_batch_end"]["calls"] == 12
    assert {event for owner, event in table if owner == "nothing"} == {"batch_start"}
    inside, outside = parts(table)
    assert [*table.values()] == [*inside.values(), *outside.values()]
    for part in (inside, outside):
        costs = [cells["ms"] for cells in part.values()]
        assert costs == sorted(costs, reverse=True)
    assert sum(cells["share of run"] for cells in table.values()) == pytest.approx(1.0)
    assert sum(cells["ms"] for cells in table.values()) == pytest.approx(seconds * 1e3, abs=20e3 * TICK)


@pytest.mark.usefixtures("ticking")
def test_shares_of_a_step_exclude_events_outside_of_steps(tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, clock := Clock(), SlowOutside(), Slow(), EventTrace(), loggers=[memory]) as trainer:
        trainer.fit()
    inside, outside = parts(rows(memory))
    in_step = {"before_dataloader", "after_dataloader", "batch_start", "batch_end", "batch_checkpoint", "in steps"}
    assert in_step <= {event for _, event in inside}
    outside_events = {"init", "fit_start", "epoch_start", "epoch_end", "eval_batch_end", "fit_end"}
    assert outside_events <= {event for _, event in outside}
    assert sum(cells["share of step"] for cells in inside.values()) == pytest.approx(1.0)
    milliseconds = sum(cells["ms"] for cells in inside.values())
    assert milliseconds == pytest.approx(clock.seconds * 1e3 + inside["slow", "batch_end"]["ms"], abs=12 * 20e3 * TICK)
    assert sum(cells["us per step"] for cells in inside.values()) == pytest.approx(milliseconds * 1e3 / 12)
    assert inside["slow", "batch_end"]["share of step"] > 0.5
    assert outside["everything else", "outside of steps"]["ms"] < 1e3 * SLEEP
    assert outside["slow_outside", "eval_batch_end"]["ms"] == pytest.approx(12e3 * (10 * SLEEP + TICK))


class SlowToStart:
    """A loader that is slow to start an epoch, as if it started workers or opened files."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.batches = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))] * 4

    def seek(self, epoch: int, batch: int) -> None:
        time.sleep(self.seconds)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("slow", ["train", "eval"])
def test_steps_exclude_the_start_of_an_epoch_and_evaluations_within_it(tmp_path: Path, slow: str):
    memory = InMemoryLogger()
    loader = {f"{slow}_dataloader": SlowToStart(20 * SLEEP)}
    with make_trainer(tmp_path, EventTrace(), loggers=[memory], eval_interval="2ba", **loader) as trainer:
        trainer.fit()
    inside, outside = parts(rows(memory))
    assert sum(cells["ms"] for cells in inside.values()) < 1e3 * SLEEP
    assert outside["everything else", "outside of steps"]["ms"] > 3 * 20e3 * SLEEP


@pytest.mark.usefixtures("ticking")
def test_the_timeline_holds_events_in_order_with_ranges_around_them(tmp_path: Path):
    memory, slow = InMemoryLogger(), Slow()
    with make_trainer(tmp_path, EventTrace(), slow, loggers=[memory], grad_accum=2) as trainer:
        trainer.fit()
    path = tmp_path / "event_trace" / "rank0-ba0.json"
    assert memory.artifacts == [(str(path), "event_trace")]
    assert [event["name"] for event in slices(path, "event")] == [*map(str, slow.events)]
    nested = depths(path)
    assert {name for _, name in nested} >= {"nothing", "slow", "in_memory_logger", "train_metrics"}
    for name, depth, count in (
        ("fit", 0, 1),
        ("epoch", 1, 3),
        ("dataloader", 2, 15),  # three of them reach the end of an epoch
        ("batch", 2, 12),
        ("forward", 3, 24),
        ("loss", 3, 24),
        ("backward", 3, 24),
        ("optimizer step", 3, 12),
        ("eval forward", 4, 12),
    ):
        assert [level for level, range_name in nested if range_name == name] == [depth] * count, name
    sleeping = [event for event in slices(path, "callback") if event["name"] == "slow" and event["dur"] >= 1e6 * SLEEP]
    assert len(sleeping) == 12
    ranges = slices(path, "range")
    batches = [event for event in ranges if event["name"] == "batch"]
    for batch, sleep in zip(batches, sleeping, strict=True):
        assert batch["ts"] < sleep["ts"] < batch["ts"] + batch["dur"]
    computation = ("forward", "backward", "optimizer step")
    assert max(event["dur"] for event in ranges if event["name"] in computation) < 1e6 * SLEEP


class OwnStep(ClassificationModel):
    """A model with its own training step, in which AFTER_FORWARD does not happen."""

    def training_step(self, state):
        loss = self.loss(self(state.batch), state.batch)
        (loss * state.loss_scale).backward()
        return loss.detach()

    def metrics(self, train):
        return {}


def test_a_range_without_an_end_is_left_out(tmp_path: Path):
    with make_trainer(tmp_path, EventTrace(), model=OwnStep(nn.Linear(3, 2), 2)) as trainer:
        trainer.fit()
    names = [name for _, name in depths(tmp_path / "event_trace" / "rank0-ba0.json")]
    assert names.count("batch") == names.count("optimizer step") == 12
    assert "forward" not in names


def test_the_timeline_is_bounded_and_the_table_is_not(tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, EventTrace(max_spans=60), loggers=[memory]) as trainer:
        trainer.fit()
    path = tmp_path / "event_trace" / "rank0-ba0.json"
    events = json.loads(path.read_text())["traceEvents"]
    assert 20 < len(events) < 120
    assert "fit" in {name for _, name in depths(path)}  # open ranges are closed at the end
    assert rows(memory)["nothing", "batch_start"]["calls"] == 12


def test_without_event_trace_handlers_are_called_directly(tmp_path: Path):
    with make_trainer(tmp_path, callback := Fails()) as trainer:
        assert callback.batch_end in trainer.engine._table["batch_end"]


def test_errors_and_listeners_name_the_measured_callback(tmp_path: Path):
    memory = InMemoryLogger()
    trainer = make_trainer(tmp_path, Fails(), EventTrace(), loggers=[memory])
    names = [listener.config_key for listener in trainer.engine.listeners("batch_start")]
    assert names == ["nothing", "event_trace"]
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        trainer.fit()
    assert any("raised by 'fails' at BATCH_END" in note for note in caught.value.__notes__)
    assert rows(memory)["fails", "batch_end"]["calls"] == 1
    assert slices(tmp_path / "event_trace" / "rank0-ba0.json", "callback")[-1]["name"] == "fails"


@pytest.mark.usefixtures("ticking")
def test_a_resumed_runs_table_covers_the_whole_run(tmp_path: Path):
    with make_trainer(tmp_path, Slow(), EventTrace(), max_duration="5ba") as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    memory = InMemoryLogger()
    arguments = {"resume_path": tmp_path / "checkpoint", "loggers": [memory]}
    with make_trainer(tmp_path, Slow(), EventTrace(), **arguments) as trainer:
        trainer.fit()
    table = rows(memory)
    assert table["slow", "batch_end"]["calls"] == 12
    assert table["slow", "batch_end"]["ms"] == pytest.approx(12e3 * (SLEEP + TICK))
    assert table["slow", "batch_end"]["us per step"] == table["slow", "batch_end"]["us per call"]
    assert table["slow", "batch_end"]["share of step"] > 0.5
    assert table["everything else", "in steps"]["calls"] == 12
    for share, part in (("share of step", parts(table)[0]), ("share of run", table)):
        assert sum(cells[share] for cells in part.values()) == pytest.approx(1.0)
    assert len(slices(tmp_path / "event_trace" / "rank0-ba0.json", "callback")) > 50
    later = slices(tmp_path / "event_trace" / "rank0-ba5.json", "range")
    assert sum(event["name"] == "batch" for event in later) == 7


def test_two_event_traces_have_separate_files_and_tables(tmp_path: Path):
    memory, other = InMemoryLogger(), EventTrace()
    other.config_key = "second"
    with make_trainer(tmp_path, EventTrace(), other, loggers=[memory]) as trainer:
        trainer.fit()
    paths = [tmp_path / name / "rank0-ba0.json" for name in ("event_trace", "second")]
    assert memory.artifacts == [(str(path), path.parent.name) for path in paths]
    assert [sum(event["name"] == "batch" for event in slices(path, "range")) for path in paths] == [12, 12]
    assert memory.tables.keys() >= {"event_trace", "second"}


def test_a_checkpoint_without_the_rest_outside_of_steps_is_loaded():
    trace = EventTrace()
    trace.load_state_dict({"costs": [["slow", "batch_end", 3, 4000]], "batches": 3, "rest": 6000})
    state = trace.state_dict()
    assert (state["costs"], state["batches"]) == ([["slow", "batch_end", 3, 4000]], 3)
    assert (state["rest"], state["rest_outside"]) == (6000, 0)


@pytest.mark.usefixtures("ticking")
def test_evaluation_and_prediction_alone_are_measured(tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, EventTrace(), loggers=[memory]) as trainer:
        trainer.eval()
        time.sleep(0.2)  # is not measured
        trainer.predict([(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))])
    table = rows(memory)
    assert table["in_memory_logger", "init"]["calls"] == 1
    assert 0 < table["everything else", "outside of steps"]["ms"] < 100e3 * TICK
    assert parts(table)[0] == {}
    names = {event["name"] for event in slices(tmp_path / "event_trace" / "rank0-ba0.json", "range")}
    assert names == {"evaluation", "eval batch", "eval forward", "prediction", "predict batch", "predict forward"}


def test_the_table_is_printed_on_request(tmp_path: Path, capsys):
    with make_trainer(tmp_path, Slow(), EventTrace(print_table=True)) as trainer:
        trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a training step takes \d+\.\d us \(mean of 12 steps\): *", lines[0])
    assert re.split(" {2,}", lines[1].strip())[2:] == ["calls", "us per call", "us per step", "share of step"]
    assert lines[2].split()[:3] == ["slow", "batch_end", "12"]
    assert lines[2].rstrip().endswith("%")
    second = next(index for index, line in enumerate(lines) if line.startswith("everything outside of steps takes "))
    assert "more rows" in lines[second - 1]
    assert re.split(" {2,}", lines[second + 1].strip())[2:] == ["calls", "us per call", "ms", "share of run"]
    second_table = " ".join(" ".join(lines[second:]).split())
    assert "slow batch_end" not in second_table
    assert "everything else outside of steps" in second_table


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, caplog):
    with make_trainer(tmp_path, EventTrace()) as trainer:
        trainer.fit()
        with limited_files(100):
            trainer.close()
    assert [message.startswith("event_trace cannot write (") for message in caplog.messages] == [True]
    assert list((tmp_path / "event_trace").iterdir()) == []


def test_each_rank_writes_a_timeline_and_rank_0_prints_the_table(tmp_path: Path, run_ranks):
    def program() -> None:
        from pathlib import Path

        from tiny_runs import tiny_trainer

        from runner import get_global_rank
        from runner.callbacks import EventTrace, InMemoryLogger

        loggers = [memory := InMemoryLogger()]
        with tiny_trainer(EventTrace(print_table=True), loggers=loggers, run_dir=Path("run")) as trainer:
            trainer.fit()
        assert memory.artifacts == [(f"run/event_trace/rank{get_global_rank()}-ba0.json", "event_trace")]

    first, second = run_ranks(program)
    assert "everything else" in first.stdout
    assert second.stdout == ""
    for rank in (0, 1):
        ranges = slices(tmp_path / "run" / "event_trace" / f"rank{rank}-ba0.json", "range")
        assert sum(event["name"] == "batch" for event in ranges) == 4
        assert {event["pid"] for event in ranges} == {rank}


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_wrong_arguments_are_refused(value: Any):
    with pytest.raises(ValueError, match=f"max_spans={value}"):
        EventTrace(max_spans=value)
