from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_runs import tiny_trainer
from torch import Tensor, nn

from runner import Callback, ClassificationModel, State, Trainer, evaluation_weights, save_checkpoint
from runner.algorithms import EMA
from runner.callbacks import LoadCheckpoint
from runner.data import TensorLoader


class FirstWeights(Callback):
    """Keeps the weights before the first batch."""

    def fit_start(self, state, logger):
        self.weights = weights_of(state)


def weights_of(state: State) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {key: weight.clone() for key, weight in state.unwrapped_model.state_dict().items()}


def make_network(classes: int, body: str = "body") -> nn.Module:
    return nn.Sequential(OrderedDict({body: nn.Linear(5, 4), "head": nn.Linear(4, classes)}))


def make_trainer(seed: int, *callbacks: Callback, network: nn.Module | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(seed)
    network = network or make_network(3)
    *_, bias = network.parameters()
    defaults: dict[str, Any] = {
        "model": ClassificationModel(network, len(bias)),
        "train_dataloader": TensorLoader(torch.randn(24, 5), torch.arange(24) % 3, batch_size=4, shuffle=True),
        "max_duration": "6ba",
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def first_weights(*callbacks: Callback, **arguments: Any) -> dict[str, Tensor]:
    """Train a run with seed 2, and return its weights before the first batch."""
    with make_trainer(2, *callbacks, first := FirstWeights(), **arguments) as trainer:
        trainer.fit()
    return first.weights


def equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in weights)


class OtherRun(NamedTuple):
    """The folder of another run, and its weights after training."""

    folder: Path
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> OtherRun:
    folder = tmp_path_factory.mktemp("other")
    with make_trainer(1) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, folder / "checkpoints" / "ep1-ba6")
        return OtherRun(folder, weights_of(trainer.state))


@pytest.mark.parametrize("event", ["before_load", "after_load"])
@pytest.mark.parametrize("path", ["", "checkpoints/ep1-ba6"])
def test_training_starts_with_the_other_runs_weights(event: str, path: str, other: OtherRun, caplog):
    caplog.set_level("INFO", "runner")
    assert equal(first_weights(LoadCheckpoint(other.folder / path, event=event)), other.weights)
    assert f"4 of 4 weights loaded from {other.folder.resolve()}" in caplog.text


def test_weights_in_ignore_keys_are_not_loaded(other: OtherRun):
    load = LoadCheckpoint(other.folder, ignore_keys=["module.head.*"])
    initial = first_weights()
    assert equal(first_weights(load), {key: (initial if "head" in key else other.weights)[key] for key in initial})
    loaded = first_weights(load, network=make_network(4))  # a head of another shape
    assert torch.equal(loaded["module.body.weight"], other.weights["module.body.weight"])


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (lambda: make_network(3, "base"), {}, "missing module.base.weight, module.base.bias; unexpected module.body"),
        (lambda: make_network(4), {}, r"of another shape module.head.weight \(3, 4\) into \(4, 4\)"),
        (lambda: make_network(4), {"strict": False}, "of another shape"),
        (
            lambda: make_network(3),
            {"ignore_keys": ["module.haed.*"]},
            r"ignore_keys='module.haed.*': .* near: (module.head.\w+), (?!\1)module.head",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 3)), {"strict": False}, "missing module.0.weight, .* unexpected"),
        (lambda: make_network(3), {"ignore_keys": ["*"]}, "do not fit the model: no weight is left to load"),
        (
            lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)),
            {},
            "missing module.0.weight, module.0.bias, module.1.weight and 3 more; unexpected .* and 1 more",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(network: Any, arguments: dict, message: str, other: OtherRun):
    with pytest.raises(ValueError, match=message):
        make_trainer(2, LoadCheckpoint(other.folder, **arguments), network=network())


def test_without_strict_only_matching_weights_are_loaded(other: OtherRun, caplog):
    caplog.set_level("INFO", "runner")
    loaded = first_weights(LoadCheckpoint(other.folder, strict=False), network=make_network(3, "base"))
    assert torch.equal(loaded["module.head.weight"], other.weights["module.head.weight"])
    assert "2 of 4 weights loaded" in caplog.text and "missing module.base.weight, module.base.bias" in caplog.text


@pytest.mark.parametrize(("event", "winner"), [("before_load", "load_path"), ("after_load", "callback")])
def test_the_weights_that_are_loaded_last_win(event: str, winner: str, other: OtherRun, tmp_path):
    with make_trainer(3) as trainer:
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
        weights = {"load_path": weights_of(trainer.state), "callback": other.weights}
    loaded = first_weights(LoadCheckpoint(other.folder, event=event), load_path=tmp_path / "checkpoint")
    assert equal(loaded, weights[winner])


@pytest.mark.parametrize("event", ["before_load", "after_load"])
def test_a_resumed_run_keeps_its_own_weights(event: str, other: OtherRun, tmp_path):
    with make_trainer(2, LoadCheckpoint(other.folder, event=event)) as whole:
        whole.fit()
        expected = weights_of(whole.state)
    with make_trainer(2, LoadCheckpoint(other.folder, event=event)) as first:
        first.fit(duration="3ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    load = LoadCheckpoint(other.folder, event=event)
    with make_trainer(2, load, resume_path=tmp_path / "checkpoint") as second:
        second.fit()
        assert equal(weights_of(second.state), expected)


@pytest.mark.parametrize("event", ["before_load", "after_load"])
def test_a_resumed_run_does_not_need_the_checkpoint_that_it_loaded(event: str, other: OtherRun, tmp_path):
    with make_trainer(2, LoadCheckpoint(other.folder, event=event)) as first:
        first.fit(duration="3ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
        expected = weights_of(first.state)
    load = LoadCheckpoint(tmp_path / "missing", event=event)
    with make_trainer(2, load, resume_path=tmp_path / "checkpoint") as second:
        assert equal(weights_of(second.state), expected)


def test_the_average_is_loaded_and_a_new_average_starts_from_it(other: OtherRun, tmp_path):
    with make_trainer(1, algorithms=[EMA("2ba")]) as first:
        first.fit()
        save_checkpoint(first.state, tmp_path / "averaged")
        with evaluation_weights(first.state):
            average = weights_of(first.state)
    assert not equal(average, other.weights)
    load, start = LoadCheckpoint(tmp_path / "averaged"), FirstWeights()
    with make_trainer(2, load, start, algorithms=[EMA("1000ba")]) as second:
        second.fit()
        with evaluation_weights(second.state):
            new_average = weights_of(second.state)
    assert equal(start.weights, average)
    assert torch.allclose(new_average["module.head.weight"], average["module.head.weight"], atol=1e-2)


def test_all_ranks_load_the_weights(run_ranks, other: OtherRun):
    program = f"""
        from collections import OrderedDict

        import torch
        from tiny_runs import tiny_trainer
        from torch import nn

        from runner import ClassificationModel
        from runner.callbacks import LoadCheckpoint
        from runner.data import TensorLoader

        load = LoadCheckpoint({str(other.folder)!r}, event="after_load")
        network = nn.Sequential(OrderedDict(body=nn.Linear(5, 4), head=nn.Linear(4, 3)))
        with tiny_trainer(
            load,
            model=ClassificationModel(network, 3),
            train_dataloader=TensorLoader(torch.randn(4, 5), torch.arange(4) % 3, batch_size=4, shuffle=True),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.0),
            max_duration="1ep",
        ) as trainer:
            trainer.fit()
            print([weight.sum().item() for weight in trainer.state.unwrapped_model.state_dict().values()])
    """
    expected = str([weight.sum().item() for weight in other.weights.values()])
    assert [rank.stdout.strip() for rank in run_ranks(program)] == [expected] * 2


@pytest.mark.parametrize(
    ("name", "value"), [("checkpoint", None), ("checkpoint", 5), ("ignore_keys", "head.*"), ("event", "fit_start")]
)
def test_wrong_arguments_are_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name}="):
        LoadCheckpoint(**{"checkpoint": "outputs", name: value})


@pytest.mark.parametrize("event", ["before_load", "after_load"])
def test_a_path_without_a_checkpoint_is_named(event: str, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint=.*empty.*no complete checkpoint"):
        make_trainer(2, LoadCheckpoint(tmp_path / "empty", event=event))
