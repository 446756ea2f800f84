from __future__ import annotations

import copy
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import CheckpointSaver, InMemoryLogger, ThresholdStopper
from runner import Callback, ClassificationModel, Evaluator, LoggerDestination, Trainer, is_complete
from runner.checkpoint_files import read_file
from runner.data import TensorLoader


class Model(ClassificationModel):
    """A small classifier whose evaluations follow a script, where there is one."""

    def __init__(self, script: tuple[float, ...] = ()):
        linear = nn.Linear(3, 2)
        nn.init.constant_(linear.weight, 0.1)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, 2)
        self.script = list(script)

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return loss * 0 + self.script.pop(0) if self.script and not self.training else loss


def make_trainer(run_dir: Path, saver: CheckpointSaver, *others: Callback, script=(), **arguments: Any) -> Trainer:
    inputs = torch.arange(24.0).view(8, 3) / 24
    data = TensorLoader(inputs, torch.arange(8) % 2, batch_size=2, shuffle=True)
    defaults: dict[str, Any] = {
        "model": Model(script),
        "train_dataloader": data,
        "eval_dataloader": TensorLoader(inputs, torch.arange(8) % 2, batch_size=8, shuffle=False),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "max_duration": "4ep",
        "callbacks": [saver, *others],
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(**(defaults | arguments))


def fit(run_dir: Path, saver: CheckpointSaver, *others: Callback, **arguments: Any) -> Trainer:
    with make_trainer(run_dir, saver, *others, **arguments) as trainer:
        trainer.fit()
    return trainer


def saved(run_dir: Path) -> set[str]:
    """Names in the folder, links left out; all are complete checkpoints."""
    folder = run_dir / "checkpoints"
    names = {path.name for path in folder.iterdir() if not path.is_symlink()}
    assert all(is_complete(folder / name) for name in names)
    return names


def target(run_dir: Path, link: str) -> str:
    return os.readlink(run_dir / "checkpoints" / link)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("interval", "keep", "names"),
    [
        ("1ep", -1, {"ep1-ba4", "ep2-ba8", "ep3-ba12", "ep4-ba16"}),
        ("1ep", 2, {"ep3-ba12", "ep4-ba16"}),
        ("3ba", -1, {"ep0-ba3", "ep1-ba6", "ep2-ba9", "ep2-ba12", "ep3-ba15", "ep4-ba16"}),
        ("4ba", -1, {"ep0-ba4", "ep1-ba8", "ep2-ba12", "ep4-ba16"}),
        ("0.5dur", -1, {"ep2-ba8", "ep4-ba16"}),
        (0, 1, {"ep4-ba16"}),
    ],
)
def test_checkpoints_come_at_the_interval_and_at_the_end(tmp_path, interval, keep: int, names: set, asynchronous: bool):
    fit(tmp_path, CheckpointSaver(interval, keep=keep, asynchronous=asynchronous))
    assert saved(tmp_path) == names
    assert target(tmp_path, "latest") == "ep4-ba16"


def test_a_batch_is_saved_once_however_many_events_it_is_due_at(tmp_path):
    class Batches(Callback):
        """Batches of the checkpoints that were there at some time, by name."""

        def __init__(self):
            self.seen: dict[str, int] = {}

        def close(self, state, logger):
            for path in (state.run_dir / "checkpoints").glob("ep*"):
                self.seen[path.name] = read_file(path, "state.pt")["timestamp"]["batch"]

    batches = Batches()
    fit(tmp_path, CheckpointSaver("1ba", keep=-1), batches, iteration_length="2ep")
    assert sorted(batches.seen.values()) == list(range(1, 17))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_run_that_did_not_stop(tmp_path, asynchronous: bool):
    whole = fit(tmp_path / "whole", CheckpointSaver("3ba", keep=-1, asynchronous=asynchronous))
    for name in ("ep0-ba3", "ep1-ba6"):
        checkpoint = tmp_path / "whole" / "checkpoints" / name
        second = fit(tmp_path / name, CheckpointSaver("3ba", keep=-1), resume_path=checkpoint)
        expected = whole.state.unwrapped_model.state_dict()
        torch.testing.assert_close(dict(second.state.unwrapped_model.state_dict()), dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("script", "mode", "best"),
    [
        ((3, 1, 2, 2), None, ["ep2-ba8"]),
        ((3, 1, 2, 2), "max", ["ep1-ba4"]),
        ((3, 2, 1, 2), "min", ["ep3-ba12"]),
        ((1, 1, 1, 1), "min", ["ep1-ba4"]),
        ((float("nan"), 1, float("nan"), 2), "min", ["ep2-ba8"]),
        ((3, 1, 2, 4), "min", ["ep2-ba8", "ep3-ba12"]),
    ],
)
def test_the_best_are_kept_beside_the_newest(tmp_path, script, mode, best: list[str]):
    fit(tmp_path, CheckpointSaver(keep=1, monitor="loss", mode=mode, keep_best=len(best)), script=script)
    assert saved(tmp_path) == {*best, "ep4-ba16"}
    assert target(tmp_path, "best") == best[0]


def test_a_metric_of_earlier_weights_makes_nothing_the_best(tmp_path):
    # Evaluated at batches 4, 8, 12 and 16, the last before the checkpoint of that batch is written.
    fit(tmp_path, CheckpointSaver("3ba", keep=1, monitor="loss", keep_best=9), script=(1, 1, 9, 10))
    assert saved(tmp_path) == {"ep4-ba16"}
    assert target(tmp_path, "best") == "ep4-ba16"


def test_the_last_checkpoint_has_the_final_metrics(tmp_path):
    trainer = fit(tmp_path, CheckpointSaver("1ba"), eval_interval="100ep")
    state = read_file(tmp_path / "checkpoints" / "latest", "state.pt")
    assert state["timestamp"]["batch"] == 16
    assert state["eval_metric_values"]["eval"]["loss"] == trainer.state.eval_metric_values["eval"]["loss"]


def test_an_epochs_end_that_stops_training_is_in_the_last_checkpoint(tmp_path):
    stopper = ThresholdStopper("loss", 2.0)
    trainer = fit(tmp_path, CheckpointSaver("4ba", monitor="loss"), stopper, script=(3, 1))
    state = read_file(tmp_path / "checkpoints" / "latest", "state.pt")
    assert trainer.state.timestamp.batch == state["timestamp"]["batch"] == 8
    assert state["timestamp"]["epoch"] == 2 and state["eval_metric_values"]["eval"]["loss"] == 1
    assert target(tmp_path, "best") == "ep2-ba8"


def test_two_savers_need_a_folder_each(tmp_path):
    with pytest.raises(ValueError, match="checkpoint_saver and checkpoint_saver_2 both save there"):
        fit(tmp_path, CheckpointSaver(), CheckpointSaver("2ba", folder="./checkpoints"))
    fit(tmp_path, CheckpointSaver(keep=1), CheckpointSaver(folder="best", keep=1, monitor="loss", mode="max"))
    assert saved(tmp_path) == {"ep4-ba16"}
    assert is_complete(tmp_path / "best" / "best") and is_complete(tmp_path / "best" / "latest")


def test_a_resumed_run_keeps_on_pruning_and_knows_the_best(tmp_path):
    with make_trainer(tmp_path, CheckpointSaver(keep=2, monitor="loss"), script=(1, 2)) as first:
        first.fit("2ep")
    assert saved(tmp_path) == {"ep1-ba4", "ep2-ba8"}
    saver = CheckpointSaver(keep=1, monitor="loss")
    fit(tmp_path, saver, script=(4, 3), resume_path=tmp_path)
    assert saved(tmp_path) == {"ep1-ba4", "ep4-ba16"}
    assert target(tmp_path, "best") == "ep1-ba4"
    assert saver.latest == tmp_path / "checkpoints" / "ep4-ba16"


def test_a_resumed_run_replaces_what_it_comes_past_again(tmp_path):
    fit(tmp_path, CheckpointSaver(keep=-1))
    before = (tmp_path / "checkpoints" / "ep3-ba12").stat().st_ino
    fit(tmp_path, CheckpointSaver(keep=-1), resume_path=tmp_path / "checkpoints" / "ep2-ba8")
    assert saved(tmp_path) == {"ep1-ba4", "ep2-ba8", "ep3-ba12", "ep4-ba16"}
    assert (tmp_path / "checkpoints" / "ep3-ba12").stat().st_ino != before


def test_another_runs_checkpoints_are_not_written_over_unasked(tmp_path):
    fit(tmp_path, CheckpointSaver())
    with pytest.raises(FileExistsError, match="overwrite=True"):
        fit(tmp_path, CheckpointSaver())
    fit(tmp_path, CheckpointSaver(overwrite=True))


def test_leftovers_of_a_crash_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / ".ep1-ba4.partial-123").mkdir(parents=True)
    (folder / ".latest.link").symlink_to("nowhere")
    fit(tmp_path, CheckpointSaver())
    assert not list(folder.glob(".*"))


def test_other_hidden_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".env").touch()
    fit(tmp_path, CheckpointSaver(folder="."))
    assert {path.name for path in tmp_path.glob(".*")} == {".git", ".env"}


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
    """A model of which no metric sees a batch before the optimizer steps."""

    def metrics(self, train: bool) -> dict[str, Any]:
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
    """Its batch is not lost: as a rule it is a mistake in a metric, found at the first evaluation."""

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


def test_an_error_at_the_start_of_an_epoch_leaves_none_that_would_start_it_twice(tmp_path):
    class Fails(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 2:
                raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fit(tmp_path, CheckpointSaver("3ep"), Fails())
    assert not (tmp_path / "checkpoints").exists()


def test_weights_only(tmp_path):
    fit(tmp_path, CheckpointSaver(weights_only=True))
    assert not (tmp_path / "checkpoints" / "latest" / "state.pt").exists()
    assert (tmp_path / "checkpoints" / "latest" / "model.pt").exists()


@pytest.mark.parametrize("monitor", ["Accuracy", "test/loss", "MulticlassAccuracy"])
def test_an_unknown_metric_is_an_error_that_lists_those_that_exist(tmp_path, monitor: str):
    inputs = TensorLoader(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), batch_size=2, shuffle=False)
    evaluators = [Evaluator("first", inputs), Evaluator("second", inputs)]
    with pytest.raises(ValueError, match=rf"monitor='{monitor}' .*'first/loss'.*'second/MulticlassAccuracy'"):
        fit(tmp_path, CheckpointSaver(monitor=monitor), eval_dataloader=evaluators)
    fit(tmp_path, CheckpointSaver(monitor="second/MulticlassAccuracy"), eval_dataloader=evaluators)


@pytest.mark.parametrize(
    "arguments",
    [
        {"save_interval": "5"},
        {"folder": "../elsewhere"},
        {"folder": "/elsewhere"},
        {"filename": "ep{epochs}"},
        {"filename": "last"},
        {"filename": "a/{batch}"},
        {"filename": ".{batch}"},
        {"keep": 0},
        {"mode": "less"},
        {"keep_best": 0},
    ],
)
def test_arguments_are_checked(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        CheckpointSaver(**arguments)


def test_ranks_save_together_and_rank_zero_writes(run_ranks, tmp_path):
    program = f"""
        import torch
        from torch import nn
        from callbacks import CheckpointSaver
        from runner import ClassificationModel, Trainer
        from runner.data import TensorLoader

        torch.manual_seed(0)
        data = TensorLoader(torch.randn(10, 3), torch.arange(10) % 2, batch_size=4, shuffle=True)
        with Trainer(
            model=ClassificationModel(nn.Linear(3, 2), 2),
            train_dataloader=data,
            eval_dataloader=data,
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            max_duration="2ep",
            device="cpu",
            callbacks=[CheckpointSaver("2ba", keep=-1, monitor="loss")],
            run_dir={str(tmp_path / "run")!r},
        ) as trainer:
            trainer.fit()
    """
    run_ranks(program)
    assert saved(tmp_path / "run") == {"ep0-ba2", "ep1-ba4", "ep2-ba6"}


@pytest.mark.parametrize(("with_metrics", "expected"), [(False, {"ep0-ba2"}), (True, set())])
def test_a_rank_that_fails_leaves_what_rank_zero_knows_alone(
    run_ranks, tmp_path: Path, with_metrics: bool, expected: set[str]
):
    program = f"""
        import torch
        from torch import nn
        from callbacks import CheckpointSaver
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
    assert [one.returncode for one in ranks] == [1, 1]
    assert "ValueError: of rank 1" in ranks[0].stderr
    assert {path.name for path in tmp_path.glob("run/checkpoints/ep*")} == expected


class Received(LoggerDestination):
    """The steps whose loss has arrived."""

    def __init__(self):
        self.steps: list[int] = []

    def log_metrics(self, metrics, step):
        if "loss/train/total" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_checkpoint_is_past_has_been_logged(tmp_path: Path, asynchronous: bool):
    received, late = Received(), []

    class Look(Callback):
        def batch_checkpoint(self, state, logger):
            late.append(state.timestamp.batch - len(received.steps))

    saver = CheckpointSaver(save_interval="2ba", asynchronous=asynchronous)
    fit(tmp_path, saver, Look(), loggers=[received], max_duration="5ep")
    assert late[1:-1:2] == [0] * 9
    assert received.steps == [*range(1, 21)]
