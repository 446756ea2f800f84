from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import EventTrace, InMemoryLogger
from runner import Algorithm, Callback, ClassificationModel, Event, Trainer, save_checkpoint
from runner.data import TensorLoader

SLEEP = 0.005  # seconds


class Slow(Callback):
    """Sleeps at each batch, and writes down what it sees."""

    def __init__(self):
        self.heard: list[Event] = []

    def run_event(self, event, state, logger):
        self.heard.append(event)
        if event is Event.BATCH_END:
            time.sleep(SLEEP)


class Nothing(Algorithm):
    @torch.no_grad()  # a decorator leaves a __wrapped__ behind
    def batch_start(self, state, logger):
        pass


class Fails(Callback):
    def batch_end(self, state, logger):
        raise RuntimeError("on purpose")


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    data = TensorLoader(torch.ones(8, 3), torch.zeros(8, dtype=torch.long), batch_size=2, shuffle=False)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Linear(3, 2), 2),
        "train_dataloader": data,
        "eval_dataloader": data,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "3ep",
        "algorithms": [Nothing()],
        "callbacks": list(callbacks),
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(**(defaults | arguments))


def rows(memory: InMemoryLogger) -> dict[tuple[str, str], dict[str, float]]:
    """The logged table by callback and event."""
    table = memory.tables["event_trace"]
    return {(row[0], row[1]): dict(zip(table["columns"][2:], row[2:], strict=True)) for row in table["rows"]}


def slices(path: Path, category: str) -> list[dict[str, Any]]:
    """Those of one category by the time at which they begin."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted((one for one in events if one.get("cat") == category), key=lambda one: one["ts"])


def depths(path: Path) -> list[tuple[int, str]]:
    """Every slice with the number of slices that enclose it, as a viewer of such files nests them."""
    found, open_ends = [], []
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):  # a stable sort
        while open_ends and open_ends[-1] <= one["ts"] + 1e-3:
            open_ends.pop()
        end = one["ts"] + one["dur"]
        assert not open_ends or end <= open_ends[-1] + 1e-3, f"{one} crosses the end of another slice"
        found.append((len(open_ends), one["name"]))
        open_ends.append(end)
    return found


def test_the_table_says_what_a_callback_costs(tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, Slow(), EventTrace(), loggers=[memory]) as trainer:
        began = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - began
    found = rows(memory)
    slow = found["slow", "batch_end"]
    assert slow["calls"] == 12
    assert 12e3 * SLEEP <= slow["ms"] < 24e3 * SLEEP
    assert slow["us per call"] == slow["us per batch"] == pytest.approx(slow["ms"] * 1e3 / 12)
    assert found["slow", "eval_batch_end"]["calls"] == 12
    assert found["slow", "eval_batch_end"]["us per batch"] < 1e6 * SLEEP / 10
    assert {event for owner, event in found if owner == "nothing"} == {"batch_start"}
    costs = [one["ms"] for one in found.values()]
    assert costs == sorted(costs, reverse=True)
    assert sum(one["share"] for one in found.values()) == pytest.approx(1.0)
    assert sum(costs) == pytest.approx(seconds * 1e3, rel=0.05)  # handlers and the rest make up the whole


def test_the_timeline_holds_events_in_order_with_ranges_around_them(tmp_path: Path):
    memory, slow = InMemoryLogger(), Slow()
    with make_trainer(tmp_path, EventTrace(), slow, loggers=[memory], grad_accum=2) as trainer:
        trainer.fit()
    path = tmp_path / "event_trace" / "rank0-ba0.json"
    assert memory.artifacts == [(str(path), "event_trace")]
    assert [one["name"] for one in slices(path, "event")] == [*map(str, slow.heard)]
    nested = depths(path)
    assert {name for _, name in nested} >= {"nothing", "slow", "in_memory_logger", "train_metrics"}
    for name, depth, count in (
        ("fit", 0, 1),
        ("epoch", 1, 3),
        ("dataloader", 2, 15),  # three find the end of an epoch
        ("batch", 2, 12),
        ("forward", 3, 24),
        ("loss", 3, 24),
        ("backward", 3, 24),
        ("optimizer step", 3, 12),
        ("eval forward", 4, 12),
    ):
        assert [level for level, one in nested if one == name] == [depth] * count, name
    sleeping = [one for one in slices(path, "callback") if one["name"] == "slow" and one["dur"] >= 1e6 * SLEEP]
    assert len(sleeping) == 12
    steps, batches = slices(path, "range"), [one for one in slices(path, "range") if one["name"] == "batch"]
    assert all(one["ts"] < sleep["ts"] < one["ts"] + one["dur"] for one, sleep in zip(batches, sleeping, strict=True))
    short = sorted(one["dur"] for one in steps if one["name"] in ("forward", "backward", "optimizer step"))
    assert short[len(short) // 2] < 1e6 * SLEEP  # the median: on a busy machine any one of them may be held up


class OwnStep(ClassificationModel):
    """Does forward, loss and backward itself: AFTER_FORWARD never comes."""

    def training_step(self, state):
        loss = self.loss(self(state.batch), state.batch)
        (loss * state.loss_scale).backward()
        return loss.detach()

    def metrics(self, train):
        return {}


def test_a_range_whose_end_never_comes_is_left_out(tmp_path: Path):
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
    assert "fit" in {name for _, name in depths(path)}  # what is open at the end is closed there
    assert rows(memory)["nothing", "batch_start"]["calls"] == 12


def test_a_run_without_it_calls_the_handlers_themselves(tmp_path: Path):
    with make_trainer(tmp_path, slow := Fails()) as trainer:
        assert slow.batch_end in trainer.engine._table["batch_end"]


def test_errors_and_listeners_name_who_is_measured(tmp_path: Path):
    memory = InMemoryLogger()
    trainer = make_trainer(tmp_path, Fails(), EventTrace(), loggers=[memory])
    names = [one.config_key for one in trainer.engine.listeners("batch_start")]
    assert names == ["nothing", "event_trace"]
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        trainer.fit()
    assert any("raised by 'fails' at BATCH_END" in note for note in caught.value.__notes__)
    assert rows(memory)["fails", "batch_end"]["calls"] == 1
    assert slices(tmp_path / "event_trace" / "rank0-ba0.json", "callback")[-1]["name"] == "fails"


def test_a_resumed_runs_table_covers_the_whole_run(tmp_path: Path):
    with make_trainer(tmp_path, Slow(), EventTrace(), max_duration="5ba") as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    memory = InMemoryLogger()
    arguments = {"resume_path": tmp_path / "checkpoint", "loggers": [memory]}
    with make_trainer(tmp_path, Slow(), EventTrace(), **arguments) as trainer:
        trainer.fit()
    found = rows(memory)
    assert found["slow", "batch_end"]["calls"] == 12
    assert 12e3 * SLEEP <= found["slow", "batch_end"]["ms"] < 24e3 * SLEEP
    assert found["slow", "batch_end"]["us per batch"] == found["slow", "batch_end"]["us per call"]
    assert sum(one["share"] for one in found.values()) == pytest.approx(1.0)
    assert len(slices(tmp_path / "event_trace" / "rank0-ba0.json", "callback")) > 50
    later = slices(tmp_path / "event_trace" / "rank0-ba5.json", "range")
    assert sum(one["name"] == "batch" for one in later) == 7


def test_evaluation_and_prediction_alone_are_measured(tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, EventTrace(), loggers=[memory]) as trainer:
        trainer.eval()
        time.sleep(0.2)  # is nobody's time
        trainer.predict([(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))])
    found = rows(memory)
    assert found["in_memory_logger", "init"]["calls"] == 1
    assert 0 < found["everything else", ""]["ms"] < 150
    names = {one["name"] for one in slices(tmp_path / "event_trace" / "rank0-ba0.json", "range")}
    assert names == {"evaluation", "eval batch", "eval forward", "prediction", "predict batch", "predict forward"}


def test_the_table_is_printed_on_request(tmp_path: Path, capsys):
    with make_trainer(tmp_path, Slow(), EventTrace(print_table=True)) as trainer:
        trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["callback", "event", "calls"]
    assert lines[1].split()[:3] == ["slow", "batch_end", "12"]
    assert lines[1].rstrip().endswith("%")
    assert "more with" in lines[21]


def program() -> None:
    from pathlib import Path

    import torch

    from callbacks import EventTrace, InMemoryLogger
    from runner import ClassificationModel, Trainer, get_global_rank
    from runner.data import TensorLoader

    data = TensorLoader(torch.ones(8, 3), torch.zeros(8, dtype=torch.long), batch_size=2, shuffle=False)
    with Trainer(
        model=ClassificationModel(torch.nn.Linear(3, 2), 2),
        train_dataloader=data,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        callbacks=[EventTrace(print_table=True)],
        loggers=[memory := InMemoryLogger()],
        run_dir=Path("run"),
        device="cpu",
    ) as trainer:
        trainer.fit()
    assert memory.artifacts == [(f"run/event_trace/rank{get_global_rank()}-ba0.json", "event_trace")]


def test_a_disk_that_refuses_is_reported(tmp_path: Path, caplog):
    (tmp_path / "event_trace").touch()  # where its folder should be
    memory = InMemoryLogger()
    with make_trainer(tmp_path, EventTrace(), loggers=[memory]) as trainer:
        trainer.fit()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("event_trace cannot write (")
    assert memory.artifacts == []
    assert rows(memory)


def test_each_rank_has_its_timeline_and_rank_0_prints(tmp_path: Path, run_ranks):
    first, second = run_ranks(program)
    assert "everything else" in first.stdout
    assert second.stdout == ""
    for rank in (0, 1):
        found = slices(tmp_path / "run" / "event_trace" / f"rank{rank}-ba0.json", "range")
        assert sum(one["name"] == "batch" for one in found) == 4
        assert {one["pid"] for one in found} == {rank}


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_arguments_are_checked(value: Any):
    with pytest.raises(ValueError, match=f"max_spans={value}"):
        EventTrace(max_spans=value)
