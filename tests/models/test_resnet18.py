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


def test_it_has_as_many_weights_as_others_count():
    """As published with the usual network for CIFAR, and as torchvision documents for ImageNet's."""
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
def test_operations_are_as_many_as_torch_counts(network: ResNet8 | ResNet18, shape: tuple[int, ...]):
    """The backward pass takes twice as many as the forward pass."""
    with FlopCounterMode(display=False) as counter:
        network(torch.rand(2, *shape))
    assert 2 * network.flops_per_sample(shape) == 3 * counter.get_total_flops()


@pytest.mark.parametrize(
    ("small_images", "size", "after_the_stem", "left"), [(True, 32, 32, 4), (True, 9, 9, 2), (False, 224, 56, 7)]
)
def test_stages_halve_what_the_stem_leaves(small_images: bool, size: int, after_the_stem: int, left: int):
    with torch.device("meta"):
        model = ResNet18(in_channels=2, num_classes=7, small_images=small_images)
        images = torch.empty(3, 2, size, size)
    assert len(model.blocks) == 8 and all(isinstance(block, BasicBlock) for block in model.blocks)
    features = model.stem(images)
    assert features.shape == (3, 64, after_the_stem, after_the_stem)
    assert model.blocks(features).shape == (3, 512, left, left)
    assert model(images).shape == (3, 7)


def test_it_is_the_network_that_torchvision_has():
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


def test_signals_neither_vanish_nor_explode_at_the_start():
    torch.manual_seed(0)
    model = ResNet18()
    logits = model(torch.randn(8, 3, 16, 16))
    logits.square().mean().backward()
    assert 0.1 < logits.std().item() < 10
    assert all(weight.grad is not None and 0 < weight.grad.norm() < 1000 for weight in model.parameters())


@pytest.mark.parametrize("argument", [{"in_channels": 0}, {"num_classes": -1}], ids=str)
def test_wrong_arguments_are_named(argument: dict[str, Any]):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be a whole number, at least 1"):
        ResNet18(**argument)


def test_the_config_has_every_argument_with_its_default():
    config = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / "resnet18.yaml")
    model: Any = OmegaConf.to_container(OmegaConf.create({"model": config}), resolve=True)
    assert model["model"]["module"] == {
        "_target_": "runner.models.ResNet18",
        "in_channels": 3,
        "num_classes": 10,
        "small_images": True,
    }
