from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted_model import Scripted
from tiny_runs import tiny_trainer

from runner import Callback, Evaluator, Model, Trainer, save_checkpoint
from runner.callbacks import ThresholdStopper
from runner.data import TensorLoader

NAN = float("nan")


def make_trainer(model: Model, *stoppers: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": model,
        "train_dataloader": TensorLoader(torch.ones(4), batch_size=2, shuffle=False),
        "eval_dataloader": TensorLoader(torch.ones(1), batch_size=1, shuffle=False),
        "max_duration": "8ep",
    }
    return tiny_trainer(*stoppers, **(defaults | arguments))


def batches_run(model: Model, *stoppers: Callback, **arguments: Any) -> int:
    with make_trainer(model, *stoppers, **arguments) as trainer:
        trainer.fit()
    return trainer.state.timestamp.batch


@pytest.mark.parametrize(
    ("script", "arguments", "epochs"),
    [
        ([5, 4, 3, 2, 1], {"monitor": "loss", "threshold": 3}, 4),  # a value equal to the threshold has not passed it
        ([5, 4, 3, 2, 1], {"monitor": "loss", "threshold": 3.5}, 3),
        ([1, 2, 3, 4, 5], {"monitor": "loss", "threshold": 3, "comp": "gt"}, 4),
        ([5, 4, NAN, 2, 1], {"monitor": "loss", "threshold": 3}, 4),
        # The metric is minus the loss, so higher is better.
        ([5, 4, 3, 2, 1], {"monitor": "Mean", "threshold": -3}, 4),
        ([5, 4, 3, 6, 1], {"monitor": "Mean", "threshold": -5, "comp": "lt"}, 4),
        ([5] * 8, {"monitor": "loss", "threshold": 3}, 8),
    ],
)
def test_training_stops_after_the_evaluation_that_passes_the_threshold(
    script: list[float], arguments: dict, epochs: int
):
    assert batches_run(Scripted(script), ThresholdStopper(**arguments)) == 2 * epochs


def test_an_evaluation_inside_an_epoch_stops_training_there():
    assert batches_run(Scripted([5, 4, 3, 2, 1]), ThresholdStopper("loss", 3.5), eval_interval="1ba") == 3


def test_the_first_of_two_stoppers_to_pass_ends_training():
    stoppers = ThresholdStopper("loss", 1.5), ThresholdStopper("Mean", -3.5)
    assert batches_run(Scripted([5, 4, 3, 2, 1]), *stoppers) == 6
    assert batches_run(Scripted([5, 4, 3, 2, 1]), ThresholdStopper("loss", 3.5), ThresholdStopper("Mean", -1.5)) == 6


def test_only_new_values_of_the_monitored_evaluator_can_stop_training():
    loader = TensorLoader(torch.ones(1), batch_size=1, shuffle=False)
    evaluators = [Evaluator("often", loader), Evaluator("rare", loader, eval_interval="3ep")]
    before, script = [9, 1], [1, 1, 1, 5, 1, 1, 1, 3]
    with make_trainer(
        Scripted(before + script), ThresholdStopper("loss", 4, "rare"), eval_dataloader=evaluators
    ) as trainer:
        trainer.eval()
        trainer.fit()
    assert trainer.state.timestamp.batch == 12


def test_an_evaluation_outside_training_stops_nothing(caplog):
    caplog.set_level("INFO", "runner")
    with make_trainer(Scripted([1.0, 9.0, 8.0, 2.0, 2.0]), ThresholdStopper("loss", 3)) as trainer:
        trainer.eval()
        assert not caplog.messages
        trainer.fit()
    assert trainer.state.timestamp.epoch == 3
    assert caplog.messages == ["stopped: eval/loss is 2, past the threshold of 3"]


@pytest.mark.parametrize("monitor", ["Mean", "train/Mean"])
@pytest.mark.parametrize(("stop_on_batch", "expected"), [(False, 8), (True, 7)])
def test_a_training_metric_ends_training_after_an_epoch_or_batch(stop_on_batch: bool, expected: int, monitor: str):
    # The means of the epochs of two batches are 1, 2, 2 and 4.25; in the fourth, the first batch alone passes 4.
    model = Scripted([], [0, 2, 2, 2, 3, 1, 5, 3.5, 9, 9])
    stopper = ThresholdStopper(monitor, 4, "train", stop_on_batch=stop_on_batch)
    assert batches_run(model, stopper, eval_dataloader=None) == expected


def test_the_reason_for_a_stop_is_logged_once(caplog):
    caplog.set_level("INFO", "runner")
    stopper = ThresholdStopper("Mean", 4, "train", stop_on_batch=True)
    assert batches_run(Scripted([], [0, 2, 2, 8]), stopper, eval_dataloader=None) == 4
    assert caplog.messages == ["stopped: train/Mean is 5, past the threshold of 4"]


def test_stop_on_batch_does_not_change_the_metric():
    values = []
    for stop_on_batch in (False, True):
        model, stopper = Scripted([], range(16)), ThresholdStopper("Mean", 99, "train", stop_on_batch=stop_on_batch)
        with make_trainer(model, stopper, eval_dataloader=None) as trainer:
            trainer.fit()
        values.append(trainer.state.train_metric_values["Mean"].item())
    assert values == [14.5, 14.5]


@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_resumed_run_stops_at_the_same_batch_as_an_uninterrupted_one(tmp_path, cut: int):
    script = [0, 2, 2, 2, 3, 5.5, 6, 3]  # by batch; the mean of the third epoch passes 4 with its second batch
    stopper = {"monitor": "Mean", "threshold": 4, "dataloader_label": "train", "stop_on_batch": True}
    with make_trainer(Scripted([], script), ThresholdStopper(**stopper), eval_dataloader=None) as first:
        first.fit(duration=f"{cut}ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    rest, resume = Scripted([], script[cut:]), {"resume_path": tmp_path / "checkpoint", "eval_dataloader": None}
    assert batches_run(rest, ThresholdStopper(**stopper), **resume) == 6
    assert batches_run(Scripted([], script), ThresholdStopper(**stopper), eval_dataloader=None) == 6


@pytest.mark.parametrize("stop_on_batch", [False, True])
def test_a_stopped_run_continues_to_another_threshold_or_for_an_explicit_duration(tmp_path, stop_on_batch: bool):
    script = [0, 2, 2, 2, 3, 5.5, 6, 3]
    stopper = {"monitor": "Mean", "dataloader_label": "train", "stop_on_batch": stop_on_batch}
    no_eval: dict[str, Any] = {"eval_dataloader": None}
    with make_trainer(Scripted([], script), ThresholdStopper(threshold=4, **stopper), **no_eval) as first:
        first.fit()
        save_checkpoint(first.state, tmp_path / "checkpoint")
    assert first.state.timestamp.batch == 6
    resume = {"resume_path": tmp_path / "checkpoint"} | no_eval
    assert batches_run(Scripted([], script[6:]), ThresholdStopper(threshold=4, **stopper), **resume) == 6
    further = batches_run(Scripted([], script[6:]), ThresholdStopper(threshold=4.4, **stopper), **resume)
    assert further == (7 if stop_on_batch else 8)
    with make_trainer(Scripted([], script[6:]), ThresholdStopper(threshold=4, **stopper), **resume) as extended:
        extended.fit()
        extended.fit("1ba")
    assert extended.state.timestamp.batch == 7


def test_all_ranks_stop_when_their_joint_metric_passes_the_threshold(run_ranks):
    def program():
        import torch
        from torchmetrics import MeanMetric

        from runner import Model, Trainer
        from runner.callbacks import ThresholdStopper
        from runner.data import TensorLoader

        class Mean(Model):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(()))

            def forward(self, batch):
                return self.weight * batch

            def loss(self, outputs, batch):
                return outputs.mean()

            def metrics(self, train):
                return {"Mean": MeanMetric()}

            def update_metric(self, batch, outputs, metric):
                metric.update(batch)

        # Each batch has one sample per rank; on rank 0 alone, the metric would pass the threshold at once.
        data = torch.tensor([9.0, -9, 9, -9, 9, 9, 9, 9, 9, 9])
        with Trainer(
            model=Mean(),
            train_dataloader=TensorLoader(data, batch_size=2, shuffle=False),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.0),
            max_duration="3ep",
            device="cpu",
            callbacks=[ThresholdStopper("Mean", 3, "train", stop_on_batch=True)],
        ) as trainer:
            trainer.fit()
        print(trainer.state.timestamp.batch)

    assert [rank.stdout.split() for rank in run_ranks(program)] == [["4"], ["4"]]


@pytest.mark.parametrize(
    "arguments",
    [{"threshold": NAN}, {"threshold": "3"}, {"threshold": True}, {"comp": "less"}, {"stop_on_batch": True}],
)
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        ThresholdStopper(**{"monitor": "loss", "threshold": 0.5} | arguments)
