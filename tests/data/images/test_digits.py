import time
from typing import Any

import pytest
import torch
from sklearn import datasets

from runner.data import load_digits
from runner.data.images import digits


def test_pixels_and_labels_equal_those_of_scikit_learn():
    truth: Any = datasets.load_digits()
    pixels = torch.from_numpy(truth.images).unsqueeze(1)
    labels = torch.from_numpy(truth.target)
    train, evaluation = load_digits()
    images = torch.cat([train.tensors[0], evaluation.tensors[0]]).double()
    assert images.shape == (1797, 1, 8, 8)
    torch.testing.assert_close(torch.cat([train.tensors[1], evaluation.tensors[1]]), labels)
    torch.testing.assert_close(images * 16, pixels, atol=0, rtol=0)


def test_the_background_is_zero_and_the_split_is_1200_to_597():
    train, evaluation = load_digits(batch_size=50, eval_batch_size=100, seed=3)
    images, labels = train.tensors
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (images.min(), images.max(), images.median()) == (0, 1, 0.0625)
    assert (len(train), len(evaluation)) == (24, 6)
    assert (train.order.shuffle, train.order.seed, evaluation.order.shuffle) == (True, 3, False)
    assert sum(len(labels) for _, labels in evaluation) == 597


def test_reading_is_fast():
    seconds = []
    for _ in range(5):
        start = time.process_time()
        load_digits()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1  # CPU seconds; about 0.01 on an idle machine, while importing scikit-learn takes 2


def test_a_missing_scikit_learn_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        load_digits()


def test_a_scikit_learn_without_the_data_is_an_error(monkeypatch, tmp_path):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr(digits, "find_spec", lambda name: Spec)
    with pytest.raises(FileNotFoundError, match=r"digits\.csv\.gz is missing"):
        load_digits()


def test_the_last_digits_are_held_out_for_testing():
    whole = load_digits()
    train, evaluation, test = load_digits(test_samples=197)
    assert torch.equal(train.tensors[0], whole[0].tensors[0])
    for index in (0, 1):
        held_out = torch.cat([evaluation.tensors[index], test.tensors[index]])
        assert torch.equal(held_out, whole[1].tensors[index])
    fakes: Any = vars(load_digits)["fake"](test_samples=197)
    assert [loader.order.num_samples for loader in fakes] == [1200, 400, 197]
    for wrong in (-1, 597):
        with pytest.raises(ValueError, match=f"test_samples={wrong}: must be a whole number from 0 to 596"):
            load_digits(test_samples=wrong)
