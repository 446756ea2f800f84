from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import ClassificationModel
from runner.algorithms import Factorize, GatedLinearUnits
from runner.algorithms.gated_linear_units import gated_linear_unit


def test_gated_linear_unit_equals_the_glu_of_torch():
    gates, values = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    expected = F.glu(torch.cat([values, gates], dim=-1))
    torch.testing.assert_close(gated_linear_unit(gates, values, torch.sigmoid), expected)


@pytest.mark.parametrize(
    ("act_fn", "function"),
    [(None, F.gelu), ("sigmoid", torch.sigmoid), ("identity", lambda x: x), ("silu", F.silu), (torch.tanh, torch.tanh)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward_blocks_of_a_gpt_are_gated(make_trainer, language, act_fn: Any, function: Any, bias: bool):
    plain = language["build"]().module
    with make_trainer(GatedLinearUnits(act_fn, bias, not bias), **language) as trainer:
        gpt = trainer.state.unwrapped_model.module
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        for block, old in zip(gpt.blocks, plain.blocks, strict=True):
            new = block.mlp.up.non_gated_layer
            assert (block.mlp.up.gated_layer.bias is None) is not bias
            assert (new.bias is None) is bias
            gate = function(F.linear(x, old.mlp.up.weight, old.mlp.up.bias if bias else None))
            torch.testing.assert_close(block.mlp(x), old.mlp.down(gate * new(x)))
        trainer.fit()


def test_new_weights_have_the_scale_of_the_old_weights_and_depend_on_the_seed(make_trainer, language):
    def draw(seed: int) -> list[torch.Tensor]:
        with make_trainer(GatedLinearUnits(), **language, seed=seed) as trainer:
            return [block.mlp.up.non_gated_layer.weight for block in trainer.state.unwrapped_model.module.blocks]

    first, again, other = draw(0), draw(0), draw(1)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    old = language["build"]().module.blocks[0].mlp.up.weight
    torch.testing.assert_close(first[0].std(), old.std())
    assert (first[0] != old).float().mean() > 0.99


class Intermediate(nn.Module):
    """The first half of a feed-forward block in Hugging Face's BERT, with its names."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 8)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class Pooler(nn.Module):
    """A linear layer and an activation that are not a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden_states))


def test_blocks_with_other_names_are_gated_and_other_layers_are_not(make_trainer):
    net: Any = nn.Sequential(nn.Flatten(), Intermediate(), Pooler(), nn.Linear(8, 3)).double()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    weight = net[1].dense.weight
    with make_trainer(GatedLinearUnits(), model=ClassificationModel(net, 3)) as trainer:
        new = net[1].dense.non_gated_layer.weight
        torch.testing.assert_close(net[1](x.flatten(1)), F.gelu(x.flatten(1) @ weight.T) * (x.flatten(1) @ new.T))
        assert type(net[2].dense) is nn.Linear
        trainer.fit()


def test_bert_of_hugging_face_is_gated(make_trainer):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    bert: Any = transformers.BertModel(config).eval()
    weight = bert.encoder.layer[0].intermediate.dense.weight
    with make_trainer(GatedLinearUnits(), model=ClassificationModel(bert, 3)):
        block = bert.encoder.layer[0].intermediate
        x = torch.randn(2, 3, 8)
        expected = F.gelu(x @ weight.T) * (x @ block.dense.non_gated_layer.weight.T)
        torch.testing.assert_close(block(x), expected)
        assert bert(torch.zeros(1, 4, dtype=torch.int64)).last_hidden_state.shape == (1, 4, 8)


def test_an_existing_optimizer_gets_the_new_weights(make_trainer, language):
    model = language["build"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_trainer(GatedLinearUnits(), **language, model=model, optimizers=optimizer):
        assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}


def test_layers_are_factorized_after_they_are_gated(make_trainer, language):
    with make_trainer(Factorize(min_features=16, latent_features=4), GatedLinearUnits(), **language) as trainer:
        mlp = trainer.state.unwrapped_model.module.blocks[0].mlp
        assert type(mlp.up.gated_layer) is type(mlp.up.non_gated_layer) is nn.Sequential
        trainer.fit()


def test_unsuitable_arguments_and_models_are_refused(make_trainer):
    with pytest.raises(ValueError, match="act_fn='swish': must be one of 'sigmoid'"):
        GatedLinearUnits("swish")
    with pytest.raises(ValueError, match="GatedLinearUnits found no feed-forward block"):
        make_trainer(GatedLinearUnits())
    make_trainer(GatedLinearUnits(allow_no_match=True)).close()
