"""Model configs list all arguments of the network, and train on the data that their defaults are meant for."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from runner import ClassificationModel, LanguageModel
from runner.data import load_digits, load_stdlib_text

FOLDER = Path(__file__).parents[2] / "conf" / "model"
WRAPPERS = {
    "runner.ClassificationModel": (ClassificationModel, load_digits),
    "runner.LanguageModel": (LanguageModel, load_stdlib_text),
}


@pytest.mark.parametrize("name", ["mlp", "resnet8", "gpt"])
def test_a_config_has_every_argument_of_the_network_and_trains_all_parameters(name):
    loaded = OmegaConf.load(FOLDER / f"{name}.yaml")
    config = OmegaConf.to_container(OmegaConf.create({"model": loaded}), resolve=True)
    assert isinstance(config, dict)
    arguments = config["model"]
    wrapper, load = WRAPPERS[arguments.pop("_target_")]
    network_arguments = arguments.pop("module")
    module_name, _, class_name = network_arguments.pop("_target_").rpartition(".")
    network = getattr(import_module(module_name), class_name)
    assert list(network_arguments) == list(inspect.signature(network).parameters)

    model = wrapper(network(**network_arguments), **arguments)
    train, _ = load(batch_size=4)
    batch = next(iter(train))
    model.loss(model(batch), batch).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
