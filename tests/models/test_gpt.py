"""GPT, compared with torch's transformer layers, and the modules that algorithms add to it or replace."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runner.models import GPT


def torchs_encoder_layer(block, d_model, n_heads):
    """Return torch's pre-norm encoder layer with the weights of the block."""
    layer = nn.TransformerEncoderLayer(
        d_model, n_heads, 4 * d_model, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    pairs = {
        layer.self_attn.in_proj_weight: block.attention.qkv.weight,
        layer.self_attn.in_proj_bias: block.attention.qkv.bias,
        layer.self_attn.out_proj.weight: block.attention.out.weight,
        layer.self_attn.out_proj.bias: block.attention.out.bias,
        layer.linear1.weight: block.mlp.up.weight,
        layer.linear1.bias: block.mlp.up.bias,
        layer.linear2.weight: block.mlp.down.weight,
        layer.linear2.bias: block.mlp.down.bias,
    }
    with torch.no_grad():
        for parameter, value in pairs.items():
            parameter.copy_(value)
    return layer


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(vocab_size=11, context=10, d_model=16, n_layers=2, n_heads=4)
    for parameter in model.parameters():  # the small initial weights would hide errors in the attention
        nn.init.normal_(parameter, std=0.3)
    return model


def test_logits_equal_those_of_torchs_transformer_layers(model):
    tokens = torch.randint(11, (3, 7))
    x = model.token_embedding.weight[tokens] + model.position_embedding.weight[:7]
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    for block in model.blocks:
        layer = torchs_encoder_layer(block, 16, 4)
        layer.norm1, layer.norm2 = block.norm1, block.norm2
        x = layer(x, src_mask=mask, is_causal=True)
    expected = model.norm(x) @ model.token_embedding.weight.T
    torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-4)


def test_a_position_does_not_see_later_tokens(model):
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(dim=2).all()


def test_a_copied_model_ties_the_head_to_the_copied_embedding(model):
    assert model.head.weight is model.token_embedding.weight
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.token_embedding.weight
    assert copied.head.weight is not model.head.weight


def test_initial_weights_have_gpt2s_standard_deviations_and_predict_uniformly():
    torch.manual_seed(0)
    model = GPT()
    tokens = torch.randint(256, (4, 128))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), torch.randint(256, (512,)))
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            is_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.01 if is_residual else 0.02, rel=0.1), name


def test_blocks_have_the_module_names_that_algorithms_use(model):
    names = {name for name, _ in model.blocks[0].named_modules()}
    assert {"attention.qkv", "attention.out", "mlp.up", "mlp.down", "norm1", "norm2"} <= names


class Flip(nn.Module):
    """An orthogonal map: applied to both queries and keys, it does not change their dot products."""

    def forward(self, x):
        assert x.shape == (2, 4, 6, 4)
        return x.flip(-1)


def test_q_norm_and_k_norm_apply_to_queries_and_keys(model):
    tokens = torch.randint(11, (2, 6))
    before = model(tokens)
    for block in model.blocks:
        block.attention.q_norm = Flip()
    assert not torch.allclose(model(tokens), before, atol=1e-3)
    for block in model.blocks:
        block.attention.k_norm = Flip()
    torch.testing.assert_close(model(tokens), before, atol=1e-5, rtol=1e-4)


def test_rotary_applies_to_both_queries_and_keys(model):
    tokens = torch.randint(11, (2, 6))
    before = model(tokens)
    for block in model.blocks:
        block.attention.rotary = Flip()
    torch.testing.assert_close(model(tokens), before, atol=1e-5, rtol=1e-4)
    for block in model.blocks:
        block.attention.k_norm = Flip()  # flips the keys back
    assert not torch.allclose(model(tokens), before, atol=1e-3)


def test_value_embeddings_of_tokens_are_added_to_the_values(model):
    tokens = torch.randint(11, (2, 6))
    attention = model.blocks[0].attention
    x = torch.randn(2, 6, 16)
    before = attention(x, tokens)
    attention.value_embedding = nn.Embedding(11, 16)
    nn.init.zeros_(attention.value_embedding.weight)
    torch.testing.assert_close(attention(x, tokens), before, atol=0, rtol=0)
    # Attention weights sum to 1, so a constant in all values is added to each position.
    nn.init.ones_(attention.value_embedding.weight)
    torch.testing.assert_close(attention(x, tokens), before + attention.out.weight.sum(dim=1), atol=1e-5, rtol=1e-4)


def test_rms_norm_and_squared_relu_equal_their_formulas():
    torch.manual_seed(0)
    model: Any = GPT(vocab_size=11, context=10, d_model=16, norm="rms_norm", activation="relu_squared")
    x = torch.randn(2, 5, 16)
    for norm in (model.blocks[0].norm1, model.blocks[1].norm2, model.norm):
        torch.testing.assert_close(norm(x), x / x.square().mean(dim=-1, keepdim=True).sqrt(), atol=1e-5, rtol=1e-4)
    mlp = model.blocks[1].mlp
    torch.testing.assert_close(mlp(x), mlp.down(mlp.up(x).clamp(min=0) ** 2))


def test_zero_init_makes_blocks_the_identity_and_an_untied_head_zero():
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 16))
    model = GPT(zero_init=True)
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(16))  # type: ignore[misc]
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)))
    assert model.head.weight.std() > 0.01  # the tied head is the embedding
    untied = GPT(zero_init=True, tied_head=False)
    assert not untied(tokens).any()


def test_untying_the_head_adds_256_by_64_parameters():
    untied, tied = GPT(tied_head=False), GPT()
    assert not torch.equal(untied.head.weight, untied.token_embedding.weight)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (untied, tied)]
    assert counts[0] == counts[1] + 256 * 64


def test_sequences_longer_than_the_context_need_a_model_without_position_embedding(model):
    tokens = torch.randint(11, (1, 11))
    with pytest.raises(ValueError, match="a sequence of 11 tokens is longer than context=10"):
        model(tokens)
    model.position_embedding = None
    assert model(tokens).shape == (1, 11, 11)


def test_without_position_embedding_a_layer_ignores_the_order_of_earlier_tokens():
    tokens = torch.randint(11, (1, 11))
    swapped = tokens[:, [1, 0, *range(2, 11)]]
    model = GPT(vocab_size=11, context=10, d_model=16, n_layers=1, n_heads=4)
    model.position_embedding = None
    torch.testing.assert_close(model(tokens)[:, 2:], model(swapped)[:, 2:])


def test_flops_per_token_equal_what_torch_counts():
    tokens = torch.randint(256, (2, 32))
    model = GPT(context=32)
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        model(tokens).sum().backward()
    assert model.flops_per_token(32) * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_flops_do_not_depend_on_a_tied_head_or_position_embeddings():
    untied = GPT(tied_head=False)
    untied.position_embedding = None
    assert untied.flops_per_token(128) == GPT().flops_per_token(128)


def test_dropout_acts_only_in_training_mode():
    model = GPT(dropout=0.3)
    tokens = torch.randint(256, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    torch.testing.assert_close(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0: must be a whole number, at least 1"),
        ({"n_layers": 0}, "n_layers=0: must be a whole number, at least 1"),
        ({"n_heads": 3}, "d_model=64: must be a multiple of n_heads=3"),
        ({"dropout": 1.0}, "dropout=1.0: must be a probability, at least 0 and below 1"),
        ({"norm": "rms"}, "norm='rms': must be one of 'layer_norm', 'rms_norm'"),
        ({"activation": "relu"}, "activation='relu': must be one of 'gelu', 'relu_squared'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GPT(**arguments)
