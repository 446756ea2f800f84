"""`test=best` and `test=last`: the best or the last weights are evaluated on test data after training."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from composed_configs import composed
from stores import query
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runner import Callback, ClassificationModel, Evaluator, Trainer
from runner.algorithms import EMA
from runner.callbacks import CheckpointSaver, InMemoryLogger
from runner.config import build
from runner.config.experiment import Experiment
from runner.data import TensorLoader
from runner.failures.errors import WrongConfig
from runner.records.result import objectives_of
from runner.training.evaluator import with_test
from runner.training.final_test import check_test, evaluate_test_data
from runner.trials import dry_run

SHORT = (
    *("model=mlp", "data.batch_size=400", "trainer.max_duration=3ep", "callbacks=[mlflow_logger,checkpoint_saver]"),
    *("data.test_samples=200", "test=best", "callbacks.checkpoint_saver.monitor=MulticlassAccuracy"),
)


def part(first: int, last: int) -> TensorLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator)
    return TensorLoader(inputs[first:last], (inputs[first:last, 0] > 0).long(), batch_size=6, shuffle=first == 0)


class NegateWeights(Callback):
    """Negates the weights after the first epoch, so that the first checkpoint is the best."""

    def epoch_start(self, state: Any, logger: Any) -> None:
        if state.timestamp.epoch:
            with torch.no_grad():
                state.unwrapped_model.module.weight.mul_(-1)


def make_trainer(folder: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    arguments = {"eval_dataloader": with_test(part(30, 45), part(45, 60)), "max_duration": "2ep", **arguments}
    return Trainer(
        model=ClassificationModel(nn.Linear(4, 2), 2),
        train_dataloader=part(0, 30),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        callbacks=[*callbacks],
        run_dir=folder,
        device="cpu",
        **arguments,
    )


def fit_and_test(folder: Path, weights: str | None, **arguments: Any) -> tuple[Any, Trainer, InMemoryLogger]:
    memory = InMemoryLogger()
    saver = CheckpointSaver(monitor="loss", keep=-1)
    with make_trainer(folder, saver, NegateWeights(), loggers=[memory], **arguments) as trainer:
        trainer.fit()
        tested = evaluate_test_data(trainer, weights)
    return tested, trainer, memory


@pytest.mark.parametrize("averaged", [False, True])
def test_the_best_weights_are_tested_and_the_run_keeps_its_last_weights(tmp_path: Path, averaged: bool):
    def algorithms() -> list[Any]:
        return [EMA("2ba")] if averaged else []

    tested, trainer, memory = fit_and_test(tmp_path / "run", "best", algorithms=algorithms())
    best = (tmp_path / "run" / "checkpoints" / "best").resolve()
    assert tested == best.name == "ep1-ba5"
    with make_trainer(tmp_path / "other", load_path=best) as other:
        expected = other.eval(Evaluator("test", part(45, 60)))["test"]
    assert trainer.state.eval_metric_values["test"] == expected
    (((when, loss),), ((_, accuracy),)) = memory.data["loss/test/total"], memory.data["metrics/test/MulticlassAccuracy"]
    assert when.batch == 5 and loss == float(expected["loss"]) and accuracy == float(expected["MulticlassAccuracy"])

    untested = fit_and_test(tmp_path / "without", None, algorithms=algorithms())
    assert untested[0] is None and "test" not in untested[1].state.eval_metric_values
    saved = [
        torch.load(tmp_path / run / "checkpoints/latest/model.pt", weights_only=True) for run in ("run", "without")
    ]
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=0)
    assert trainer.state.timestamp.batch == 10
    states = [dict(run.state.unwrapped_model.state_dict()) for run in (trainer, untested[1])]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_the_last_weights_are_tested(tmp_path: Path):
    tested, trainer, memory = fit_and_test(tmp_path / "run", "last")
    ((when, loss),) = memory.data["loss/test/total"]
    assert tested == "last" and when.batch == 10
    assert loss == float(trainer.state.eval_metric_values["test"]["loss"]) > 0


def test_a_monitor_without_a_label_is_the_metric_of_the_evaluation_and_not_of_the_test(tmp_path: Path):
    saver = CheckpointSaver(monitor="MulticlassAccuracy")
    with make_trainer(tmp_path / "run", saver) as trainer:
        trainer.fit()
    assert saver.mode == "max" and saver.best_checkpoint is not None


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (
            {"eval_dataloader": part(30, 45)},
            {"test": "last"},
            r"test='last': this run has no test data; let data return",
        ),
        (
            {},
            {"test": "best"},
            r"test='best': the best checkpoint needs a metric; add callbacks.checkpoint_sav",
        ),
        ({"monitor": "test/loss"}, {"test": "best"}, r"chosen by monitor='test/loss', which has no value in training"),
        ({"monitor": "loss", "eval_interval": 0}, {"test": "best"}, r"chosen by monitor='loss', which has no value"),
        (
            {},
            {"objective": "test/loss"},
            r"objective='test/loss': test data is evaluated only with test=best or test=last",
        ),
    ],
)
def test_a_test_without_data_or_best_checkpoint_is_refused_before_training(
    tmp_path: Path, arguments: dict[str, Any], config: dict[str, Any], message: str
):
    arguments = dict(arguments)
    saver = CheckpointSaver(monitor=arguments.pop("monitor", None))
    with make_trainer(tmp_path / "run", saver, **arguments) as trainer, pytest.raises(ValueError, match=message):
        check_test(trainer.state, config.get("test"), objectives_of(config.get("objective")))


def test_the_best_weights_by_any_metric_of_training_can_be_tested(tmp_path: Path):
    for monitor in ("loss", "eval/loss", "train/MulticlassAccuracy"):
        with make_trainer(tmp_path / "run", CheckpointSaver(monitor=monitor)) as trainer:
            check_test(trainer.state, "best", ["test/loss"])


def test_test_data_with_an_interval_is_refused():
    with pytest.raises(ValueError, match="evaluator 'late': test data needs eval_interval=0"):
        with_test(None, Evaluator("late", part(0, 6), eval_interval="1ep"))
    data = DataLoader(TensorDataset(torch.zeros(2)))
    assert [evaluator.label for evaluator in with_test(None, data)] == ["test"]
    evaluators = with_test([Evaluator("a", data)], Evaluator("b", data, eval_interval=0))
    assert [evaluator.label for evaluator in evaluators] == ["a", "b"]


def try_out(*overrides: str) -> dry_run.Findings:
    config = composed(*overrides)
    build.check(Experiment(config))
    return dry_run.try_out(Experiment(config))


def test_a_dry_run_reads_test_data_and_refuses_the_same_tests_as_training():
    findings = try_out(*SHORT)
    assert "; eval 397 samples in 1 batch of 597; test 200 samples in 1 batch of 597; made up" in findings.data
    with pytest.raises(WrongConfig, match="test='best': this run has no test data"):
        try_out(*SHORT, "data.test_samples=0")
    with pytest.raises(ValueError, match="test='first': must be best or last"):
        try_out("test=first")


OWN = """
import os, signal
from runner import Callback


class KillInTest(Callback):
    def eval_standalone_start(self, state, logger):
        if not os.path.exists("resumed"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_a_run_killed_before_its_test_is_tested_when_it_is_resumed(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    callback = "+callbacks.own._target_=own.KillInTest"
    run_app(*SHORT, callback, "hydra.run.dir=run", "run_name=mine", "objective=test/loss", exit_code=-signal.SIGKILL)
    run = tmp_path / "run"
    assert result(run)["status"] == "RUNNING"
    (tmp_path / "resumed").touch()
    finished = run_app("resume", "run")
    resumed = result(run)
    assert resumed["status"] == "FINISHED"
    assert resumed["tested"] == (run / "checkpoints" / "best").resolve().name
    assert resumed["objective"] == resumed["metrics"]["test/loss"] and resumed["objective_name"] == "test/loss"
    shown = " ".join(finished.stdout.split())
    assert f"test weights {resumed['tested']}" in shown and " test/MulticlassAccuracy 0." in shown
    sql = "select value from metrics where key = 'loss/test/total'"
    assert query(tmp_path / "outputs" / "mlflow.db", sql) == [(resumed["metrics"]["test/loss"],)]

    finished = run_app("eval", "run", "callbacks=none", "hydra.run.dir=evaluated")
    assert f"run/checkpoints/{resumed['tested']}, after" in " ".join(finished.stdout.split())
    metrics = result(tmp_path / "evaluated")["metrics"]
    assert all(key.startswith(("eval/", "test/")) for key in metrics)
    assert metrics["test/loss"] == resumed["metrics"]["test/loss"]
    run_app("eval", "run", "test=null", "objective=null", "callbacks=none", "hydra.run.dir=without")
    assert {key.partition("/")[0] for key in result(tmp_path / "without")["metrics"]} == {"eval"}


def test_a_command_with_an_impossible_test_is_refused_and_leaves_no_run(tmp_path: Path, run_app: Any):
    finished = run_app(*SHORT[:-1], exit_code=2)
    assert "test='best': the best checkpoint needs a metric" in finished.stderr
    assert not [*tmp_path.glob("outputs/20*/*")]


@pytest.mark.slow
def test_two_ranks_test_the_same_weights_as_a_single_process(tmp_path: Path, run_app: Any):
    for ranks in (1, 2):
        overrides = (f"launch.nproc_per_node={ranks}", f"hydra.run.dir=run{ranks}")
        run_app(*SHORT, "callbacks=checkpoint_saver", "algorithms=none", *overrides)
    single, two = (result(tmp_path / f"run{ranks}") for ranks in (1, 2))
    assert single["tested"] == two["tested"]
    assert two["metrics"] == pytest.approx(single["metrics"], abs=1e-5)
