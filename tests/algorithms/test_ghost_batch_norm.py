from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import ClassificationModel
from runner.algorithms import GhostBatchNorm
from runner.algorithms.ghost_batch_norm import normalize_in_chunks

INPUTS = torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("size", [4, 5, 12, 100])
def test_each_chunk_has_mean_zero_and_variance_one(size: int):
    norm = nn.BatchNorm2d(3, eps=1e-30).double()
    chunks = normalize_in_chunks(norm, INPUTS, size).chunk({4: 3, 5: 3}.get(size, 1))
    for chunk in chunks:
        torch.testing.assert_close(chunk.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64))
        torch.testing.assert_close(chunk.var((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64))


def test_running_statistics_are_those_of_consecutive_small_batches():
    norm, expected = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    outputs = normalize_in_chunks(norm, INPUTS, 4)
    torch.testing.assert_close(outputs, torch.cat([expected(INPUTS[start : start + 4]) for start in (0, 4, 8)]))
    torch.testing.assert_close(norm.state_dict(), expected.state_dict())


def test_chunks_are_as_equal_in_size_as_possible():
    seen = []
    norm = nn.Identity()
    norm.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    assert torch.equal(normalize_in_chunks(norm, INPUTS[:9], 4), INPUTS[:9])
    assert seen == [3, 3, 3]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_every_batch_norm_is_chunked_in_training_only(make_trainer, kind: type[nn.Module]):
    norm = kind(3).double()  # type: ignore[call-arg]
    plain = copy.deepcopy(norm)
    model = ClassificationModel(nn.Sequential(norm, nn.SyncBatchNorm(3)), 3)
    inputs = torch.randn(12, 3, *[2] * {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[kind]).double()
    with make_trainer(GhostBatchNorm(4), model=model) as trainer:
        ghost, other = trainer.state.unwrapped_model.module
        assert type(other) is nn.SyncBatchNorm
        torch.testing.assert_close(ghost.train()(inputs), torch.cat([plain(inputs[i : i + 4]) for i in (0, 4, 8)]))
        torch.testing.assert_close(ghost.eval()(inputs), plain.eval()(inputs))


def test_evaluation_normalizes_the_whole_batch_even_without_running_statistics(make_trainer):
    model = ClassificationModel(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False).double()), 3)
    with make_trainer(GhostBatchNorm(4), model=model):
        expected = F.batch_norm(INPUTS, None, None, training=True)
        torch.testing.assert_close(model.module.eval()(INPUTS), expected)


def test_a_chunk_as_large_as_the_batch_is_plain_batch_norm(train):
    torch.testing.assert_close(
        train(GhostBatchNorm(8), batch_norm=True).gradients, train(batch_norm=True).gradients, rtol=0, atol=0
    )


def test_microbatches_of_whole_chunks_change_nothing(make_trainer, train):
    whole = train(GhostBatchNorm(4), batch_norm=True)
    split = train(GhostBatchNorm(4), batch_norm=True, grad_accum=2)
    torch.testing.assert_close(split.gradients, whole.gradients)
    assert not torch.allclose(whole.gradients[0][0], train(batch_norm=True).gradients[0][0])


def test_wrong_arguments_are_refused(make_trainer):
    for size in (1, 2.5, True):
        with pytest.raises(ValueError, match=f"ghost_batch_size={size!r}"):
            GhostBatchNorm(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="GhostBatchNorm found no batch norm"):
        make_trainer(GhostBatchNorm())
    make_trainer(GhostBatchNorm(allow_no_match=True)).close()
