from typing import Any

import pytest
import torch

from runner.data import load_synthetic_images


def test_classes_are_equally_frequent():
    train, evaluation = load_synthetic_images(
        num_samples=50, num_classes=4, channels=2, size=6, batch_size=8, eval_samples=12, eval_batch_size=5
    )
    images, labels = next(iter(train))
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == ((8, 2, 6, 6), torch.float32, (8,), torch.int64)
    assert sorted(train.tensors[1].bincount().tolist()) == [12, 12, 13, 13]
    assert [len(labels) for _, labels in evaluation] == [5, 5, 2]


def test_class_means_of_training_images_classify_evaluation_images():
    train, evaluation = load_synthetic_images(num_samples=200, eval_samples=100, noise=2.0)
    images, labels = train.tensors
    means = torch.stack([images[labels == number].mean(dim=0) for number in range(10)]).flatten(1)
    nearest = torch.cdist(evaluation.tensors[0].flatten(1), means).argmin(dim=1)
    assert (nearest == evaluation.tensors[1]).double().mean() > 0.99


def test_noise_is_the_standard_deviation_of_pixels():
    images, labels = load_synthetic_images(num_samples=400, num_classes=2, noise=0.5)[0].tensors
    assert images[labels == 0].std(dim=0).mean().item() == pytest.approx(0.5, rel=0.02)


def test_images_depend_on_the_seed():
    first, again, different = (load_synthetic_images(num_samples=10, seed=seed)[0].tensors[0] for seed in (0, 0, 1))
    torch.testing.assert_close(first, again)
    assert not torch.allclose(first, different)


@pytest.mark.parametrize(
    "argument", [{"num_samples": 0}, {"num_classes": 0}, {"size": -1}, {"noise": -1.0}, {"eval_samples": 0}], ids=str
)
def test_errors_name_the_wrong_argument(argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be a (whole )?number, at least"):
        load_synthetic_images(**argument)


def test_test_images_are_drawn_after_all_others():
    whole = load_synthetic_images(num_samples=20, eval_samples=10)
    *before, test = load_synthetic_images(num_samples=20, eval_samples=10, test_samples=30)
    for loader, expected in zip(before, whole, strict=True):
        assert all(map(torch.equal, loader.tensors, expected.tensors))
    assert test.tensors[1].bincount().tolist() == [3] * 10 and not test.order.shuffle
    fakes: Any = vars(load_synthetic_images)["fake"](test_samples=30)
    assert [loader.order.num_samples for loader in fakes] == [1024, 256, 30]
    with pytest.raises(ValueError, match="test_samples=-1: must be a whole number, at least 0"):
        load_synthetic_images(test_samples=-1)
