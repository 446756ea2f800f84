"""ResNet18, compared with torchvision's, and the FLOPs of both residual networks."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runner.libraries.torchvision import import_torchvision
from runner.models import BasicBlock, ResNet8
from runner.models.resnet18 import ResNet18


def test_resnet18_has_the_published_numbers_of_weights():
    """For small images the number is that of the usual CIFAR network, for large ones that of torchvision."""
    assert sum(weight.numel() for weight in ResNet18().parameters()) == 11_173_962
    with torch.device("meta"):
        large = ResNet18(num_classes=1000, small_images=False)
    assert sum(weight.numel() for weight in large.parameters()) == 11_689_512


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (ResNet8(), (1, 8, 8)),
        (ResNet8(in_channels=3, width=4), (3, 33, 21)),
        (ResNet18(), (3, 9, 8)),
        (ResNet18(small_images=False), (3, 65, 64)),
    ],
)
def test_flops_per_sample_are_three_times_those_that_torch_counts_in_a_forward_pass(
    network: ResNet8 | ResNet18, shape: tuple[int, ...]
):
    """The backward pass takes twice as many operations as the forward pass."""
    with FlopCounterMode(display=False) as counter:
        network(torch.rand(2, *shape))
    assert 2 * network.flops_per_sample(shape) == 3 * counter.get_total_flops()


@pytest.mark.parametrize(
    ("small_images", "size", "stem_size", "final_size"), [(True, 32, 32, 4), (True, 9, 9, 2), (False, 224, 56, 7)]
)
def test_stages_after_the_first_halve_the_size(small_images: bool, size: int, stem_size: int, final_size: int):
    with torch.device("meta"):
        model = ResNet18(in_channels=2, num_classes=7, small_images=small_images)
        images = torch.empty(3, 2, size, size)
    assert len(model.blocks) == 8 and all(isinstance(block, BasicBlock) for block in model.blocks)
    features = model.stem(images)
    assert features.shape == (3, 64, stem_size, stem_size)
    assert model.blocks(features).shape == (3, 512, final_size, final_size)
    assert model(images).shape == (3, 7)


def test_resnet18_equals_torchvisions():
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    torch.manual_seed(0)
    theirs, ours = import_torchvision().models.resnet18(num_classes=5), ResNet18(num_classes=5, small_images=False)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    same_order = zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True)
    ours.load_state_dict({name: value for (name, _), value in same_order})
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.train()(images), theirs.train()(images), atol=1e-5, rtol=1e-4)


def test_initial_logits_and_gradients_are_neither_tiny_nor_huge():
    torch.manual_seed(0)
    model = ResNet18()
    logits = model(torch.randn(8, 3, 16, 16))
    logits.square().mean().backward()
    assert 0.1 < logits.std().item() < 10
    assert all(weight.grad is not None and 0 < weight.grad.norm() < 1000 for weight in model.parameters())


@pytest.mark.parametrize("argument", [{"in_channels": 0}, {"num_classes": -1}], ids=str)
def test_wrong_arguments_are_refused(argument: dict[str, Any]):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be a whole number, at least 1"):
        ResNet18(**argument)


def test_the_config_has_every_argument():
    config = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / "resnet18.yaml")
    model: Any = OmegaConf.to_container(OmegaConf.create({"model": config}), resolve=True)
    assert model["model"]["module"] == {
        "_target_": "runner.models.ResNet18",
        "in_channels": 3,
        "num_classes": 10,
        "small_images": True,
    }
