"""Bits per token, compared with arithmetic in plain Python."""

import math

import pytest
import torch

from runner.models.bits_per_token import BitsPerToken


def test_uniform_logits_over_bytes_have_eight_bits_per_byte():
    metric = BitsPerToken()
    metric.update(torch.zeros(2, 5, 256), torch.randint(256, (2, 5)))
    torch.testing.assert_close(metric.compute(), torch.tensor(8.0))


def test_the_mean_is_over_valid_tokens_and_not_over_batches():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 4, 11, generator=generator, dtype=torch.float64)
    targets = torch.randint(11, (7, 4), generator=generator)
    targets[0, :3] = -100
    targets[5] = -100
    total, count = 0.0, 0
    for row, target in zip(logits.reshape(-1, 11).tolist(), targets.flatten().tolist(), strict=True):
        if target != -100:
            total -= math.log2(math.exp(row[target]) / sum(math.exp(value) for value in row))
            count += 1
    metric = BitsPerToken()
    for start, stop in [(0, 1), (1, 5), (5, 6), (6, 7)]:
        metric.update(logits[start:stop].float(), targets[start:stop])
    assert metric.compute().item() == pytest.approx(total / count, rel=1e-6)
    assert metric.tokens == count == 21


def test_bits_of_bfloat16_logits_are_summed_in_float32():
    logits = torch.zeros(1, 4096, 256, dtype=torch.bfloat16)
    metric = BitsPerToken()
    metric.update(logits, torch.zeros(1, 4096, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(8.0, rel=1e-5)


def test_reset_clears_tokens_and_bits():
    metric = BitsPerToken(ignore_index=0)
    metric.update(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
    assert metric.tokens == 2
    metric.reset()
    assert metric.tokens == metric.bits == 0
