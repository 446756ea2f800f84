"""Unwritable folders, signals, errors and failing ranks: the checkpoints left, and runs resumed from them."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import PATIENCE, wait_until
from saver_runs import Model, fit, make_trainer, saved, target
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from runner import Algorithm, Callback, is_complete
from runner.callbacks import CheckpointSaver, InMemoryLogger


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_cannot_be_written_is_a_warning_until_it_can(tmp_path, caplog, asynchronous: bool):
    class Repair(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 3:
                (tmp_path / "checkpoints").unlink()

    (tmp_path / "checkpoints").touch()  # a file where the folder is to be; permissions do not stop root
    with caplog.at_level(logging.WARNING, "runner"):
        fit(tmp_path, CheckpointSaver(asynchronous=asynchronous, keep=-1), Repair())
    (record,) = caplog.records
    assert "checkpoints/ep1-ba4 was not written" in record.getMessage()
    assert saved(tmp_path) - {"ep3-ba12"} == {"ep4-ba16"}  # the third may still be waiting to be written when it can


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(tmp_path, asynchronous: bool):
    (tmp_path / "checkpoints").touch()
    with (
        pytest.raises(OSError, match="the run's last checkpoint was not written: make room") as failure,
        make_trainer(tmp_path, CheckpointSaver(0, asynchronous=asynchronous)) as trainer,
    ):
        trainer.fit()
    assert isinstance(failure.value.__cause__, FileExistsError | NotADirectoryError)
    assert trainer.state.timestamp.epoch == 4


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_a_checkpoint_of_its_batch(tmp_path, number: int, error: type):
    class Signal(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == 5:
                os.kill(os.getpid(), number)

    with pytest.raises(error):
        fit(tmp_path, CheckpointSaver(), Signal())
    assert saved(tmp_path) == {"ep1-ba4", "ep1-ba6"}
    assert target(tmp_path, "latest") == "ep1-ba6"
    resumed = fit(tmp_path, CheckpointSaver(), resume_path=tmp_path)
    whole = fit(tmp_path / "whole", CheckpointSaver())
    for own, expected in zip(resumed.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert torch.equal(own, expected)


class WithoutMetrics(Model):
    """A model whose metrics see no batch before the optimizer steps."""

    def metrics(self, train: bool) -> Mapping[str, Any]:
        return {} if train else super().metrics(train)


class FailsAt(Callback):
    """Raises at an event of the batch after the fifth."""

    def __init__(self, event: str, error: BaseException):
        self.event, self.error = event, error

    def run_event(self, event, state, logger):
        if event == self.event and state.timestamp.batch == 5:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("broken data"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("event", "model"),
    [
        ("before_dataloader", Model()),
        ("after_dataloader", Model()),
        ("before_forward", Model()),
        ("after_forward", Model()),
        ("after_backward", WithoutMetrics()),
        ("after_train_batch", WithoutMetrics()),
        ("batch_checkpoint", Model()),
    ],
)
def test_an_error_leaves_a_checkpoint_of_the_batch_before(tmp_path, event: str, model: Model, error: BaseException):
    with pytest.raises(type(error)):
        fit(tmp_path, CheckpointSaver(), FailsAt(event, error), model=copy.deepcopy(model))
    assert saved(tmp_path) == {"ep1-ba4", "ep1-ba5"}
    assert target(tmp_path, "latest") == "ep1-ba5"
    resumed = fit(tmp_path, CheckpointSaver(), model=copy.deepcopy(model), resume_path=tmp_path)
    whole = fit(tmp_path / "whole", CheckpointSaver(), model=copy.deepcopy(model))
    for own, expected in zip(resumed.state.model.parameters(), whole.state.model.parameters(), strict=True):
        assert torch.equal(own, expected)
    assert resumed.state.metric_values == whole.state.metric_values


def with_batch_norm() -> Model:
    model = WithoutMetrics()
    model.module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model


@pytest.mark.parametrize(
    ("event", "model"),
    [
        ("after_forward", with_batch_norm()),  # its statistics have seen the batch
        ("after_backward", Model()),  # its metrics have
        ("batch_end", WithoutMetrics()),  # the optimizer has stepped, and hooks have not all been told
        ("eval_end", WithoutMetrics()),
    ],
)
def test_an_error_when_weights_or_metrics_are_of_no_batch_leaves_none(tmp_path, event: str, model: Model):
    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver(), FailsAt(event, ValueError("inside")), model=model, eval_interval="5ba")
    assert saved(tmp_path) == {"ep1-ba4"}


@pytest.mark.parametrize("interval", ["5ba", "1ep"])
def test_an_evaluation_that_failed_is_done_again(tmp_path, interval: str):
    """The last batch is not lost; the usual cause is a mistake in a metric, found at the first evaluation."""

    class Fails(Callback):
        def eval_batch_end(self, state, logger):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("9ep"), Fails(), model=Model(), eval_interval=interval)
    (left,) = saved(tmp_path)
    memory, expected = InMemoryLogger(), InMemoryLogger()
    resumed = fit(tmp_path, CheckpointSaver("9ep"), memory, model=Model(), eval_interval=interval, resume_path=tmp_path)
    whole = fit(tmp_path / "whole", CheckpointSaver("9ep"), expected, model=Model(), eval_interval=interval)
    assert resumed.state.metric_values == whole.state.metric_values
    batch = int(left.partition("-ba")[2])
    for key, points in expected.data.items():
        if key.startswith(("metrics/eval", "loss/eval")):
            assert [(now.batch, value) for now, value in memory.data[key]] == [
                (now.batch, value) for now, value in points if now.batch >= batch
            ]


class Ends(Callback):
    """Counts EPOCH_END events, and fails at the first one if asked to."""

    def __init__(self, key: str, fails: bool = False):
        self.config_key, self.fails, self.heard = key, fails, 0

    def epoch_end(self, state, logger):
        if self.fails:
            raise ValueError("inside")
        self.heard += 1

    def state_dict(self):
        return {"heard": self.heard}

    def load_state_dict(self, state):
        self.heard = state["heard"]


class BrokenMetric(MulticlassAccuracy):
    """A metric that fails when it is computed."""

    fails = True

    def compute(self):
        if BrokenMetric.fails:
            raise ValueError("inside")
        return super().compute()


class Measured(Model):
    def metrics(self, train: bool) -> dict[str, Any]:
        return {"accuracy": BrokenMetric(2)} if train else {}


@pytest.mark.parametrize("who", ["a callback", "training's own metrics"])
def test_a_failure_at_an_epoch_s_end_leaves_its_last_batch_and_is_made_up_for(tmp_path, monkeypatch, who: str):
    """Callbacks that handled the event handle it once; the others handle it when the run resumes."""

    def hooks(fails: bool) -> list[Any]:
        monkeypatch.setattr(BrokenMetric, "fails", fails and who != "a callback")
        return [
            Ends("a"),
            Ends("b", fails and who == "a callback"),
            Ends("c"),
            CheckpointSaver("9ep"),
            InMemoryLogger(),
        ]

    with pytest.raises(ValueError, match="inside") as raised:
        fit(tmp_path, *hooks(True), model=Measured())
    assert saved(tmp_path) == {"ep1-ba4"}
    assert raised.value.__notes__[0].endswith("at EPOCH_END, after epoch 1 (4 batches)")
    resumed, whole = hooks(False), hooks(False)
    resumed_state = fit(tmp_path, *resumed, model=Measured(), resume_path=tmp_path).state
    other = fit(tmp_path / "whole", *whole, model=Measured()).state
    for own, expected in zip(resumed_state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(own, expected)
    assert resumed_state.metric_values == other.metric_values and resumed_state.unfinished_hooks == {}
    assert [hook.heard for hook in resumed[:3]] == [hook.heard for hook in whole[:3]] == [4, 4, 4]
    logged = [
        [(now.batch, value) for now, value in memory.data["metrics/train/accuracy"]]
        for memory in (resumed[-1], whole[-1])
    ]
    assert logged[0] == logged[1][-len(logged[0]) :] and len(logged[0]) == (3 if who == "a callback" else 4)


def test_an_algorithm_that_fails_at_an_epoch_s_end_leaves_none(tmp_path):
    class Fails(Algorithm):
        def epoch_end(self, state, logger):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("9ep"), algorithms=[Fails()])
    assert not (tmp_path / "checkpoints").exists()


def test_an_error_at_the_start_of_an_epoch_leaves_none_that_would_start_it_twice(tmp_path):
    class Fails(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 2:
                raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("3ep"), Fails())
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("with_metrics", "expected"), [(False, {"ep0-ba2"}), (True, set())])
def test_a_rank_that_fails_leaves_what_rank_zero_knows_alone(
    run_ranks, tmp_path: Path, with_metrics: bool, expected: set[str]
):
    program = f"""
        import torch
        from torch import nn
        from runner.callbacks import CheckpointSaver
        from runner import Callback, ClassificationModel, Trainer, get_global_rank
        from runner.data import TensorLoader

        class Model(ClassificationModel):
            def metrics(self, train):
                return super().metrics(train) if {with_metrics} else {{}}

        class Fails(Callback):
            def before_forward(self, state, logger):
                if get_global_rank() == 1 and state.timestamp.batch == 2:
                    raise ValueError("of rank 1")

        torch.manual_seed(0)
        with Trainer(
            model=Model(nn.Linear(3, 2), 2),
            train_dataloader=TensorLoader(torch.randn(16, 3), torch.arange(16) % 2, batch_size=4, shuffle=True),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            device="cpu",
            callbacks=[CheckpointSaver(), Fails()],
            run_dir={str(tmp_path / "run")!r},
        ) as trainer:
            trainer.fit()
    """
    ranks = run_ranks(program, check=False)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "ValueError: of rank 1" in ranks[0].stderr
    assert {path.name for path in tmp_path.glob("run/checkpoints/ep*")} == expected


def test_close_waits_for_the_write_in_flight_also_when_it_is_interrupted(tmp_path):
    closing = threading.Event()

    class Slow(CheckpointSaver):
        waits = waits_at_start = 0

        def _wait(self):
            self.waits += 1
            super()._wait()

        def _save(self, state, logger):
            super()._save(state, logger)
            self.waits_at_start = self.waits

        def _write(self, snapshot, name, *rest, **named):
            if name == "ep1-ba4":
                closing.wait(PATIENCE)
                before = self.waits_at_start
                wait_until(lambda: self.waits == before + 1)  # for this very write
                handler, main = signal.getsignal(signal.SIGINT), threading.main_thread().ident
                assert main is not None
                # The second signal interrupts the wait. A signal just before the wait is handled with the next one.
                while self.waits < before + 2 and signal.getsignal(signal.SIGINT) == handler:
                    signal.pthread_kill(main, signal.SIGINT)
                    time.sleep(0.5)
            super()._write(snapshot, name, *rest, **named)

    class Fails(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == 5:
                raise ValueError("a failure in training")

        def close(self, state, logger):
            closing.set()

    saver = Slow(asynchronous=True)
    with pytest.raises(ValueError, match="a failure in training") as failure:
        fit(tmp_path, saver, callbacks=[Fails(), saver])
    assert is_complete(tmp_path / "checkpoints" / "ep1-ba4")
    assert any("slow.close raised KeyboardInterrupt" in note for note in failure.value.__notes__)
