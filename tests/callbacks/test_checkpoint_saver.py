"""When checkpoints are written, in the background or not, and what they contain."""

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
def test_checkpoints_are_written_at_the_interval_and_at_the_end(
    tmp_path, interval, keep: int, names: set, asynchronous: bool
):
    fit(tmp_path, CheckpointSaver(interval, keep=keep, asynchronous=asynchronous))
    assert saved(tmp_path) == names
    assert target(tmp_path, "latest") == "ep4-ba16"


def test_a_batch_at_the_end_of_an_epoch_and_an_iteration_is_saved_once(tmp_path):
    fit(tmp_path, CheckpointSaver("1ba", keep=-1), iteration_length="2ep")
    batches = [read_file(tmp_path / "checkpoints" / name, "state.pt")["timestamp"]["batch"] for name in saved(tmp_path)]
    assert sorted(batches) == [*range(1, 17)]


def test_the_last_checkpoint_has_the_final_metrics(tmp_path):
    trainer = fit(tmp_path, CheckpointSaver("1ba"), eval_interval="100ep")
    state = read_file(tmp_path / "checkpoints" / "latest", "state.pt")
    assert state["timestamp"]["batch"] == 16
    assert state["eval_metric_values"]["eval"]["loss"] == trainer.state.eval_metric_values["eval"]["loss"]


def test_the_last_checkpoint_includes_the_end_of_an_epoch_that_stops_training(tmp_path):
    stopper = ThresholdStopper("loss", 2.0)
    trainer = fit(tmp_path, CheckpointSaver("4ba", monitor="loss"), stopper, script=(3, 1))
    state = read_file(tmp_path / "checkpoints" / "latest", "state.pt")
    assert trainer.state.timestamp.batch == state["timestamp"]["batch"] == 8
    assert state["timestamp"]["epoch"] == 2 and state["eval_metric_values"]["eval"]["loss"] == 1
    assert target(tmp_path, "best") == "ep2-ba8"


class LossSteps(LoggerDestination):
    """Keeps the steps of the training losses that were logged."""

    def __init__(self):
        self.steps: list[int] = []

    def log_metrics(self, metrics, step):
        if "loss/train/total" in metrics:
            self.steps.append(step)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_batches_up_to_a_checkpoint_are_logged_before_it_is_written(tmp_path: Path, asynchronous: bool):
    logged, missing = LossSteps(), []

    class CountMissing(Callback):
        def batch_checkpoint(self, state, logger):
            missing.append(state.timestamp.batch - len(logged.steps))

    saver = CheckpointSaver(save_interval="2ba", asynchronous=asynchronous)
    fit(tmp_path, saver, CountMissing(), loggers=[logged])
    assert missing[1:-1:2] == [0] * 7
    assert logged.steps == [*range(1, 17)]


def test_weights_only_checkpoints_have_no_training_state(tmp_path):
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
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        CheckpointSaver(**arguments)


def test_ranks_save_together_and_rank_zero_writes(run_ranks, tmp_path):
    def program():
        from pathlib import Path

        from tiny_runs import make_data, make_trainer

        from runner.callbacks import CheckpointSaver

        saver, data = CheckpointSaver("2ba", keep=-1, monitor="loss"), make_data(5)
        arguments = {"train_dataloader": data, "eval_dataloader": data, "max_duration": "2ep"}
        with make_trainer(Path("run"), saver, **arguments) as trainer:
            trainer.fit()

    run_ranks(program)
    assert saved(tmp_path / "run") == {"ep0-ba2", "ep1-ba4", "ep2-ba6"}


def test_only_the_thread_that_writes_is_limited_to_one_core(tmp_path):
    cores: dict[str, int] = {}

    class CountCores(CheckpointSaver):
        def _write(self, *arguments, **named):
            cores["writer"] = torch.get_num_threads()
            super()._write(*arguments, **named)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fit(tmp_path, CountCores())
        cores["training"] = torch.get_num_threads()
        with ThreadPoolExecutor(1) as executor:
            cores["a later thread"] = executor.submit(torch.get_num_threads).result()
    finally:
        torch.set_num_threads(before)
    assert cores == {"writer": 1, "training": 3, "a later thread": 3}


@pytest.mark.parametrize("algorithms", [[], [EMA("2ba")]], ids=["trained", "averaged"])
def test_training_and_later_saves_do_not_change_a_pending_write(tmp_path: Path, algorithms: list[Algorithm]):
    class DelayedSaver(CheckpointSaver):
        """Begins to write a checkpoint only when training has reached the next save."""

        waiting = False

        def _write(self, snapshot, *rest, **named):
            wait_until(lambda: self.waiting)
            super()._write(snapshot, *rest, **named)

        def _wait(self):
            self.waiting = True
            super()._wait()
            self.waiting = False

    delayed = DelayedSaver("1ba", folder="delayed", keep=-1, asynchronous=True)
    fit(tmp_path, CheckpointSaver("1ba", keep=-1), delayed, algorithms=algorithms, max_duration="2ep")
    names = saved(tmp_path)
    assert len(names) == 8
    for name in names:
        paths = [tmp_path / folder / name for folder in ("checkpoints", "delayed")]
        assert len({digest(read_file(path, "model.pt")) for path in paths}) == 1
        states = [read_file(path, "state.pt") for path in paths]
        assert len({digest([state[key] for key in ("optimizers", "algorithms", "model")]) for state in states}) == 1
