from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.algorithms import ValueEmbedding


def test_outputs_are_bit_identical_before_training(make_trainer, language):
    tokens = torch.randint(11, (3, 12))
    expected = language["build"]().module(tokens)
    with make_trainer(ValueEmbedding(), **language) as trainer:
        torch.testing.assert_close(trainer.state.unwrapped_model.module(tokens), expected, rtol=0, atol=0)


def test_the_vector_of_a_token_is_added_to_its_attention_values(make_trainer, language):
    with make_trainer(ValueEmbedding(), **language) as trainer:
        attention = trainer.state.unwrapped_model.module.blocks[1].attention
        nn.init.normal_(attention.value_embedding.weight)
        x, tokens = torch.randn(3, 10, 16, dtype=torch.float64), torch.randint(11, (3, 10))
        q, k, v = attention.qkv(x).chunk(3, dim=-1)
        v = v + attention.value_embedding.weight[tokens]
        heads = F.scaled_dot_product_attention(
            *(x.view(3, 10, 4, 4).transpose(1, 2) for x in (q, k, v)), is_causal=True
        )
        expected = attention.out(heads.transpose(1, 2).reshape(3, 10, 16))
        torch.testing.assert_close(attention(x, tokens), expected)


@pytest.mark.parametrize(("layers", "expected"), [(None, [0, 1]), ([0], [0]), ([-1], [1]), ([0, -1], [0, 1])])
def test_only_the_chosen_layers_learn_vectors(make_trainer, language, layers: Any, expected: list[int]):
    with make_trainer(ValueEmbedding(layers), **language) as trainer:
        trainer.fit()
        blocks = trainer.state.unwrapped_model.module.blocks
        tables = [block.attention.value_embedding for block in blocks]
        assert [index for index, table in enumerate(tables) if table is not None] == expected
        assert all((table.weight != 0).all() for table in tables if table is not None)


def test_an_existing_optimizer_gets_the_new_weights(make_trainer, language):
    model = language["build"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_trainer(ValueEmbedding(), **language, model=model, optimizers=optimizer):
        assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
        assert model.module.flops_per_token(12) == language["build"]().module.flops_per_token(12)


def test_unsuitable_arguments_and_models_are_refused(make_trainer, language):
    for layers in ([], "01", 1, [True], [0.5]):
        with pytest.raises(ValueError, match="layers="):
            ValueEmbedding(layers)  # type: ignore[arg-type]
    for layer in (2, -3):
        with pytest.raises(ValueError, match=f"the model has 2 layers, no layer {layer}"):
            make_trainer(ValueEmbedding([layer]), **language)
    with pytest.raises(ValueError, match="ValueEmbedding found no runner.models.GPT"):
        make_trainer(ValueEmbedding())
    make_trainer(ValueEmbedding(allow_no_match=True)).close()
