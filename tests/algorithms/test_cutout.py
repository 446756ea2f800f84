from __future__ import annotations

import pytest
import torch

from runner import ClassificationModel, Trainer
from runner.algorithms import CutOut
from runner.algorithms.cutout import cut_out
from runner.data import TensorLoader


def test_holes_are_zeros_and_nothing_else_changes():
    images = torch.rand(2, 3, 5, 6) + 1
    holes = torch.tensor([[[0, 0, 2, 3], [1, 1, 3, 4]], [[4, 5, 5, 6], [2, 2, 2, 2]]])
    expected = images.clone()
    expected[0, :, 0:2, 0:3] = 0
    expected[0, :, 1:3, 1:4] = 0
    expected[1, :, 4:5, 5:6] = 0
    assert torch.equal(cut_out(images, holes), expected)


@pytest.mark.parametrize("num_holes", [1, 3])
def test_each_image_has_its_own_holes(train, num_holes: int):
    batches = train(CutOut(num_holes, length=0.25), max_duration="4ep").batches
    holes = torch.cat([images for images, _ in batches]).eq(0)
    assert torch.equal(holes[:, 0], holes[:, 1])  # the same in all channels
    counts = holes[:, 0].sum(dim=(1, 2))
    assert counts.min() >= 1
    assert counts.max() == num_holes
    boxes = holes[:, 0].flatten(1).unbind()
    assert len({tuple(box.tolist()) for box in boxes[:8]}) > 4  # images have different holes
    assert not torch.equal(holes[:8], holes[8:16])


def test_holes_are_rectangles_with_sides_of_at_most_length(train):
    for images, _ in train(CutOut(length=0.5, uniform_sampling=True)).batches:
        holes = images[:, 0].eq(0)
        sides = holes.any(dim=2).sum(dim=1), holes.any(dim=1).sum(dim=1)
        assert all(side.min() >= 1 and side.max() <= 2 for side in sides)
        assert torch.equal(holes.sum(dim=(1, 2)), sides[0] * sides[1])


def test_images_in_memory_and_in_evaluation_get_no_holes(tmp_path):
    images = torch.rand(8, 1, 4, 4) + 1
    seen = []

    class Model(ClassificationModel):
        def forward(self, batch):
            seen.append(batch[0].eq(0).any().item())
            return self.module(batch[0])

    loader = TensorLoader(images, torch.zeros(8, dtype=torch.int64), batch_size=8, shuffle=False)
    model = Model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)), 2)
    arguments = {"model": model, "train_dataloader": loader, "eval_dataloader": loader, "run_dir": tmp_path}
    with Trainer(**arguments, optimizers=torch.optim.SGD, device="cpu", algorithms=[CutOut()]) as trainer:
        trainer.fit()
    assert seen == [True, False]  # in training, not in evaluation
    assert images.min() >= 1


@pytest.mark.parametrize("arguments", [{"num_holes": 0}, {"num_holes": 1.5}, {"length": 0}, {"length": 1.1}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        CutOut(**arguments)
