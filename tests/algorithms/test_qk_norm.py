from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from runner import ClassificationModel
from runner.algorithms import QKNorm
from runner.algorithms.qk_norm import find_placeholders
from runner.models.gpt import Attention


def attend(attention: Attention, x: Tensor, eps: float) -> Tensor:
    """Return causal attention of normalized queries and keys, by its formula."""
    q, k, v = attention.qkv(x).view(*x.shape[:2], 3, attention.n_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = (x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() for x in (q, k))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return attention.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("learned_scale", [True, False])
def test_queries_and_keys_are_divided_by_their_root_mean_square(make_trainer, language, learned_scale: bool):
    with make_trainer(QKNorm(learned_scale, eps=0.01), **language) as trainer:
        model = trainer.state.unwrapped_model
        x, tokens = torch.randn(3, 10, 16, dtype=torch.float64), torch.zeros(3, 10, dtype=torch.int64)
        for block in model.module.blocks:
            torch.testing.assert_close(block.attention(x, tokens), attend(block.attention, x, 0.01))
        names = [name for name, _ in model.named_parameters() if "_norm" in name]
        assert len(names) == (4 if learned_scale else 0)


def test_outputs_do_not_depend_on_the_scale_of_queries_and_keys(make_trainer, language):
    with make_trainer(QKNorm(), **language) as trainer:
        gpt = trainer.state.unwrapped_model.module
        larger = copy.deepcopy(gpt)
        with torch.no_grad():
            for block in larger.blocks:
                block.attention.qkv.weight[:32] *= 1000
                block.attention.qkv.bias[:32] *= 1000
        tokens = torch.randint(11, (2, 12))
        torch.testing.assert_close(larger(tokens), gpt(tokens), rtol=1e-4, atol=1e-4)


def test_the_scale_is_learned_in_training(make_trainer, language):
    with make_trainer(QKNorm(), **language) as trainer:
        trainer.fit()
        attention = trainer.state.unwrapped_model.module.blocks[1].attention
        assert not (attention.q_norm.weight == 1).any()


class VisionAttention(nn.Module):
    """Has the names of the attention in timm's vision transformers."""

    def __init__(self, normalized: bool) -> None:
        super().__init__()
        self.head_dim = 6
        self.q_norm = nn.LayerNorm(6) if normalized else nn.Identity()
        self.k_norm = nn.LayerNorm(6) if normalized else nn.Identity()


def test_norms_run_in_the_dtype_of_autocast(train, language):
    train(QKNorm(), **language, precision="amp_bf16")  # torch warns if the dtypes of inputs and scale differ


def test_attention_that_is_normalized_already_stays_unchanged():
    assert [*find_placeholders(nn.Sequential(VisionAttention(True), VisionAttention(False))).values()] == [6, 6]


def test_vision_transformers_of_timm_are_normalized(make_trainer):
    timm = pytest.importorskip("timm")
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    model = ClassificationModel(vit, 3)
    with make_trainer(QKNorm(), model=model):
        assert sum(isinstance(module, nn.RMSNorm) for module in vit.modules()) == 4
        assert vit(torch.randn(2, 3, 32, 32)).shape == (2, 3)


def test_unsuitable_arguments_and_models_are_refused(make_trainer):
    with pytest.raises(ValueError, match="eps=0"):
        QKNorm(eps=0)
    with pytest.raises(ValueError, match="QKNorm found no attention"):
        make_trainer(QKNorm())
    make_trainer(QKNorm(allow_no_match=True)).close()
