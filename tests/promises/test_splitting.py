"""Microbatches and ranks are weighted so that any split gives the gradient of the whole batch.

The expected gradients are computed by hand in float64, or by a single process. Evaluation sees each sample once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients import SPLITS, assert_equal, gradient, train
from rank_models import VOCABULARY, Classifier, class_data, language_model, seeded
from rank_runs import CASES, Everything, evaluate_each_size, program_of
from rank_runs import train as train_case
from torch import Tensor, nn

from runner import ClassificationModel


def ragged_data(valid: list[int], length: int = 6) -> tuple[Tensor, Tensor]:
    """Return sequences in which only the first `valid[i]` targets of sequence i are not ignored."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (len(valid), length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, count in enumerate(valid):
        targets[row, count:] = -100
    return tokens[:, :-1].contiguous(), targets


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(5, 4), (5, 5), (10, 8), (7, 4)])
def test_microbatches_give_the_gradient_of_the_batch(num_samples: int, batch_size: int, split: dict[str, Any]):
    # With (5, 4), the second batch has a single sample, which is fewer than the number of microbatches.
    model, data = Classifier(), class_data(num_samples)
    recorded = train(model, data, batch_size, **split)
    batches = [tuple(t[i : i + batch_size] for t in data) for i in range(0, num_samples, batch_size)]
    assert len(recorded.gradients) == len(batches)
    for actual, total, (inputs, targets) in zip(recorded.gradients, recorded.totals, batches, strict=True):
        loss = F.cross_entropy(model.get_submodule("module")(inputs), targets)
        assert_equal(actual, gradient(model, loss))
        assert_equal(total, loss.detach())


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    "valid", [[6, 1, 2, 5, 3], [6, 0, 0, 4, 0], [0, 0, 0, 0, 6], [1, 1, 1, 1, 1]], ids=lambda v: "-".join(map(str, v))
)
def test_ragged_token_counts_give_the_gradient_of_the_batch(valid: list[int], split: dict[str, Any]):
    model, data = language_model(), ragged_data(valid)
    recorded = train(model, data, len(valid), **split)
    logits = model.get_submodule("module")(data[0])
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), data[1].reshape(-1), ignore_index=-100)
    assert_equal(recorded.gradients[0], gradient(model, loss))
    assert_equal(recorded.totals[0], loss.detach())


@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}], ids=str)
def test_a_batch_without_a_valid_target_has_zero_gradients(split: dict[str, Any]):
    recorded = train(language_model(), ragged_data([0, 0, 0]), 3, **split)
    assert all(not g.any() for g in recorded.gradients[0])
    assert float(recorded.totals[0]) == 0.0


def test_a_loss_with_its_own_weights_gives_the_gradient_of_the_batch():
    class PerPixel(ClassificationModel):
        """A classifier whose loss is a mean over the positive inputs."""

        def loss(self, outputs, batch):
            mask = batch[0] > 0
            per_sample = F.cross_entropy(outputs, batch[1], reduction="none")
            return (per_sample * mask.sum(1)).sum() / mask.sum()

        def loss_weight(self, batch):
            return int((batch[0] > 0).sum())  # an int, not a tensor

    model, data = PerPixel(seeded(lambda: nn.Linear(3, 4)), 4), class_data(9)
    data[0][:, 0] = 1.0
    recorded = train(model, data, 9, grad_accum=4)
    whole = model.loss(model(data), data)
    assert_equal(recorded.gradients[0], gradient(model, whole))


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Any]]]:
    """A cache of the results of `ranks`, by the number of ranks."""
    return {}


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: Any, trained: Any, run_ranks: Any, tmp_path: Path, strict: Any) -> list[dict[str, Any]]:
    """The results of `rank_runs.train_and_evaluate` on each rank."""
    size = request.param
    if size not in trained:
        run_ranks(program_of("rank_runs", "train_and_evaluate"), size, env=strict)
        trained[size] = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
    return trained[size]


def test_ranks_train_the_same_weights_as_one_process(ranks: list[dict[str, Any]]):
    for name in CASES:
        alone = train_case(name)
        for rank in ranks:
            assert_close(rank["train"][name]["metrics"], alone["metrics"], name, 1e-6)  # metrics are in float32
            assert_close(rank["train"][name] | {"metrics": None}, alone | {"metrics": None}, name, 1e-9, 1e-12)


def test_all_ranks_have_identical_weights(ranks: list[dict[str, Any]]):
    for rank in ranks:
        for name in ("train", "mixup"):
            assert_close(rank[name], ranks[0][name], name)
        assert_close(rank["train"]["windows, declared"], rank["train"]["windows"], "equal targets")


def test_all_ranks_use_the_microbatch_size_that_fits_on_the_smallest_rank(ranks: list[dict[str, Any]]):
    for rank in ranks:
        (automatic_size, weights), (size, expected) = rank["auto"]
        assert automatic_size == size == 2
        assert_close(weights, expected, "auto", 1e-12, 1e-15)


def test_evaluation_on_ranks_sees_each_sample_once(ranks: list[dict[str, Any]]):
    for samples, alone in evaluate_each_size().items():
        for rank in ranks:
            assert rank["eval"][samples]["samples"] == alone["samples"] == samples
            assert_close(rank["eval"][samples]["values"], alone["values"], f"{samples} samples", 1e-6)


def test_evaluation_equals_metrics_computed_by_hand():
    model = Everything()
    for n, result in evaluate_each_size().items():
        inputs, targets = class_data(n)
        with torch.no_grad():
            logits = model.module(inputs)
        values = result["values"]
        assert float(values["accuracy"]) == pytest.approx(float((logits.argmax(1) == targets).double().mean()))
        assert float(values["loss"]) == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-12)
        assert values["kept"].tolist() == pytest.approx(inputs[:, 0].sort().values.tolist(), rel=1e-6)
        assert result["samples"] == n


def assert_close(actual: Any, expected: Any, name: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda message: f"{name}: {message}")
