"""When checkpoints are written, synchronously or not, and their contents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from python_process import wait_until
from saver_runs import fit, saved, target

from runner import Algorithm, Callback, LoggerDestination
from runner.algorithms import EMA
from runner.callbacks import CheckpointSaver, ThresholdStopper
from runner.checkpoints.files import read_file
from runner.checkpoints.hashing import digest


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
        """Keeps the batches of all checkpoints that ever existed, by name."""

        def __init__(self):
            self.seen: dict[str, int] = {}

        def close(self, state, logger):
            for path in (state.run_dir / "checkpoints").glob("ep*"):
                self.seen[path.name] = read_file(path, "state.pt")["timestamp"]["batch"]

    batches = Batches()
    fit(tmp_path, CheckpointSaver("1ba", keep=-1), batches, iteration_length="2ep")
    assert sorted(batches.seen.values()) == list(range(1, 17))


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


class Received(LoggerDestination):
    """Keeps the steps whose loss has arrived."""

    def __init__(self):
        self.steps: list[int] = []

    def log_metrics(self, metrics, step):
        if "loss/train/total" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_batches_before_a_checkpoint_are_logged(tmp_path: Path, asynchronous: bool):
    received, late = Received(), []

    class Look(Callback):
        def batch_checkpoint(self, state, logger):
            late.append(state.timestamp.batch - len(received.steps))

    saver = CheckpointSaver(save_interval="2ba", asynchronous=asynchronous)
    fit(tmp_path, saver, Look(), loggers=[received], max_duration="5ep")
    assert late[1:-1:2] == [0] * 9
    assert received.steps == [*range(1, 21)]


def test_weights_only(tmp_path):
    fit(tmp_path, CheckpointSaver(weights_only=True))
    assert not (tmp_path / "checkpoints" / "latest" / "state.pt").exists()
    assert (tmp_path / "checkpoints" / "latest" / "model.pt").exists()


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
        {"filename": "a{batch:c}b"},
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
        from runner.callbacks import CheckpointSaver
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


def test_the_thread_that_writes_computes_on_one_core_and_no_other_does(tmp_path):
    seen: dict[str, int] = {}

    class Notes(CheckpointSaver):
        def _write(self, *arguments, **named):
            seen["writer"] = torch.get_num_threads()
            super()._write(*arguments, **named)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fit(tmp_path, Notes())
        seen["training"] = torch.get_num_threads()
        with ThreadPoolExecutor(1) as later:
            seen["a later thread"] = later.submit(torch.get_num_threads).result()
    finally:
        torch.set_num_threads(before)
    assert seen == {"writer": 1, "training": 3, "a later thread": 3}


@pytest.mark.parametrize("algorithms", [[], [EMA("2ba")]], ids=["trained", "averaged"])
def test_training_and_later_saves_do_not_change_a_pending_write(tmp_path: Path, algorithms: list[Algorithm]):
    class Late(CheckpointSaver):
        """Writes a checkpoint only after the next batch is trained, and waits until training reaches the next save."""

        waiting = False

        def _write(self, snapshot, *rest, **named):
            wait_until(lambda: self.waiting)
            super()._write(snapshot, *rest, **named)

        def _wait(self):
            self.waiting = True
            super()._wait()
            self.waiting = False

    late = Late("1ba", folder="late", keep=-1, asynchronous=True)
    fit(tmp_path, CheckpointSaver("1ba", keep=-1), late, algorithms=algorithms)
    names = saved(tmp_path)
    assert len(names) == 16
    for name in names:
        early_path, late_path = (tmp_path / folder / name for folder in ("checkpoints", "late"))
        assert digest(read_file(early_path, "model.pt")) == digest(read_file(late_path, "model.pt"))
        states = [read_file(path, "state.pt") for path in (early_path, late_path)]
        assert len({digest([state[key] for key in ("optimizers", "algorithms", "model")]) for state in states}) == 1
