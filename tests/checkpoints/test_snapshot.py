"""A resumed run equals an uninterrupted one bit for bit; checkpoints that do not fit the run are refused."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from rank_runs import program_of
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Trainer, capture, evaluation_weights, save_checkpoint
from runner.algorithms import EMA, BatchAugment, GradientClipping, MixUp
from runner.callbacks import InMemoryLogger
from runner.checkpoints.copies import Copies
from runner.checkpoints.files import read_file
from runner.data import TensorLoader
from runner.optim.schedulers import cosine_annealing

BATCHES = 10  # in two epochs
ALL = (*(f"ba{batch}" for batch in range(1, BATCHES + 1)), "ep1")
"""Checkpoints after each batch, and after the first epoch."""
FEW = ("ba2", "ba3", "ba5", "ep1", "ba7", "ba10")
"""Checkpoints around the third batch and the end of the first epoch, within the second epoch, and at the end."""


def make_net(*more: nn.Module, width: int = 6) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.4), nn.Linear(width, 3), *more
        )


class SortedValues(torchmetrics.CatMetric):
    """A weighted sum of the sorted values: it depends on all values, but not on their order."""

    def compute(self):
        values = torch.atleast_1d(super().compute()).double().sort().values
        return values @ torch.arange(1.0, len(values) + 1, dtype=torch.float64, device=values.device)


class Model(ClassificationModel):
    """Has dropout, batch norm, and training metrics with both kinds of state: sums and lists of values."""

    def __init__(self, width: int = 6):
        super().__init__(make_net(width=width), 3)

    def metrics(self, train):
        return {**super().metrics(train), "sorted": SortedValues()}

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, SortedValues):
            metric.update(outputs.detach().amax(1).float())
        else:
            super().update_metric(batch, outputs, metric)


class SaveEach(Callback):
    """Saves a checkpoint after each batch and each epoch."""

    def __init__(self, folder: Path):
        self.folder = folder

    def batch_checkpoint(self, state, logger):
        save_checkpoint(state, self.folder / f"ba{state.timestamp.batch}")

    def epoch_checkpoint(self, state, logger):
        save_checkpoint(state, self.folder / f"ep{state.timestamp.epoch}")


class Overflow(Algorithm):
    """Makes the loss of the third batch overflow, so that the loss scale is halved."""

    def after_loss(self, state, logger):
        if state.timestamp.batch == 2:
            assert isinstance(state.loss, torch.Tensor)
            state.loss = state.loss * 1e30


def make_trainer(**arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(3)
    images, targets = torch.randn(38, 1, 4, 4, generator=generator), torch.arange(38) % 3
    defaults: dict[str, Any] = {
        "model": Model(),
        "train_dataloader": TensorLoader(images, targets, batch_size=8, shuffle=True, seed=1),
        "eval_dataloader": TensorLoader(images, targets, batch_size=8, shuffle=False),
        "optimizers": lambda params: torch.optim.AdamW(params, lr=0.05),
        "schedulers": cosine_annealing(t_warmup="3ba"),
        "max_duration": "2ep",
        "eval_interval": "3ba",
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def full_arguments() -> dict[str, Any]:
    """Return arguments whose algorithms and microbatches have state or random numbers that a checkpoint could miss."""
    return {
        "algorithms": [MixUp(alpha=0.5), EMA("4ba"), BatchAugment(pad=1, flip="random"), GradientClipping("norm", 1.0)],
        "grad_accum": 2,
    }


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return everything that a run leaves in its state, except times."""
    state = trainer.state
    now = state.timestamp
    return {
        "weights": {name: value.clone() for name, value in state.unwrapped_model.state_dict().items()},
        "optimizer": state.optimizers[0].state_dict(),
        "scale": state.scaler.get_scale() if state.scaler is not None else None,
        "algorithms": [algorithm.state_dict() for algorithm in state.algorithms],
        "metrics": {label: dict(values) for label, values in state.metric_values.items()},
        "counts": now[: now._fields.index("total_wct")] if "total_wct" in now._fields else (),
    }


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def logged_after(memory: InMemoryLogger, batch: int) -> dict[str, list[tuple[int, float]]]:
    """Return the values logged after a batch."""
    values = {
        key: [(int(now.batch), value) for now, value in points if now.batch > batch]
        for key, points in memory.data.items()
    }
    return {key: points for key, points in values.items() if points}


CASES: dict[str, Any] = {
    "plain": dict,
    "all": full_arguments,
    "ema": lambda: {"algorithms": [EMA("1ep", start="0.5dur")], "microbatch_size": 3},
    "onecycle": lambda: {
        "schedulers": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        "step_schedulers_every_batch": True,
    },
    "exponential": lambda: {"schedulers": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)},
    "sgd": lambda: {"optimizers": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)},
    "bf16": lambda: {"precision": "bf16"},
    "fp16": lambda: {"precision": "amp_fp16", "algorithms": [Overflow()]},
    "auto": lambda: {"iteration_length": "1ep", "microbatch_size": "auto"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:precision='bf16'.*slower")
def test_a_resumed_run_equals_an_uninterrupted_one(case: str, tmp_path: Path):
    memory = InMemoryLogger()
    with make_trainer(**CASES[case](), callbacks=[SaveEach(tmp_path)], loggers=[memory]) as whole:
        whole.fit()
    expected = outcome(whole)
    assert whole.state.timestamp.batch == BATCHES
    for name in ALL if case in ("plain", "all") else FEW:
        resumed_memory = InMemoryLogger()
        resumed = make_trainer(**CASES[case](), resume_path=tmp_path / name, loggers=[resumed_memory])
        batch = 5 if name == "ep1" else int(name[2:])
        assert resumed.state.timestamp.batch == batch
        with resumed:
            resumed.fit()
        assert_equal(outcome(resumed), expected)
        assert_equal(logged_after(resumed_memory, batch), logged_after(memory, batch))


def test_a_finished_run_has_nothing_left_to_train_but_can_be_trained_longer(tmp_path: Path):
    with make_trainer(**full_arguments(), callbacks=[SaveEach(tmp_path)]) as whole:
        whole.fit()
        whole.fit(duration="1ep")
    finished = make_trainer(**full_arguments(), resume_path=tmp_path / "ep2")
    with pytest.raises(ValueError, match="nothing left to train"):
        finished.fit()
    finished.close()
    with make_trainer(**full_arguments(), resume_path=tmp_path / "ep2") as resumed:
        resumed.fit(duration="1ep")
    assert_equal(outcome(resumed)["weights"], outcome(whole)["weights"])


def test_a_resumed_run_is_exact_with_a_torch_dataloader(tmp_path: Path):
    """Torch's own sampler shuffles, and the data set augments with the global generator."""

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 38

        def __getitem__(self, index):
            return torch.full((1, 4, 4), float(index)) + torch.randn(1, 4, 4), index % 3

    def loader(kind: str) -> Any:
        generator = torch.Generator().manual_seed(5) if kind == "generator" else None
        return torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True, generator=generator)

    for kind in ("global", "generator"):
        folder = tmp_path / kind
        with make_trainer(train_dataloader=loader(kind), callbacks=[SaveEach(folder)]) as whole:
            whole.fit()
        for name in ("ba2", "ba5", "ep1", "ba8"):
            torch.manual_seed(12345)  # as a new process would have another seed
            with make_trainer(train_dataloader=loader(kind), resume_path=folder / name) as resumed:
                resumed.fit()
            assert_equal(outcome(resumed), outcome(whole))


def test_a_resumed_run_is_exact_with_a_random_transform(tmp_path: Path):
    def loader() -> TensorLoader:
        images, targets = torch.ones(38, 1, 4, 4), torch.arange(38) % 3
        return TensorLoader(
            images,
            targets,
            batch_size=8,
            shuffle=True,
            transform=lambda batch: (batch[0] + torch.randn_like(batch[0]), batch[1]),
        )

    with make_trainer(train_dataloader=loader(), callbacks=[SaveEach(tmp_path)]) as whole:
        whole.fit()
    for name in ("ba2", "ba5", "ba8"):
        torch.manual_seed(12345)
        with make_trainer(train_dataloader=loader(), resume_path=tmp_path / name) as resumed:
            resumed.fit()
        assert_equal(outcome(resumed), outcome(whole))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run with the default arguments, after one epoch."""
    with make_trainer(max_duration="1ep", eval_interval=0) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "run" / "checkpoints" / "ep1")
        save_checkpoint(trainer.state, tmp_path / "weights", weights_only=True)
    return tmp_path / "run" / "checkpoints" / "ep1"


def test_load_path_loads_the_weights_alone(checkpoint: Path):
    for path in (checkpoint, str(checkpoint), checkpoint.parent.parent, checkpoint.parent.parent.parent / "weights"):
        with make_trainer(load_path=path) as trainer:
            assert_equal(dict(trainer.state.unwrapped_model.state_dict()), dict(read_file(checkpoint, "model.pt")))
            assert trainer.state.timestamp.batch == 0 and not trainer.state.optimizers[0].state


def test_loaded_weights_have_the_metrics_of_the_saved_ones(tmp_path: Path):
    with make_trainer(**full_arguments()) as trainer:
        trainer.fit()
        before = trainer.eval()["eval"]
        save_checkpoint(trainer.state, tmp_path / "average")
    with make_trainer(load_path=tmp_path / "average") as trainer:  # without EMA, the weights are the average
        assert_equal(trainer.eval()["eval"], before)


def test_a_state_dict_that_cannot_be_saved_is_an_error_that_names_its_class(tmp_path: Path):
    class WithPath(Callback):
        def batch_end(self, state, logger): ...

        def state_dict(self):
            return {"path": tmp_path}

    message = r"^WithPath\.state_dict\(\) cannot be saved: it holds a PosixPath; return"
    with make_trainer(callbacks=[WithPath()]) as trainer, pytest.raises(TypeError, match=message):
        save_checkpoint(trainer.state, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_numpy_numbers_in_states_are_saved_and_loaded(tmp_path: Path):
    class Best(Callback):
        best = 0.0

        def batch_end(self, state, logger): ...

        def state_dict(self):
            return {"best": numpy.float64(0.5), "at": numpy.int64(3)}

        def load_state_dict(self, state):
            self.best, self.at = state["best"], state["at"]

    def arguments() -> dict[str, Any]:
        rates = numpy.logspace(-2, -1, 2, dtype="float32")
        return {"optimizers": lambda params: torch.optim.SGD(params, lr=rates[0]), "schedulers": None}

    with make_trainer(callbacks=[Best()], **arguments()) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "end")
    best = Best()
    with make_trainer(callbacks=[best], resume_path=tmp_path / "end", **arguments()):
        assert (best.best, best.at) == (0.5, 3)


class Deeper(ClassificationModel):
    def __init__(self):
        super().__init__(make_net(nn.Linear(3, 3)), 3)


@pytest.mark.parametrize("argument", ["load_path", "resume_path"])
@pytest.mark.parametrize("averaged", [False, True])
def test_weights_that_do_not_fit_the_model_are_listed(argument: str, averaged: bool, tmp_path: Path):
    def algorithms() -> list[Any]:
        return [EMA()] if averaged else []

    with make_trainer(max_duration="1ep", algorithms=algorithms()) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "saved")
    with pytest.raises(ValueError, match="do not fit the model: missing module.5.weight, module.5.bias"):
        make_trainer(model=Deeper(), algorithms=algorithms(), **{argument: tmp_path / "saved"})
    with pytest.raises(ValueError, match=re.escape("module.1.weight (6, 16) into (5, 16)")):
        make_trainer(model=Model(width=5), algorithms=algorithms(), **{argument: tmp_path / "saved"})


def test_load_strict_false_loads_the_weights_that_fit_and_lists_the_others(checkpoint: Path, caplog):
    with caplog.at_level(logging.WARNING, "runner"):
        trainer = make_trainer(model=Deeper(), load_path=checkpoint, load_strict=False, optimizers=None)
    trainer.close()
    assert "missing module.5.weight, module.5.bias" in caplog.text
    saved = read_file(checkpoint, "model.pt")
    assert_equal(trainer.state.unwrapped_model.state_dict()["module.1.weight"], saved["module.1.weight"])


def test_load_strict_false_refuses_weights_of_another_shape(checkpoint: Path):
    with pytest.raises(ValueError, match="of another shape"):
        make_trainer(model=Model(width=5), load_path=checkpoint, load_strict=False)


def test_a_checkpoint_of_weights_alone_cannot_be_resumed(checkpoint: Path):
    path = checkpoint.parent.parent.parent / "weights"
    assert not (path / "state.pt").exists()
    with pytest.raises(ValueError, match="holds only weights: start from it with load_path"):
        make_trainer(resume_path=path)


def test_other_optimizers_and_schedulers_are_refused(checkpoint: Path):
    with pytest.raises(ValueError, match="has 1 optimizers, this run has 0"):
        make_trainer(optimizers=None, resume_path=checkpoint)
    with pytest.raises(ValueError, match="has 1 schedulers, this run has 0"):
        make_trainer(schedulers=None, resume_path=checkpoint)
    with pytest.raises(ValueError, match="parameter group"):
        make_trainer(
            optimizers=lambda params: torch.optim.AdamW([{"params": [parameter]} for parameter in params], lr=0.1),
            resume_path=checkpoint,
        )


@pytest.mark.parametrize("argument", ["load_path", "resume_path"])
def test_a_path_without_a_checkpoint_is_an_error_that_names_it(argument: str, tmp_path: Path):
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(FileNotFoundError, match=re.escape(f"path={str(path)!r}: no complete checkpoint there")):
            make_trainer(**{argument: path})


def test_saving_checkpoints_does_not_change_training(tmp_path: Path):
    with make_trainer(**full_arguments()) as without:
        without.fit()
    with make_trainer(**full_arguments(), callbacks=[SaveEach(tmp_path)]) as saving:
        saving.fit()
    assert_equal(outcome(saving), outcome(without))


def test_two_ranks_resume_exactly_and_a_single_process_resumes_from_two_ranks(run_ranks, tmp_path: Path):
    run_ranks(program_of("checkpoints/test_snapshot", "save_and_resume"), env={"PYTHONWARNINGS": "error"})
    whole, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("whole", "resumed"))
    for name, values in resumed.items():
        torch.testing.assert_close(values, whole, rtol=0, atol=0, msg=lambda message, name=name: f"{name}: {message}")
    with ranked_trainer(resume_path=tmp_path / "ba3") as single:
        single.fit()
    expected = shared_outcome(single)
    for part in ("weights", "counts"):
        torch.testing.assert_close(whole[part], expected[part], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(whole["metrics"], expected["metrics"], rtol=1e-6, atol=1e-6)


def shared_outcome(trainer: Trainer) -> dict[str, Any]:
    """Return the parts of the outcome that do not depend on the number of ranks."""
    values = outcome(trainer)
    return {key: values[key] for key in ("weights", "metrics", "counts")}


class RankIndependentModel(Model):
    """Has neither dropout nor batch norm, whose values depend on the number of ranks; in float64."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.module = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def ranked_trainer(**arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(3)
    images, targets = torch.randn(38, 1, 4, 4, generator=generator, dtype=torch.float64), torch.arange(38) % 3
    return make_trainer(
        model=RankIndependentModel(),
        train_dataloader=TensorLoader(images, targets, batch_size=8, shuffle=True, seed=1),
        eval_dataloader=TensorLoader(images, targets, batch_size=8, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        algorithms=[EMA("4ba")],
        **arguments,
    )


def save_and_resume() -> None:
    """Save a whole run and runs resumed from its checkpoints; run on each rank."""
    from runner import get_global_rank
    from runner.distributed.collectives import any_rank, destroy_process_group, init_process_group

    init_process_group(torch.device("cpu"))
    with ranked_trainer(callbacks=[SaveEach(Path())]) as trainer:
        trainer.fit()
    whole = shared_outcome(trainer)
    any_rank(False)  # waits for the other rank
    resumed = {}
    for name in FEW:
        with ranked_trainer(resume_path=name) as trainer:
            trainer.fit()
        resumed[name] = shared_outcome(trainer)
    if get_global_rank() == 0:
        torch.save(whole, "whole.pt")
        torch.save(resumed, "resumed.pt")
    del trainer
    gc.collect()  # ends DDP's threads, which can crash the interpreter at exit
    destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_capture_waits_for_copies_to_the_host(weights_only: bool, averaged: bool, copy: bool, device: str):
    with make_trainer(device=device, algorithms=[EMA("1ba")] if averaged else []) as trainer:
        trainer.fit()
        with torch.no_grad(), evaluation_weights(trainer.state):
            expected = [value.cpu().clone() for value in trainer.state.unwrapped_model.state_dict().values()]
        if device == "cuda":
            torch.cuda._sleep(1_000_000_000)  # delays the copies by this number of cycles
        snapshot = capture(trainer.state, weights_only, Copies() if copy else None)
    assert snapshot is not None
    torch.testing.assert_close([*snapshot["model.pt"].values()], expected, rtol=0, atol=0)
