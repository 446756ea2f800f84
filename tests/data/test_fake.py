"""Loaders of made-up batches, compared with the real loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.data import (
    FakeLoader,
    faked_by,
    load_digits,
    load_stdlib_text,
    load_synthetic_images,
    load_synthetic_tokens,
)


@pytest.mark.parametrize(
    ("load", "arguments"),
    [
        (load_digits, {"batch_size": 70, "eval_batch_size": 100, "test_samples": 7}),
        (load_stdlib_text, {"context": 50, "batch_size": 700, "eval_bytes": 5000, "eval_batch_size": 30}),
        (load_stdlib_text, {"context": 50, "batch_size": 700, "test_bytes": 5000, "eval_batch_size": 30}),
        (load_synthetic_images, {"num_samples": 70, "num_classes": 3, "channels": 2, "size": 5, "eval_samples": 9}),
        (
            load_synthetic_tokens,
            {"num_samples": 70, "context": 6, "vocab_size": 5, "eval_samples": 9, "test_samples": 5},
        ),
    ],
)
@pytest.mark.parametrize("defaults", [True, False])
def test_fake_batches_resemble_real_ones(load: Any, arguments: dict[str, Any], defaults: bool):
    arguments = {} if defaults else arguments
    for real, fake in zip(load(**arguments), load.fake(**arguments), strict=True):
        assert isinstance(fake, FakeLoader)
        assert (len(fake), fake.order.num_samples) == (len(real), real.order.num_samples)
        real.seek(0, 0)
        fake_batch = next(iter(fake))
        for tensor, fake_tensor in zip(next(iter(real)), fake_batch, strict=True):
            assert (tensor.shape, tensor.dtype) == (fake_tensor.shape, fake_tensor.dtype)
        largest = real.tensors[-1].max().item() if load is not load_stdlib_text else 255
        if not fake_batch[-1].is_floating_point():  # the largest class
            assert fake_batch[-1].max().item() == largest


@pytest.mark.parametrize(
    ("load", "wrong"),
    [
        (load_digits, {"batch_size": 0}),
        (load_stdlib_text, {"context": 0}),
        (load_stdlib_text, {"eval_bytes": 3}),
        (load_stdlib_text, {"test_bytes": 3}),
        (load_stdlib_text, {"context": 10**9, "eval_bytes": 10**9}),
        (load_synthetic_images, {"channels": 0}),
        (load_synthetic_images, {"noise": -1.0}),
        (load_synthetic_tokens, {"vocab_size": 1}),
        (load_synthetic_tokens, {"eval_samples": 0}),
        (load_synthetic_tokens, {"test_samples": -1}),
    ],
)
def test_fake_loaders_refuse_the_same_arguments(load: Any, wrong: dict[str, Any]):
    with pytest.raises(ValueError) as real_error:
        load(**wrong)
    with pytest.raises(ValueError) as fake_error:
        load.fake(**wrong)
    assert str(fake_error.value) == str(real_error.value)


def test_a_fake_loader_starts_at_the_position_of_seek():
    loader = FakeLoader(lambda samples: torch.zeros(samples), num_samples=10, batch_size=4)
    assert [len(batch) for batch in loader] == [4, 4, 2]
    loader.seek(0, 2)
    assert [len(batch) for batch in loader] == [2]


def test_faked_by_passes_all_arguments_including_defaults():
    @faked_by(lambda **arguments: arguments)
    def load(a: int, b: int = 2, *, c: int = 3) -> str:
        """Return the real loaders."""
        return "real"

    assert load(1) == "real" and load.__doc__ == "Return the real loaders."
    assert vars(load)["fake"](1, c=4) == {"a": 1, "b": 2, "c": 4}
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        vars(load)["fake"]()
