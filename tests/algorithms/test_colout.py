from __future__ import annotations

import pytest
import torch
from observers import Shapes

from runner.algorithms import ColOut
from runner.algorithms.colout import draw_kept, remove_lines


def test_remaining_rows_and_columns_keep_their_order():
    images = torch.rand(2, 3, 5, 6)
    smaller = remove_lines(images, torch.tensor([0, 2, 4]), torch.tensor([1, 5]))
    assert smaller.shape == (2, 3, 3, 2)
    for row, old_row in enumerate([0, 2, 4]):
        for column, old_column in enumerate([1, 5]):
            assert torch.equal(smaller[:, :, row, column], images[:, :, old_row, old_column])
    assert torch.equal(remove_lines(images, torch.arange(5), torch.arange(6)), images)


@pytest.mark.parametrize(("length", "share", "kept"), [(20, 0.15, 17), (8, 0.15, 6), (4, 0.0, 4), (4, 1.0, 1)])
def test_the_number_of_kept_lines_is_fixed(length: int, share: float, kept: int):
    draws = [draw_kept(length, share, torch.Generator().manual_seed(seed)) for seed in range(300)]
    assert all(len(draw) == kept and (draw.diff() > 0).all() for draw in draws)
    counts = torch.cat(draws).bincount(minlength=length)
    assert (counts > 300 * kept / length - 60).all()  # all are equally likely
    assert (counts < 300 * kept / length + 60).all()


def test_images_shrink_in_training_and_not_in_evaluation(make_trainer, resnet):
    shapes = Shapes()
    with make_trainer(ColOut(0.25, 0.5), build=resnet, callbacks=[shapes]) as trainer:
        trainer.fit()
    assert shapes.trained == {(8, 2, 3, 2)} and shapes.evaluated == {(8, 2, 4, 4)}


def test_removing_no_lines_changes_nothing(train):
    assert torch.equal(train(ColOut(0, 0)).gradients[5][0], train().gradients[5][0])


@pytest.mark.parametrize("arguments", [{"p_row": -0.1}, {"p_col": 1.5}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        ColOut(**arguments)
