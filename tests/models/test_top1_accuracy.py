"""The accuracy of classifiers, against torchmetrics' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from runner import ClassificationModel
from runner.models.top1_accuracy import Top1Accuracy


def batches(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Logits and targets, with ties among the logits and some targets that no logit is of."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randint(4, (size, 7, *shape), generator=generator).float() for size in (5, 5, 3)]
    targets = [torch.randint(7, (len(one), *shape), generator=generator) for one in logits]
    targets[1][0] = -100
    return list(zip(logits, targets, strict=True))


@pytest.mark.parametrize("shape", [(), (3, 2)], ids=["(N, C)", "(N, C, H, W)"])
@pytest.mark.parametrize("as_classes", [False, True])
def test_it_is_torchmetrics_to_the_bit(shape: tuple[int, ...], as_classes: bool):
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


def test_it_goes_on_from_its_state():
    ours, later = Top1Accuracy(), Top1Accuracy()
    ours.persistent(True)
    first, second, _ = batches()
    ours.update(*first)
    later.persistent(True)
    later.load_state_dict(ours.state_dict())
    for one in (ours, later):
        one.update(*second)
    assert torch.equal(ours.compute(), later.compute())


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="must match"):
        Top1Accuracy().update(torch.zeros(4, 7), torch.zeros(4, 1, dtype=torch.int64))


def test_classifiers_use_it_under_the_usual_name():
    (metric,) = ClassificationModel(torch.nn.Linear(2, 2), 2).metrics(train=True).items()
    assert metric[0] == "MulticlassAccuracy" and isinstance(metric[1], Top1Accuracy)
