"""Modules with extra state or tensors that change their shape are saved, loaded and resumed."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import PerChannelMinMaxObserver

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.algorithms import EMA
from runner.callbacks import LoadCheckpoint
from runner.checkpoints.contents import map_saved
from runner.checkpoints.files import read_file
from runner.checkpoints.snapshot import weights_of
from runner.data import TensorLoader
from runner.failures.errors import UnsupportedType

Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class InputHistory(nn.Module):
    """Has the number of its calls, which scales its output, and the mean of each input as extra state."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.extra = extra
        self.calls = 0
        self.means = torch.zeros(0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.means = torch.cat([self.means, inputs.detach().mean()[None]])
        return self.linear(inputs) * (1 + 0.1 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "means": self.means, "extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.means = state["calls"], state["means"]


class GrowingTensor(InputHistory):
    """Has only a tensor as extra state, which grows by an element in each call."""

    def get_extra_state(self) -> Any:
        return self.means

    def set_extra_state(self, state: Any) -> None:
        self.means, self.calls = state, len(state)


class Observed(nn.Module):
    """Has a quantization observer, whose buffers get their shape from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = PerChannelMinMaxObserver(ch_axis=1)
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.observer(inputs) / (1 + self.observer.max_val.max()))


class SaveEach(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        save_checkpoint(state, self.folder / f"ba{state.timestamp.batch}")


def make_trainer(module: nn.Module, **arguments: Any) -> Trainer:
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(3))
    defaults: dict[str, Any] = {
        "model": ClassificationModel(module, 2),
        "train_dataloader": TensorLoader(inputs, torch.arange(24) % 2, batch_size=4, shuffle=True, seed=1),
        "eval_dataloader": TensorLoader(inputs, torch.arange(24) % 2, batch_size=8, shuffle=False),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.05),
        "max_duration": "1ep",
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def state_of(trainer: Trainer) -> dict[str, Any]:
    return dict(trainer.state.unwrapped_model.state_dict())


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [InputHistory, GrowingTensor, Observed])
@pytest.mark.parametrize("average", [False, True])
def test_a_run_with_extra_state_is_resumed_bit_for_bit(kind: Any, average: bool, tmp_path: Path):
    def algorithms() -> list[Any]:
        return [EMA("3ba")] if average else []

    torch.manual_seed(0)
    with make_trainer(kind(), callbacks=[SaveEach(tmp_path)], algorithms=algorithms()) as whole:
        whole.fit()
    with make_trainer(kind(), resume_path=tmp_path / "ba3", algorithms=algorithms()) as resumed:
        resumed.fit()
    assert_equal(state_of(resumed), state_of(whole))
    assert_equal(resumed.state.eval_metric_values, whole.state.eval_metric_values)


@pytest.mark.parametrize("kind", [InputHistory, GrowingTensor, Observed])
def test_extra_state_is_loaded_together_with_weights(kind: Any, tmp_path: Path):
    with make_trainer(kind(), callbacks=[SaveEach(tmp_path)]) as trained:
        trained.fit()
    saved = read_file(tmp_path / "ba6", "model.pt")
    with make_trainer(kind(), load_path=tmp_path / "ba6") as loaded:
        assert_equal(state_of(loaded), saved)
    with make_trainer(kind(), callbacks=[LoadCheckpoint(tmp_path / "ba6")], max_duration="1ba") as loaded:
        before = state_of(loaded)
        with weights_of(loaded.state, tmp_path / "ba3"):
            assert_equal(state_of(loaded), read_file(tmp_path / "ba3", "model.pt"))
        assert_equal(state_of(loaded), before)


def test_buffers_of_an_observer_may_change_their_shape_and_weights_of_a_layer_may_not(tmp_path: Path):
    with make_trainer(Observed(), callbacks=[SaveEach(tmp_path)]) as trained:
        trained.fit()
    wider = Observed()
    wider.linear = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"of another shape module.linear.weight \(2, 3\) into \(4, 3\), "):
        make_trainer(wider, load_path=tmp_path / "ba6")


@pytest.mark.parametrize("extra", [{1}, Color.RED, Point(1, 2), defaultdict(int), [len], {Color.RED: 1}])
def test_extra_state_that_could_not_be_loaded_is_an_error_that_names_its_module(extra: Any, tmp_path: Path):
    name = type(extra).__name__ if not isinstance(extra, list | dict) or extra == {} else ".*"
    message = rf"'module\.1\._extra_state' of the model's state_dict\(\) cannot be saved: it holds a {name}; return"
    network = nn.Sequential(nn.Identity(), InputHistory(extra))
    with make_trainer(network) as trainer, pytest.raises(TypeError, match=message):
        save_checkpoint(trainer.state, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_plain_values_are_saved_and_subclasses_without_a_safe_form_are_refused(tmp_path: Path):
    values = {
        "counts": Counter({3: 1}),
        "shape": torch.Size([2]),
        "z": 1j,
        "b": b"\0\xff",
        "n": -(2**70),
        "t": (1, [None]),
    }
    torch.save(map_saved(values, lambda tensor: tensor), tmp_path / "values.pt")
    assert torch.load(tmp_path / "values.pt", weights_only=True) == values
    with pytest.raises(UnsupportedType, match="a checkpoint cannot hold a OrderedCounter"):
        map_saved({"a": type("OrderedCounter", (Counter,), {})()}, lambda tensor: tensor)
