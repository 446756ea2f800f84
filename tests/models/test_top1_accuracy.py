"""The accuracy of classifiers, compared with torchmetrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from runner import ClassificationModel
from runner.models.top1_accuracy import Top1Accuracy


def batches(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Return logits with ties, and targets, of which some are -100."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randint(4, (size, 7, *shape), generator=generator).float() for size in (5, 5, 3)]
    targets = [torch.randint(7, (len(rows), *shape), generator=generator) for rows in logits]
    targets[1][0] = -100
    return list(zip(logits, targets, strict=True))


@pytest.mark.parametrize("shape", [(), (3, 2)], ids=["(N, C)", "(N, C, H, W)"])
@pytest.mark.parametrize("as_classes", [False, True])
def test_top1_accuracy_equals_torchmetrics_bit_for_bit(shape: tuple[int, ...], as_classes: bool):
    ours, theirs = Top1Accuracy(), MulticlassAccuracy(7, average="micro", validate_args=False)
    for logits, targets in batches(*shape):
        outputs = logits.argmax(dim=1) if as_classes else logits
        ours.update(outputs, targets)
        theirs.update(outputs, targets)
        assert torch.equal(ours.compute(), theirs.compute()) and ours.compute().dtype == theirs.compute().dtype
    assert 0 < ours.compute() < 1
    ours.reset()
    theirs.reset()
    ours.update(*batches(*shape)[2])
    theirs.update(*batches(*shape)[2])
    assert torch.equal(ours.compute(), theirs.compute())


def test_top1_accuracy_continues_from_a_saved_state():
    original, loaded = Top1Accuracy(), Top1Accuracy()
    original.persistent(True)
    first, second, _ = batches()
    original.update(*first)
    loaded.persistent(True)
    loaded.load_state_dict(original.state_dict())
    original.update(*second)
    loaded.update(*second)
    assert torch.equal(original.compute(), loaded.compute())


def test_outputs_and_targets_of_different_shapes_are_refused():
    with pytest.raises(RuntimeError, match="must match"):
        Top1Accuracy().update(torch.zeros(4, 7), torch.zeros(4, 1, dtype=torch.int64))


def test_classifiers_report_top1_accuracy_under_the_name_of_torchmetrics():
    ((name, metric),) = ClassificationModel(torch.nn.Linear(2, 2), 2).metrics(train=True).items()
    assert name == "MulticlassAccuracy" and isinstance(metric, Top1Accuracy)
