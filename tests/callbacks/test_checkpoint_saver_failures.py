"""The checkpoints that unwritable folders, signals, errors and failing ranks leave, and runs resumed from them."""

from __future__ import annotations

import copy
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from python_process import PATIENCE, wait_until
from saver_runs import Model, SendSignal, WithoutTrainMetrics, assert_equal_weights, fit, make_trainer, saved, target
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from runner import Algorithm, Callback, is_complete
from runner.callbacks import CheckpointSaver, InMemoryLogger


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unwritable_folder_gives_one_warning_and_is_tried_again(tmp_path, caplog, asynchronous: bool):
    class Repair(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 3:
                (tmp_path / "checkpoints").unlink()

    (tmp_path / "checkpoints").touch()  # a file in place of the folder, because root ignores permissions
    with caplog.at_level(logging.WARNING, "runner"):
        fit(tmp_path, CheckpointSaver(asynchronous=asynchronous, keep=-1), Repair())
    (record,) = caplog.records
    assert "checkpoints/ep1-ba4 was not written" in record.getMessage()
    assert saved(tmp_path) - {"ep3-ba12"} == {"ep4-ba16"}  # the third may be written after the repair


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_fails_if_its_last_checkpoint_cannot_be_written(tmp_path, asynchronous: bool):
    (tmp_path / "checkpoints").touch()
    with (
        pytest.raises(OSError, match="the run's last checkpoint was not written: make room") as failure,
        make_trainer(tmp_path, CheckpointSaver(0, asynchronous=asynchronous)) as trainer,
    ):
        trainer.fit()
    assert isinstance(failure.value.__cause__, FileExistsError | NotADirectoryError)
    assert trainer.state.timestamp.epoch == 4


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_saves_the_current_batch(tmp_path, number: int, error: type):
    with pytest.raises(error):
        fit(tmp_path, CheckpointSaver(), SendSignal(5, number))
    assert saved(tmp_path) == {"ep1-ba4", "ep1-ba6"}
    assert target(tmp_path, "latest") == "ep1-ba6"
    resumed = fit(tmp_path, CheckpointSaver(), resume_path=tmp_path)
    assert_equal_weights(resumed, fit(tmp_path / "whole", CheckpointSaver()))


class FailsAt(Callback):
    """Raises an error at an event when five batches have been trained."""

    def __init__(self, event: str, error: BaseException):
        self.event, self.error = event, error

    def run_event(self, event, state, logger):
        if event == self.event and state.timestamp.batch == 5:
            raise self.error


@pytest.mark.parametrize(
    ("event", "model", "error"),
    [
        ("before_dataloader", Model(), ValueError("broken data")),
        ("after_dataloader", Model(), ValueError("broken data")),
        ("before_forward", Model(), ValueError("broken data")),
        ("before_forward", Model(), SystemExit(3)),
        ("before_forward", Model(), KeyboardInterrupt()),
        ("after_forward", Model(), ValueError("broken data")),
        ("after_backward", WithoutTrainMetrics(), ValueError("broken data")),
        ("after_train_batch", WithoutTrainMetrics(), ValueError("broken data")),
        ("batch_checkpoint", Model(), ValueError("broken data")),
    ],
)
def test_an_error_saves_the_last_batch_that_was_trained(tmp_path, event: str, model: Model, error: BaseException):
    with pytest.raises(type(error)):
        fit(tmp_path, CheckpointSaver(), FailsAt(event, error), model=copy.deepcopy(model))
    assert saved(tmp_path) == {"ep1-ba4", "ep1-ba5"}
    assert target(tmp_path, "latest") == "ep1-ba5"
    resumed = fit(tmp_path, CheckpointSaver(), model=copy.deepcopy(model), resume_path=tmp_path)
    whole = fit(tmp_path / "whole", CheckpointSaver(), model=copy.deepcopy(model))
    assert_equal_weights(resumed, whole)
    assert resumed.state.metric_values == whole.state.metric_values


def with_batch_norm() -> Model:
    model = WithoutTrainMetrics()
    model.module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model


@pytest.mark.parametrize(
    ("event", "model"),
    [
        ("after_forward", with_batch_norm()),  # running statistics include the batch
        ("after_backward", Model()),  # metrics include the batch
        ("batch_end", WithoutTrainMetrics()),  # the optimizer has stepped, and some hooks have not run
        ("eval_end", WithoutTrainMetrics()),
    ],
)
def test_an_error_saves_nothing_if_only_part_of_the_state_is_updated(tmp_path, event: str, model: Model):
    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver(), FailsAt(event, ValueError("inside")), model=model, eval_interval="5ba")
    assert saved(tmp_path) == {"ep1-ba4"}


@pytest.mark.parametrize("interval", ["5ba", "1ep"])
def test_a_resumed_run_repeats_an_evaluation_that_failed(tmp_path, interval: str):
    """The last batch is saved. A usual cause is a mistake in a metric, which shows at the first evaluation."""

    class Fails(Callback):
        def eval_batch_end(self, state, logger):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("9ep"), Fails(), eval_interval=interval)
    (name,) = saved(tmp_path)
    memory, expected = InMemoryLogger(), InMemoryLogger()
    resumed = fit(tmp_path, CheckpointSaver("9ep"), memory, eval_interval=interval, resume_path=tmp_path)
    whole = fit(tmp_path / "whole", CheckpointSaver("9ep"), expected, eval_interval=interval)
    assert resumed.state.metric_values == whole.state.metric_values
    batch = int(name.partition("-ba")[2])
    for key in expected.data:
        if key.startswith(("metrics/eval", "loss/eval")):
            points = zip(*expected.get_timeseries(key), strict=True)
            assert [*zip(*memory.get_timeseries(key), strict=True)] == [point for point in points if point[0] >= batch]


class CountEpochs(Callback):
    """Counts EPOCH_END events, or fails at the first."""

    def __init__(self, key: str, fails: bool = False):
        self.config_key, self.fails, self.epochs = key, fails, 0

    def epoch_end(self, state, logger):
        if self.fails:
            raise ValueError("inside")
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class BrokenMetric(MulticlassAccuracy):
    """An accuracy whose computation fails while `fails` is True."""

    fails = True

    def compute(self):
        if BrokenMetric.fails:
            raise ValueError("inside")
        return super().compute()


class WithBrokenMetric(Model):
    def metrics(self, train: bool) -> dict[str, Any]:
        return {"accuracy": BrokenMetric(2)} if train else {}


@pytest.mark.parametrize("source", ["callback", "metric"])
def test_a_resumed_run_completes_the_end_of_an_epoch_that_failed(tmp_path, monkeypatch, source: str):
    """Each callback handles EPOCH_END once: before the failure, or when the run resumes."""

    def hooks(fails: bool) -> list[Any]:
        monkeypatch.setattr(BrokenMetric, "fails", fails and source == "metric")
        counters = [CountEpochs("a"), CountEpochs("b", fails and source == "callback"), CountEpochs("c")]
        return [*counters, CheckpointSaver("9ep"), InMemoryLogger()]

    with pytest.raises(ValueError, match="inside") as raised:
        fit(tmp_path, *hooks(True), model=WithBrokenMetric())
    assert saved(tmp_path) == {"ep1-ba4"}
    assert raised.value.__notes__[0].endswith("at EPOCH_END, after epoch 1 (4 batches)")
    resumed, whole = hooks(False), hooks(False)
    resumed_run = fit(tmp_path, *resumed, model=WithBrokenMetric(), resume_path=tmp_path)
    whole_run = fit(tmp_path / "whole", *whole, model=WithBrokenMetric())
    assert_equal_weights(resumed_run, whole_run)
    assert resumed_run.state.metric_values == whole_run.state.metric_values
    assert resumed_run.state.unfinished_hooks == {}
    assert [hook.epochs for hook in resumed[:3]] == [hook.epochs for hook in whole[:3]] == [4, 4, 4]
    epochs = 3 if source == "callback" else 4  # the metric was logged before the callback failed
    series, expected = (hooks[-1].get_timeseries("metrics/train/accuracy") for hooks in (resumed, whole))
    assert series == tuple(values[-epochs:] for values in expected)


def test_an_algorithm_that_fails_at_the_end_of_an_epoch_leaves_no_checkpoint(tmp_path):
    class Fails(Algorithm):
        def epoch_end(self, state, logger):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("9ep"), algorithms=[Fails()])
    assert not (tmp_path / "checkpoints").exists()


def test_an_error_at_the_start_of_an_epoch_leaves_no_checkpoint(tmp_path):
    """A run resumed from such a checkpoint would start the epoch twice."""

    class Fails(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 2:
                raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("3ep"), Fails())
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("with_metrics", "expected"), [(False, {"ep0-ba2"}), (True, set())])
def test_when_another_rank_fails_rank_zero_saves_unless_metrics_need_all_ranks(
    run_ranks, tmp_path: Path, with_metrics: bool, expected: set[str]
):
    program = f"""
        from pathlib import Path

        from tiny_runs import make_trainer
        from torch import nn

        from runner import Callback, ClassificationModel, get_global_rank
        from runner.callbacks import CheckpointSaver

        class Model(ClassificationModel):
            def metrics(self, train):
                return super().metrics(train) if {with_metrics} else {{}}

        class Fails(Callback):
            def before_forward(self, state, logger):
                if get_global_rank() == 1 and state.timestamp.batch == 2:
                    raise ValueError("of rank 1")

        with make_trainer(Path("run"), CheckpointSaver(), Fails(), model=Model(nn.Linear(3, 2), 2)) as trainer:
            trainer.fit()
    """
    ranks = run_ranks(program, check=False)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "ValueError: of rank 1" in ranks[0].stderr
    assert {path.name for path in tmp_path.glob("run/checkpoints/ep*")} == expected


def test_close_waits_for_the_pending_write_even_if_it_is_interrupted(tmp_path):
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
                wait_until(lambda: self.waits == before + 1)  # `close` waits for this write
                handler, main = signal.getsignal(signal.SIGINT), threading.main_thread().ident
                assert main is not None
                # Interrupt the wait. A signal that comes just before the wait is handled only with the next one.
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
