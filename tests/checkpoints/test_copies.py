"""Copies of tensors into memory that is reused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.checkpoints.copies import Copies


def copy_all(copies: Copies, tensors: list[Tensor]) -> list[Tensor]:
    copies.reuse()
    copied = [copies.copy(tensor) for tensor in tensors]
    copies.finish()
    return copied


def test_tensors_of_any_layout_are_copied():
    values = [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7),
        torch.empty(0),
        torch.ones(3, dtype=torch.bool),
        torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.arange(4)[::2],  # with gaps
        torch.arange(2).expand(3, 2),
        torch.eye(2).to_sparse(),
    ]
    copies = Copies()
    for _ in range(3):
        for copy, value in zip(copy_all(copies, values), values, strict=True):
            assert torch.equal(copy.to_dense(), value.to_dense())
            assert (copy.dtype, copy.layout) == (value.dtype, value.layout)
        values = [value + value for value in values]


def test_the_next_copies_reuse_the_memory_of_the_previous_ones():
    weights = [torch.arange(3.0), torch.arange(4.0)]
    copies = Copies()
    first = copy_all(copies, weights)
    for weight in weights:
        weight.zero_()
    assert [copy.tolist() for copy in first] == [[0, 1, 2], [0, 1, 2, 3]]
    second = copy_all(copies, weights)
    assert [copy.data_ptr() for copy in second] == [copy.data_ptr() for copy in first]
    assert not any(copy.any() for copy in second)


@pytest.mark.parametrize("sizes", [[4, 3, 5], [3], [3, 4, 5, 6], [5, 3, 4], []])
def test_the_next_copies_can_have_other_numbers_and_sizes_of_tensors(sizes: list[int]):
    copies = Copies()
    copy_all(copies, [torch.arange(float(size)) for size in (3, 4, 5)])
    copied = copy_all(copies, [torch.ones(size) for size in sizes])
    assert [copy.tolist() for copy in copied] == [[1.0] * size for size in sizes]


def test_a_copy_that_a_failure_left_unfinished_is_dropped():
    copies = Copies()
    (finished,) = copy_all(copies, [torch.ones(2)])
    copies.reuse()
    copies.copy(torch.zeros(2))
    copies.reuse()
    copies.finish()
    assert finished.tolist() == [1, 1]
