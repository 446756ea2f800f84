from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import LanguageModel
from runner.algorithms import ALiBi, QKNorm, RotaryEmbedding
from runner.algorithms.rotary_embedding import rotate
from runner.models.gpt import GPT, Attention


def rotate_as_complex(x: Tensor, base: float) -> Tensor:
    """Return the rotation by its definition: pairs are complex numbers, multiplied by e^(i t theta)."""
    half = x.shape[-1] // 2
    thetas = torch.tensor([base ** (-2 * index / x.shape[-1]) for index in range(half)], dtype=torch.float64)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * thetas
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def attend(attention: Attention, x: Tensor, base: float) -> Tensor:
    """Return causal attention with rotary positions, by its formula."""
    q, k, v = attention.qkv(x).view(*x.shape[:2], 3, attention.n_heads, -1).permute(2, 0, 3, 1, 4)
    scores = rotate_as_complex(q, base) @ rotate_as_complex(k, base).mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return attention.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_pairs_are_rotated_like_complex_numbers(base: float):
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, base), rotate_as_complex(x, base))


def test_products_of_queries_and_keys_depend_on_their_distance_alone():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).expand(2, 20, 8)  # the same at each position
    products = rotate(q, 100.0) @ rotate(k, 100.0).mT
    for distance in range(-19, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0].unique().numel() == 20


def test_bfloat16_inputs_keep_their_dtype_and_get_exact_angles():
    x = torch.randn(1000, 4)
    turned = rotate(x.bfloat16(), 10.0)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(x.bfloat16().double(), 10.0).bfloat16(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_the_attention_of_a_gpt_sees_rotary_positions_and_no_others(make_trainer, language, base: float):
    with make_trainer(RotaryEmbedding(base), **language) as trainer:
        gpt = trainer.state.unwrapped_model.module
        assert gpt.position_embedding is None
        x = torch.randn(3, 10, 16, dtype=torch.float64)
        for block in gpt.blocks:
            torch.testing.assert_close(
                block.attention(x, torch.zeros(3, 10, dtype=torch.int64)), attend(block.attention, x, base)
            )
        longer = torch.randint(11, (2, 30))
        assert gpt(longer).shape == (2, 30, 11)


def test_queries_and_keys_are_rotated_after_normalization(make_trainer, language):
    with make_trainer(RotaryEmbedding(), QKNorm(), **language) as trainer:
        assert [type(algorithm) for algorithm in trainer.state.algorithms] == [QKNorm, RotaryEmbedding]
        attention = trainer.state.unwrapped_model.module.blocks[0].attention
        # The order matters only if the two elements of a pair have different factors.
        nn.init.normal_(attention.q_norm.weight)
        seen = []
        attention.attend.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        x = torch.randn(1, 5, 16, dtype=torch.float64)
        attention(x, torch.zeros(1, 5, dtype=torch.int64))
        q = attention.qkv(x)[..., :16].unflatten(-1, (4, 4)).transpose(1, 2)
        torch.testing.assert_close(seen[0], rotate_as_complex(attention.q_norm(q), 10000.0))


def test_an_existing_optimizer_loses_the_learned_positions(make_trainer, language):
    model = language["build"]()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_trainer(RotaryEmbedding(), **language, model=model, optimizers=optimizer) as trainer:
        assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
        trainer.fit()
    assert set(twin.state_dict()) - set(model.state_dict()) == {"module.position_embedding.weight"}


def test_unsuitable_arguments_and_models_are_refused(make_trainer, language):
    with pytest.raises(ValueError, match="base=1"):
        RotaryEmbedding(1)
    with pytest.raises(ValueError, match="RotaryEmbedding found no attention"):
        make_trainer(RotaryEmbedding())
    make_trainer(RotaryEmbedding(allow_no_match=True)).close()
    with pytest.raises(ValueError, match="cannot be combined"):
        make_trainer(RotaryEmbedding(), ALiBi(12), **language)


def test_heads_of_odd_width_are_refused(make_trainer, language):
    odd = LanguageModel(GPT(d_model=12, n_heads=4))
    with pytest.raises(ValueError, match="the model's heads have an odd width, 3"):
        make_trainer(RotaryEmbedding(), **language, model=odd)


def test_tables_follow_the_length_and_dtype_of_sequences(make_trainer, language):
    with make_trainer(RotaryEmbedding(50.0), **language) as trainer:
        attentions = [module for module in trainer.state.unwrapped_model.modules() if isinstance(module, Attention)]
        assert len({attention.rotary.tables for attention in attentions}) == 1
        rotary = attentions[0].rotary
        with torch.inference_mode():
            rotary(torch.randn(1, 2, 6, 8))
        for shape, dtype in (
            ((1, 2, 6, 8), torch.float32),
            ((1, 2, 9, 8), torch.float32),
            ((1, 2, 9, 8), torch.float64),
        ):
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            assert torch.equal(rotary(x), rotate(x, 50.0))
            rotary(x).sum().backward()
        tables: Any = rotary.tables
        assert tables.get(x)[0] is tables.get(x)[0]
