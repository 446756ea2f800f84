import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.data import TensorLoader

FOLDER = Path(__file__).parents[2] / "conf" / "data"
SHIPPED = ["digits", "stdlib_text", "synthetic_images", "synthetic_tokens"]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_has_every_argument_with_its_default_and_makes_two_loaders(name):
    config = OmegaConf.create({"seed": 0, "data": OmegaConf.load(FOLDER / f"{name}.yaml")}).data
    arguments: Any = OmegaConf.to_container(config, resolve=True)
    module, _, function = arguments.pop("_target_").rpartition(".")
    load = getattr(import_module(module), function)
    assert arguments == {key: value.default for key, value in inspect.signature(load).parameters.items()}
    loaders = load(**arguments)
    assert [type(loader) for loader in loaders] == [TensorLoader, TensorLoader]
    assert [loader.order.shuffle for loader in loaders] == [True, False]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_key_says_its_unit(name):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert all(" # " in line for line in lines[1:] if not line.startswith("_target_"))
