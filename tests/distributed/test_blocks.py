"""Find the repeated blocks of a network, which are sharded or compiled one at a time."""

from __future__ import annotations

from torch import nn

from runner import ClassificationModel, LanguageModel
from runner.distributed.blocks import find_repeated
from runner.models import GPT, MLP, ResNet8


def test_the_outermost_repeated_blocks_are_found():
    resnet = ClassificationModel(ResNet8(), 10)
    assert [*find_repeated(resnet)] == ["module.blocks.0", "module.blocks.1", "module.blocks.2"]
    gpt = LanguageModel(GPT(n_layers=3))
    assert [*find_repeated(gpt)] == ["module.blocks.0", "module.blocks.1", "module.blocks.2"]
    assert find_repeated(ClassificationModel(MLP(4, [3, 3], 2), 2)) == {}
    assert find_repeated(LanguageModel(GPT(n_layers=1))) == {}


def test_blocks_that_a_transformers_model_declares_are_found_even_if_they_occur_once():
    class Network(nn.Module):
        _no_split_modules = ("TransformerBlock",)

        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT(n_layers=1)

    assert [*find_repeated(Network())] == ["inner.blocks.0"]
