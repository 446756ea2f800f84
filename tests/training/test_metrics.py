"""Metrics of training and evaluation: their values, names and logged keys, retries, and which objects are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

from runner import Callback, ClassificationModel, Evaluator, LanguageModel, Model, Trainer
from runner.callbacks import InMemoryLogger
from runner.data import TensorLoader
from runner.training.metrics import MOST_TERMS, WeightedMean, empty, scalars, update_metrics


def make_data(size: int = 10) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def make_model() -> ClassificationModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ClassificationModel(nn.Linear(3, 2), 2)


class CorrectPredictions(Callback):
    """For each epoch and training batch, whether its predictions are correct."""

    def __init__(self):
        self.epochs: list[list[Tensor]] = []

    def epoch_start(self, state, logger):
        self.epochs.append([])

    def after_loss(self, state, logger):
        self.epochs[-1].append((state.outputs.argmax(1) == state.microbatch[1]).float())


def fit(*callbacks: Callback, **arguments: Any) -> tuple[Trainer, InMemoryLogger]:
    memory = InMemoryLogger()
    with Trainer(
        **{
            "model": make_model(),
            "train_dataloader": TensorLoader(*make_data(), batch_size=4, shuffle=True),
            "eval_dataloader": TensorLoader(*make_data(7), batch_size=4, shuffle=False),
            "optimizers": lambda params: torch.optim.SGD(params, lr=0.5),
            "max_duration": "3ep",
            "callbacks": [*callbacks],
            "loggers": [memory],
            "device": "cpu",
            **arguments,
        }
    ) as trainer:
        trainer.fit()
    return trainer, memory


@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}, {"microbatch_size": "auto"}], ids=str)
def test_training_metrics_are_computed_over_the_epoch(split: dict[str, Any]):
    correct = CorrectPredictions()
    trainer, memory = fit(correct, **split)
    means = [float(torch.cat(epoch).mean()) for epoch in correct.epochs]
    points = memory.data["metrics/train/MulticlassAccuracy"]
    assert [value for _, value in points] == pytest.approx(means)
    assert [(now.batch, now.epoch) for now, _ in points] == [(3, 1), (6, 2), (9, 3)]
    assert float(trainer.state.train_metric_values["MulticlassAccuracy"]) == pytest.approx(means[-1])


def test_metrics_exclude_samples_of_an_attempt_that_ran_out_of_memory():
    class CountingModel(ClassificationModel):
        def metrics(self, train):
            return {"count": torchmetrics.SumMetric(), "list": torchmetrics.CatMetric()} if train else {}

        def update_metric(self, batch, outputs, metric):
            metric.update(torch.ones(len(batch[0])))
            if len(batch[0]) > 1 and isinstance(metric, torchmetrics.CatMetric):
                raise torch.OutOfMemoryError("out of memory")

    trainer, memory = fit(model=CountingModel(nn.Linear(3, 2), 2), microbatch_size="auto")
    assert [value for _, value in memory.data["metrics/train/count"]] == [10.0, 10.0, 10.0]
    assert len(trainer.state.train_metric_values["list"]) == 10
    assert trainer.state.samples_per_microbatch == 1


def test_the_trainer_logs_losses_metrics_and_times():
    _, memory = fit(eval_dataloader=[Evaluator("a", TensorLoader(*make_data(), batch_size=4, shuffle=False))])
    assert memory.data.keys() == {
        "loss/train/total",
        "metrics/train/MulticlassAccuracy",
        "loss/a/total",
        "metrics/a/MulticlassAccuracy",
        "time/epoch",
        "time/batch",
        "time/sample",
        "time/a/sample",
    }
    assert [value for _, value in memory.data["time/a/sample"]] == [10, 20, 30]
    assert [now.batch for now, _ in memory.data["loss/train/total"]] == list(range(1, 10))
    assert [value for _, value in memory.data["time/sample"]] == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert [value for _, value in memory.data["time/batch"]] == list(range(1, 10))
    assert [value for _, value in memory.data["time/epoch"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_tokens_are_logged_if_the_model_counts_them():
    tokens = torch.randint(7, (6, 5))
    _, memory = fit(
        model=LanguageModel(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))),
        train_dataloader=TensorLoader(tokens[:, :-1], tokens[:, 1:], batch_size=4, shuffle=True),
        eval_dataloader=None,
        max_duration="1ep",
    )
    assert [value for _, value in memory.data["time/token"]] == [16, 24]


def test_metric_names_of_an_evaluator_select_metrics_of_the_model():
    loader = TensorLoader(*make_data(), batch_size=4, shuffle=False)
    trainer, _ = fit(eval_dataloader=Evaluator("x", loader, metric_names=[]))
    assert set(trainer.state.eval_metric_values["x"]) == {"loss"}
    with pytest.raises(ValueError, match="metric_names='Accuracy': must be among the model's"):
        fit(eval_dataloader=Evaluator("x", loader, metric_names=["Accuracy"]))


class Measured(ClassificationModel):
    """Has the metrics that a function makes, in training or in evaluation."""

    def __init__(self, make: Any, train: bool = True):
        super().__init__(nn.Linear(3, 2), 2)
        self.make, self.in_training = make, train

    def metrics(self, train):
        return self.make() if train == self.in_training else {}


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(2, average="micro", validate_args=False)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (accuracy, r"MulticlassAccuracy\(\)"),
        (lambda: [accuracy()], r"\[MulticlassAccuracy\(\)\]"),
        (lambda: None, "None"),
        (lambda: {"accuracy": MulticlassAccuracy}, r"\{'accuracy': <class '.*MulticlassAccuracy'>\}"),
        (lambda: {"accuracy": accuracy(), "error": nn.functional.mse_loss}, r".*'error': <function mse_loss .*"),
        (lambda: {"accuracy": nn.MSELoss()}, r"\{'accuracy': MSELoss\(\)\}"),
        # The states inside these could not be saved or reduced over ranks.
        (lambda: {"all": MetricCollection({"accuracy": accuracy()})}, r"\{'all': MetricCollection\([\s\S]*"),
        (lambda: {"best": MetricTracker(accuracy())}, r"\{'best': MetricTracker\([\s\S]*"),
    ],
)
def test_a_model_must_return_a_dict_of_torchmetrics(make: Any, shown: str, train: bool):
    expected = rf"Measured.metrics\(train={train}\) returned {shown}: must be a dict of torchmetrics by name, such as"
    with pytest.raises(TypeError, match=expected):
        fit(model=Measured(make, train))


@pytest.mark.parametrize("split", [{}, {"microbatch_size": "auto"}], ids=str)
def test_a_collection_of_metrics_has_the_values_of_a_dict(split: dict[str, Any]):
    class WithCollection(ClassificationModel):
        def metrics(self, train) -> Any:
            return MetricCollection({"first": accuracy(), "second": accuracy()}, prefix="my_")

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WithCollection(nn.Linear(3, 2), 2)
    _, memory = fit(model=model, **split)
    _, plain = fit(**split)
    for label in ("train", "eval"):
        expected = [value for _, value in plain.data[f"metrics/{label}/MulticlassAccuracy"]]
        for name in ("my_first", "my_second"):
            assert [value for _, value in memory.data[f"metrics/{label}/{name}"]] == expected


def test_an_evaluation_metric_cannot_be_named_loss_unless_the_model_has_no_loss():
    with pytest.raises(ValueError, match=r"Measured.metrics\(train=False\) has a metric 'loss': .*rename the metric"):
        fit(model=Measured(lambda: {"loss": accuracy()}, train=False))
    _, memory = fit(model=Measured(lambda: {"loss": accuracy()}))
    assert "metrics/train/loss" in memory.data

    class StepModel(Model):
        """Has a training step and no method `loss`."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch):
            return self.layer(batch[0])

        def training_step(self, state):
            loss = self(state.microbatch).square().mean()
            loss.backward()
            return loss

        def metrics(self, train):
            return {} if train else {"loss": accuracy()}

    trainer, _ = fit(model=StepModel())
    assert 0 <= float(trainer.state.eval_metric_values["eval"]["loss"]) <= 1


class TestWeightedMean:
    def test_values_are_weighted(self):
        mean = WeightedMean(torch.device("cpu"))
        mean.add(torch.tensor(1.0), 3)
        mean.add(torch.tensor(5.0), torch.tensor(1))
        assert float(mean.compute()) == 2.0

    def test_many_small_values_are_not_rounded_away(self):
        mean = WeightedMean(torch.device("cpu"))
        mean.add(torch.tensor(1.0), 2**24)
        for _ in range(100):
            mean.add(torch.tensor(2.0), 1)
        assert float(mean.compute()) == (2**24 + 200) / (2**24 + 100)

    def test_few_terms_are_kept_of_many_values(self):
        mean = WeightedMean(torch.device("cpu"))
        values = torch.rand(2 * MOST_TERMS + 3, generator=torch.Generator().manual_seed(0))
        exact = 0.0
        for weight, value in enumerate(values, start=1):
            mean.add(value, weight)
            exact += float(value * weight)
            assert len(mean._terms) < MOST_TERMS
        assert float(mean.compute()) == exact / sum(range(1, len(values) + 1))

    def test_the_mean_of_no_values_is_nan(self):
        assert math.isnan(float(WeightedMean(torch.device("cpu")).compute()))


METRICS = {
    "sums": lambda: MulticlassAccuracy(2, average="micro", validate_args=False),
    "lists": lambda: BinaryAUROC(validate_args=False),
    "matrix": lambda: MulticlassConfusionMatrix(2, validate_args=False),
    "wrapper": lambda: torchmetrics.MinMaxMetric(MulticlassAccuracy(2, average="micro", validate_args=False)),
}


class ProbabilitiesForAUROC(ClassificationModel):
    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.softmax(1)[:, 1] if isinstance(metric, BinaryAUROC) else outputs, batch[1])


@pytest.mark.parametrize("name", METRICS)
def test_a_padding_batch_does_not_change_the_value_of_a_metric(name: str):
    model, metric, expected = ProbabilitiesForAUROC(nn.Linear(3, 2), 2), METRICS[name](), METRICS[name]()
    batch = make_data(5)
    outputs = model(batch).detach()
    for _ in range(2):
        update_metrics(model, batch, outputs, {name: metric}, counts=False)
    for value in metric.metric_state.values():
        assert not isinstance(value, list) or [len(tensor) for tensor in value] == [0]
    for updated in (metric, expected):
        update_metrics(model, batch, outputs, {name: updated}, counts=True)
    torch.testing.assert_close(metric.compute(), expected.compute())
    update_metrics(model, batch, outputs, {name: metric}, counts=False)
    torch.testing.assert_close(metric.compute(), expected.compute())


def test_emptied_metric_states_keep_their_dtypes():
    metric = BinaryAUROC(validate_args=False)
    metric.update(torch.rand(4, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
    empty(metric)
    states = [*metric.preds, *metric.target]
    assert [(len(state), state.dtype) for state in states] == [(0, torch.float64), (0, torch.int64)]


def test_a_metric_with_several_values_is_logged_element_by_element():
    value = {"per_class": torch.tensor([0.5, 1.0]), "mean": torch.tensor(0.75)}
    assert {key: float(scalar) for key, scalar in scalars("metrics/eval/F1", value).items()} == {
        "metrics/eval/F1/per_class/0": 0.5,
        "metrics/eval/F1/per_class/1": 1.0,
        "metrics/eval/F1/mean": 0.75,
    }
    assert scalars("k", [torch.ones(1, 1), 2.0]) == {"k/0": torch.ones(1, 1), "k/1": 2.0}
