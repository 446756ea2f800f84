from __future__ import annotations

import math

import torch
from tiny_runs import tiny_trainer

from runner import Callback, Trainer
from runner.callbacks import ConsoleSummary
from runner.callbacks._best_values import BestValues
from runner.data import TensorLoader


def make_trainer(tmp_path, *callbacks: Callback) -> Trainer:
    inputs, targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    return tiny_trainer(
        *callbacks,
        train_dataloader=TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        eval_dataloader=TensorLoader(inputs, targets, batch_size=8, shuffle=False),
        max_duration="2ep",
        run_dir=tmp_path / "run",
    )


def test_the_best_value_is_the_lowest_loss_and_the_highest_accuracy(tmp_path):
    best = BestValues()
    with make_trainer(tmp_path) as trainer:
        for loss, accuracy in ((math.nan, math.nan), (0.5, 0.6), (0.4, 0.7), (0.4, 0.7), (math.nan, math.nan)):
            is_best = best.add("loss/eval/total", loss, trainer.state)
            assert best.add("metrics/eval/MulticlassAccuracy", accuracy, trainer.state) == is_best
    assert best.values == {"loss/eval/total": 0.4, "metrics/eval/MulticlassAccuracy": 0.7}


def test_best_values_are_restored_from_a_checkpoint(tmp_path):
    before, after = BestValues(), BestValues()
    with make_trainer(tmp_path) as trainer:
        assert before.add("loss/eval/total", 0.5, trainer.state)
        after.load_state_dict(before.state_dict())
        assert not after.add("loss/eval/total", 0.6, trainer.state)
        assert after.add("loss/eval/total", 0.4, trainer.state)
    assert before.values == {"loss/eval/total": 0.5}


def test_only_metrics_of_evaluations_have_best_values(tmp_path):
    best = BestValues()
    with make_trainer(tmp_path) as trainer:
        for key in ("loss/train/total", "metrics/train/Accuracy", "loss/mine", "mine", "throughput/eval/x"):
            assert not best.add(key, 1.0, trainer.state), key


def test_the_summary_shows_metrics_logged_by_callbacks_under_distinct_names(tmp_path, capsys):
    class LogMetrics(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"loss/mine": 0.125, "loss/train/ce": 0.25, "metrics/train/ce": 0.5})

    with make_trainer(tmp_path, LogMetrics(), ConsoleSummary()) as trainer:
        trainer.fit()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (["mine", "0.1250"], ["train/loss/ce", "0.2500"], ["train/ce", "0.5000"]):
        assert rows.count(row) == 1, row
