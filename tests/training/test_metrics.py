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


class Outputs(Callback):
    """Predictions and targets of each epoch's training batches, as the metrics should have seen them."""

    def __init__(self):
        self.seen: list[list[Tensor]] = []

    def epoch_start(self, state, logger):
        self.seen.append([])

    def after_loss(self, state, logger):
        self.seen[-1].append((state.outputs.argmax(1) == state.microbatch[1]).float())


def fit(*callbacks: Callback, **arguments: Any) -> tuple[Trainer, InMemoryLogger]:
    logged = InMemoryLogger()
    with Trainer(
        **{
            "model": make_model(),
            "train_dataloader": TensorLoader(*make_data(), batch_size=4, shuffle=True),
            "eval_dataloader": TensorLoader(*make_data(7), batch_size=4, shuffle=False),
            "optimizers": lambda params: torch.optim.SGD(params, lr=0.5),
            "max_duration": "3ep",
            "callbacks": [*callbacks],
            "loggers": [logged],
            "device": "cpu",
            **arguments,
        }
    ) as trainer:
        trainer.fit()
    return trainer, logged


@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}, {"microbatch_size": "auto"}], ids=str)
def test_training_metrics_are_over_the_epoch(split: dict[str, Any]):
    outputs = Outputs()
    trainer, logged = fit(outputs, **split)
    means = [float(torch.cat(epoch).mean()) for epoch in outputs.seen]
    points = logged.data["metrics/train/MulticlassAccuracy"]
    assert [value for _, value in points] == pytest.approx(means)
    assert [(now.batch, now.epoch) for now, _ in points] == [(3, 1), (6, 2), (9, 3)]
    assert float(trainer.state.train_metric_values["MulticlassAccuracy"]) == pytest.approx(means[-1])


def test_what_an_attempt_has_counted_before_it_failed_is_forgotten():
    class Counted(ClassificationModel):
        def metrics(self, train):
            return {"count": torchmetrics.SumMetric(), "list": torchmetrics.CatMetric()} if train else {}

        def update_metric(self, batch, outputs, metric):
            metric.update(torch.ones(len(batch[0])))
            if len(batch[0]) > 1 and isinstance(metric, torchmetrics.CatMetric):
                raise torch.OutOfMemoryError("out of memory")

    trainer, logged = fit(model=Counted(nn.Linear(3, 2), 2), microbatch_size="auto")
    assert [value for _, value in logged.data["metrics/train/count"]] == [10.0, 10.0, 10.0]
    assert len(trainer.state.train_metric_values["list"]) == 10
    assert trainer.state.samples_per_microbatch == 1


def test_the_keys_of_the_trainer_and_their_steps():
    _, logged = fit(eval_dataloader=[Evaluator("a", TensorLoader(*make_data(), batch_size=4, shuffle=False))])
    assert logged.data.keys() == {
        "loss/train/total",
        "metrics/train/MulticlassAccuracy",
        "loss/a/total",
        "metrics/a/MulticlassAccuracy",
        "time/epoch",
        "time/batch",
        "time/sample",
        "time/a/sample",
    }
    assert [value for _, value in logged.data["time/a/sample"]] == [10, 20, 30]
    assert [now.batch for now, _ in logged.data["loss/train/total"]] == list(range(1, 10))
    assert [value for _, value in logged.data["time/sample"]] == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    assert [value for _, value in logged.data["time/batch"]] == list(range(1, 10))
    assert [value for _, value in logged.data["time/epoch"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_tokens_are_logged_where_they_are_counted():
    tokens = torch.randint(7, (6, 5))
    _, logged = fit(
        model=LanguageModel(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))),
        train_dataloader=TensorLoader(tokens[:, :-1], tokens[:, 1:], batch_size=4, shuffle=True),
        eval_dataloader=None,
        max_duration="1ep",
    )
    assert [value for _, value in logged.data["time/token"]] == [16, 24]


def test_evaluators_choose_metrics():
    model = make_model()
    chosen = Evaluator("x", TensorLoader(*make_data(), batch_size=4, shuffle=False), metric_names=[])
    trainer, _ = fit(model=model, eval_dataloader=chosen)
    assert set(trainer.state.eval_metric_values["x"]) == {"loss"}
    with pytest.raises(ValueError, match="metric_names='Accuracy': must be among the model's"):
        loader = TensorLoader(*make_data(), batch_size=4, shuffle=False)
        fit(eval_dataloader=Evaluator("x", loader, metric_names=["Accuracy"]))


class Measured(ClassificationModel):
    """With metrics of its own."""

    def __init__(self, make: Any, train: bool = True):
        super().__init__(nn.Linear(3, 2), 2)
        self.make, self.measures_training = make, train

    def metrics(self, train):
        return self.make() if train == self.measures_training else {}


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
        # Checkpoints and ranks could not take what these hold.
        (lambda: {"all": MetricCollection({"accuracy": accuracy()})}, r"\{'all': MetricCollection\([\s\S]*"),
        (lambda: {"best": MetricTracker(accuracy())}, r"\{'best': MetricTracker\([\s\S]*"),
    ],
)
def test_metrics_that_are_none_are_refused_when_the_trainer_is_made(make: Any, shown: str, train: bool):
    expected = rf"Measured.metrics\(train={train}\) returned {shown}: must be a dict of torchmetrics by name, such as"
    with pytest.raises(TypeError, match=expected):
        fit(model=Measured(make, train))


@pytest.mark.parametrize("split", [{}, {"microbatch_size": "auto"}], ids=str)
def test_a_collection_of_metrics_is_as_good_as_a_dict(split: dict[str, Any]):
    def collection() -> torchmetrics.MetricCollection:
        return torchmetrics.MetricCollection({"one": accuracy(), "two": accuracy()}, prefix="my_")

    class Both(Measured):
        def metrics(self, train):
            return self.make()

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Both(collection)
    _, logged = fit(model=model, **split)
    _, plain = fit(**split)
    for label in ("train", "eval"):
        expected = [value for _, value in plain.data[f"metrics/{label}/MulticlassAccuracy"]]
        for name in ("my_one", "my_two"):
            assert [value for _, value in logged.data[f"metrics/{label}/{name}"]] == expected


def test_a_metric_cannot_take_the_name_of_the_loss():
    with pytest.raises(ValueError, match=r"Measured.metrics\(train=False\) has a metric 'loss', .*rename the metric"):
        fit(model=Measured(lambda: {"loss": accuracy()}, train=False))
    _, logged = fit(model=Measured(lambda: {"loss": accuracy()}))
    assert "metrics/train/loss" in logged.data

    class Losing(Model):
        """Trains by itself, and has no loss whose name could be taken."""

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

    trainer, _ = fit(model=Losing())
    assert 0 <= float(trainer.state.eval_metric_values["eval"]["loss"]) <= 1


class TestWeightedMean:
    def test_it_weighs(self):
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

    def test_it_keeps_few_of_many_values(self):
        mean = WeightedMean(torch.device("cpu"))
        values = torch.rand(2 * MOST_TERMS + 3, generator=torch.Generator().manual_seed(0))
        exact = 0.0
        for weight, value in enumerate(values, start=1):
            mean.add(value, weight)
            exact += float(value * weight)
            assert len(mean._terms) < MOST_TERMS
        assert float(mean.compute()) == exact / sum(range(1, len(values) + 1))

    def test_of_nothing_it_is_not_a_number(self):
        assert math.isnan(float(WeightedMean(torch.device("cpu")).compute()))


METRICS = {
    "sums": lambda: MulticlassAccuracy(2, average="micro", validate_args=False),
    "lists": lambda: BinaryAUROC(validate_args=False),
    "matrix": lambda: MulticlassConfusionMatrix(2, validate_args=False),
    "wrapper": lambda: torchmetrics.MinMaxMetric(MulticlassAccuracy(2, average="micro", validate_args=False)),
}


class Mixed(ClassificationModel):
    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.softmax(1)[:, 1] if isinstance(metric, BinaryAUROC) else outputs, batch[1])


@pytest.mark.parametrize("name", METRICS)
def test_a_batch_that_stands_in_adds_nothing_but_types(name: str):
    model, metric, other = Mixed(nn.Linear(3, 2), 2), METRICS[name](), METRICS[name]()
    batch = make_data(5)
    outputs = model(batch).detach()
    for _ in range(2):
        update_metrics(model, batch, outputs, {name: metric}, counts=False)
    for value in metric.metric_state.values():
        assert not isinstance(value, list) or [len(one) for one in value] == [0]
    for one in (metric, other):
        update_metrics(model, batch, outputs, {name: one}, counts=True)
    torch.testing.assert_close(metric.compute(), other.compute())
    update_metrics(model, batch, outputs, {name: metric}, counts=False)
    torch.testing.assert_close(metric.compute(), other.compute())


def test_emptied_states_keep_their_types():
    metric = BinaryAUROC(validate_args=False)
    metric.update(torch.rand(4, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
    empty(metric)
    assert [one.dtype for one in metric.preds] == [torch.float64] and [one.dtype for one in metric.target] == [
        torch.int64
    ]
    assert [len(one) for one in (*metric.preds, *metric.target)] == [0, 0]


def test_a_metric_with_several_values_is_logged_element_by_element():
    value = {"per_class": torch.tensor([0.5, 1.0]), "mean": torch.tensor(0.75)}
    assert {key: float(one) for key, one in scalars("metrics/eval/F1", value).items()} == {
        "metrics/eval/F1/per_class/0": 0.5,
        "metrics/eval/F1/per_class/1": 1.0,
        "metrics/eval/F1/mean": 0.75,
    }
    assert scalars("k", [torch.ones(1, 1), 2.0]) == {"k/0": torch.ones(1, 1), "k/1": 2.0}
