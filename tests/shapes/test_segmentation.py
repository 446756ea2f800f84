"""Segmentation with several evaluations per epoch, in batches of any size, compared with a hand-written loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torchmetrics.classification import MulticlassJaccardIndex

from runner import Callback, Model, Trainer
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader

CLASSES, BATCH_SIZE, EPOCHS = 3, 4, 2
EVALUATED_AT = [3, 5, 6, 9, 10]  # every third batch, and the end of each epoch of 5 batches


def make_data(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images `(N, 2, 6, 6)` and the class of each pixel `(N, 6, 6)`."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 2, 6, 6, generator=generator)
    return images, (images[:, 0] > 0).long() + (images[:, 1] > 0.5).long()


Evaluations = dict[int, tuple[float, float]]
"""The loss and the mean intersection over union, keyed by the number of batches trained."""

TRAIN, EVALUATION = make_data(18, 0), make_data(11, 1)


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, CLASSES, 1))


class Segmentation(Model):
    def __init__(self) -> None:
        super().__init__()
        self.module = make_network()

    def forward(self, batch):
        return self.module(batch[0])

    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch[1])

    def metrics(self, train: bool):
        return {} if train else {"iou": MulticlassJaccardIndex(CLASSES)}


class EvaluationRecorder(Callback):
    """Records the loss and the metric of each evaluation."""

    def __init__(self) -> None:
        self.evaluations: Evaluations = {}

    def eval_end(self, state, logger):
        values = state.eval_metric_values["eval"]
        self.evaluations[state.timestamp.batch] = float(values["loss"]), float(values["iou"])


def is_due(state) -> bool:
    """Evaluate every three batches, and at the end of an epoch."""
    return state.timestamp.batch % 3 == 0 or state.timestamp.batch_in_epoch == 0


def fit(duration: str, eval_batch_size: int = 4, **arguments) -> tuple[dict[str, Tensor], Evaluations]:
    model, recorder = Segmentation(), EvaluationRecorder()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*TRAIN, batch_size=BATCH_SIZE, shuffle=False),
        eval_dataloader=TensorLoader(*EVALUATION, batch_size=eval_batch_size, shuffle=False),
        eval_interval=is_due,
        optimizers=lambda parameters: SGD(parameters, lr=0.3, momentum=0.9),
        max_duration=duration,
        callbacks=[recorder, *arguments.pop("callbacks", [])],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}, recorder.evaluations


def evaluate_by_hand(network: nn.Module) -> tuple[float, float]:
    images, targets = EVALUATION
    network.eval()
    with torch.no_grad():
        logits = network(images)
    network.train()
    predicted = logits.argmax(1)
    ious = []
    for label in range(CLASSES):
        union = ((predicted == label) | (targets == label)).sum()
        ious.append(float(((predicted == label) & (targets == label)).sum() / union))
    return float(cross_entropy(logits, targets)), sum(ious) / CLASSES


def fit_by_hand() -> tuple[dict[str, Tensor], Evaluations]:
    network, values = make_network(), {}
    optimizer = SGD(network.parameters(), lr=0.3, momentum=0.9)
    trained = 0
    for _ in range(EPOCHS):
        for images, targets in zip(*(part.split(BATCH_SIZE) for part in TRAIN), strict=True):
            optimizer.zero_grad()
            cross_entropy(network(images), targets).backward()
            optimizer.step()
            trained += 1
            if trained in EVALUATED_AT:
                values[trained] = evaluate_by_hand(network)
    return dict(network.state_dict()), values


@pytest.mark.parametrize("eval_batch_size", [1, 4, 11])
def test_segmentation_trains_and_evaluates_like_a_hand_written_loop(eval_batch_size: int):
    (trained, values), (expected, expected_values) = fit(f"{EPOCHS}ep", eval_batch_size), fit_by_hand()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    assert [*values] == EVALUATED_AT
    for batch, measured in values.items():
        assert measured == pytest.approx(expected_values[batch], rel=1e-5), batch
    assert values[10][0] < values[3][0] and values[10][1] > values[3][1]


@pytest.mark.parametrize("stop", ["3ba", "1ep", "7ba"])
def test_segmentation_resumes_bit_for_bit_and_evaluates_at_the_same_batches(stop: str, tmp_path: Path):
    fit(stop, run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba")])
    resumed, values = fit(f"{EPOCHS}ep", resume_path=tmp_path)
    whole, whole_values = fit(f"{EPOCHS}ep")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert values and values.items() <= whole_values.items()
