import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runner.data import TensorLoader

FOLDER = Path(__file__).parents[2] / "conf" / "data"
SHIPPED = ["digits", "stdlib_text", "synthetic_images", "synthetic_tokens"]  # data that need no download


def read(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the function that a config names, and its arguments."""
    config = OmegaConf.create({"seed": 0, "data": OmegaConf.load(FOLDER / f"{name}.yaml")}).data
    arguments: Any = OmegaConf.to_container(config, resolve=True)
    module, _, function = arguments.pop("_target_").rpartition(".")
    return getattr(import_module(module), function), arguments


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_a_config_has_every_argument_with_its_default(name: str):
    load, arguments = read(name)
    defaults = {key: parameter.default for key, parameter in inspect.signature(load).parameters.items()}
    assert arguments == {key: [] if value == () else value for key, value in defaults.items()}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_makes_two_loaders(name: str):
    load, arguments = read(name)
    loaders = load(**arguments)
    assert [type(loader) for loader in loaders] == [TensorLoader, TensorLoader]
    assert [loader.order.shuffle for loader in loaders] == [True, False]
