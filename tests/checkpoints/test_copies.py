"""Copies of tensors in memory that is used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.checkpoints.copies import Copies


def copy_all(copies: Copies, tensors: list[Tensor]) -> list[Tensor]:
    copies.reuse()
    copied = [copies.copy(one) for one in tensors]
    copies.finish()
    return copied


def test_values_arrive_whatever_the_layout():
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
        for one, its in zip(copy_all(copies, values), values, strict=True):
            assert torch.equal(one.to_dense(), its.to_dense()) and (one.dtype, one.layout) == (its.dtype, its.layout)
        values = [one + one for one in values]


def test_the_next_copies_take_the_memory_of_the_last_ones():
    weights = [torch.arange(3.0), torch.arange(4.0)]
    copies = Copies()
    first = copy_all(copies, weights)
    for one in weights:
        one.zero_()
    assert [one.tolist() for one in first] == [[0, 1, 2], [0, 1, 2, 3]]  # training does not change them
    second = copy_all(copies, weights)
    assert [one.data_ptr() for one in second] == [one.data_ptr() for one in first]
    assert not any(one.any() for one in second)


@pytest.mark.parametrize("changed", [[4, 3, 5], [3], [3, 4, 5, 6], [5, 3, 4], []])
def test_tensors_that_come_go_or_change_are_copied(changed: list[int]):
    copies = Copies()
    copy_all(copies, [torch.arange(float(size)) for size in (3, 4, 5)])
    assert [one.tolist() for one in copy_all(copies, [torch.ones(size) for size in changed])] == [
        [1.0] * size for size in changed
    ]


def test_what_was_left_pending_by_a_failure_is_forgotten():
    copies = Copies()
    (kept,) = copy_all(copies, [torch.ones(2)])
    copies.reuse()
    copies.copy(torch.zeros(2))
    copies.reuse()
    copies.finish()
    assert kept.tolist() == [1, 1]
