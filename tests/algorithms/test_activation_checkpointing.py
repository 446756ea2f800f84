from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import Callback, ClassificationModel, LanguageModel, Trainer
from runner.algorithms import ActivationCheckpointing
from runner.algorithms.activation_checkpointing import find_modules, forget_activations
from runner.models import BasicBlock, ResNet8
from runner.models.hf.causal_lm import HFCausalLM

DROPOUT = 0.4


def net() -> ClassificationModel:
    """Return a model with batch norm and dropout in its blocks; a second pass must repeat draws and update nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ResNet8(in_channels=2, num_classes=3, width=4).double()
        for block in model.blocks:
            block.norm2 = nn.Sequential(block.norm2, nn.Dropout(DROPOUT))  # type: ignore[arg-type]
    return ClassificationModel(model, 3)


def test_the_outermost_modules_are_found_by_name_or_class():
    model = ClassificationModel(ResNet8(), 10)
    assert [*find_modules(model, ["*Block"])] == ["module.blocks.0", "module.blocks.1", "module.blocks.2"]
    assert [*find_modules(model, ["module.blocks.[12]", "*.norm1"])] == [
        "module.blocks.0.norm1",
        "module.blocks.1",
        "module.blocks.2",
    ]
    assert [*find_modules(model, ["*"])] == ["module"]
    assert find_modules(model, ["blocks"]) == {}


class Forwards(Callback):
    """Counts the forward passes of the first block, in training and in evaluation."""

    def __init__(self) -> None:
        self.counts = {True: 0, False: 0}

    def fit_start(self, state, logger):
        def count(module, inputs):
            self.counts[module.training] += 1

        net: Any = state.unwrapped_model.module
        net.blocks[0].conv1.register_forward_pre_hook(count)


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_checkpointed_training_is_bit_identical(make_trainer, grad_accum: int):
    def run(*algorithms) -> tuple[Trainer, Forwards]:
        forwards = Forwards()
        with make_trainer(*algorithms, build=net, callbacks=[forwards], grad_accum=grad_accum) as trainer:
            trainer.fit()
        return trainer, forwards

    (plain, passes), (checkpointed, checkpointed_passes) = run(), run(ActivationCheckpointing())
    weights, expected = (trainer.state.unwrapped_model.state_dict() for trainer in (checkpointed, plain))
    assert [*weights] == [*expected]
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    torch.testing.assert_close(checkpointed.state.metric_values, plain.state.metric_values, rtol=0, atol=0)
    assert checkpointed_passes.counts == {True: 2 * passes.counts[True], False: passes.counts[False]}
    assert passes.counts[True] == 6 * grad_accum


def stored_bytes(module: nn.Module, inputs: torch.Tensor) -> int:
    """Return the bytes that autograd stores for the backward pass, not counting weights."""
    weights = {weight.data_ptr() for weight in module.parameters()}
    stored: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            stored[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(inputs)
    assert outputs.requires_grad
    return sum(stored.values())


def test_only_inputs_of_modules_are_stored_for_the_backward_pass():
    block, inputs = BasicBlock(4, 4), torch.randn(8, 4, 16, 16, requires_grad=True)
    plain = stored_bytes(block, inputs)
    forget_activations(block)
    # Checkpointing handles the tensors inside the block; the hooks of this test see only its inputs.
    assert stored_bytes(block, inputs) <= inputs.nbytes < plain / 3


TRANSFORMERS = {
    "GPT2Config": {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "LlamaConfig": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_layers_of_a_hugging_face_model_are_found_without_a_pattern(name: str, tmp_path: Path):
    transformers: Any = pytest.importorskip("transformers")
    config = getattr(transformers, name)(vocab_size=32, bos_token_id=0, eos_token_id=0, **TRANSFORMERS[name])
    config.save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))

    def train(*algorithms: ActivationCheckpointing) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        network = HFCausalLM(str(tmp_path / "model"), pretrained=False)
        calls: list[nn.Module] = []
        for module in network.modules():
            if type(module).__name__.endswith("MLP"):
                module.register_forward_pre_hook(lambda module, inputs: calls.append(module))
        with Trainer(
            model=LanguageModel(network),
            train_dataloader=[(tokens[:, :-1], tokens[:, 1:])] * 2,
            optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
            max_duration="1ep",
            algorithms=algorithms,
            device="cpu",
        ) as trainer:
            trainer.fit()
        return [parameter.detach() for parameter in network.parameters()], len(calls)

    (expected, passes), (weights, checkpointed_passes) = train(), train(ActivationCheckpointing())
    assert all(map(torch.equal, weights, expected)) and checkpointed_passes == 2 * passes > 0


def test_wrong_arguments_are_refused(make_trainer):
    with pytest.raises(ValueError, match="found no repeated block"):
        make_trainer(ActivationCheckpointing(), build=lambda: ClassificationModel(nn.Linear(3, 2), 2))
    with pytest.raises(ValueError, match=r"found no module like '\*Layer' or 'x'"):
        make_trainer(ActivationCheckpointing(["*Layer", "x"]))
    with pytest.raises(ValueError, match=r"'\*Layer' matches no module; leave it out"):
        make_trainer(ActivationCheckpointing(["Linear", "*Layer"]))
    make_trainer(ActivationCheckpointing(["Linear", "*Layer"], allow_no_match=True)).close()
    make_trainer(ActivationCheckpointing("x", allow_no_match=True)).close()
