from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.algorithms import EMA
from runner.callbacks import LoadCheckpoint
from runner.data import TensorLoader


class Network(nn.Module):
    def __init__(self, classes: int, body: str = "body"):
        super().__init__()
        self.add_module(body, nn.Linear(5, 4))
        self.head = nn.Linear(4, classes)
        self.body_name = body

    def forward(self, x):
        return self.head(self.get_submodule(self.body_name)(x))


class Watch(Callback):
    """Keeps the weights before the first batch."""

    def fit_start(self, state, logger):
        self.weights = {key: weight.clone() for key, weight in state.unwrapped_model.state_dict().items()}


def make_trainer(seed: int, *callbacks: Callback, network: nn.Module | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(network or Network(3), 3),
        "train_dataloader": TensorLoader(torch.randn(24, 5), torch.arange(24) % 3, batch_size=4, shuffle=True),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "6ba",
        "callbacks": callbacks,
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def fresh(seed: int) -> dict[str, Tensor]:
    """Return the initial weights of a run that loads none."""
    return started(make_trainer(seed, watch := Watch()), watch)


def started(trainer: Trainer, watch: Watch) -> dict[str, Tensor]:
    with trainer:
        trainer.fit()
    return watch.weights


def equal(weights: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return weights.keys() == other.keys() and all(torch.equal(weights[key], other[key]) for key in weights)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """Return another run's folder, and its weights at the end."""
    folder = tmp_path_factory.mktemp("other")
    with make_trainer(1) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, folder / "checkpoints" / "ep1-ba6")
        weights = {key: weight.clone() for key, weight in trainer.state.unwrapped_model.state_dict().items()}
    return folder, weights


@pytest.mark.parametrize("event", ["before_load", "after_load"])
@pytest.mark.parametrize("inside", ["", "checkpoints/ep1-ba6"])
def test_training_begins_with_the_other_runs_weights(event: str, inside: str, other, caplog):
    caplog.set_level("INFO", "runner")
    folder, weights = other
    watch = Watch()
    trainer = make_trainer(2, LoadCheckpoint(folder / inside, event=event), watch)
    assert equal(started(trainer, watch), weights)
    assert f"4 of 4 weights loaded from {folder.resolve()}" in caplog.text


def test_some_are_left_as_they_are(other):
    folder, weights = other
    watch = Watch()
    load = LoadCheckpoint(folder, ignore_keys=["module.head.*"])
    loaded = started(make_trainer(2, load, watch), watch)
    own = fresh(2)
    assert equal(loaded, {key: (own if "head" in key else weights)[key] for key in own})
    # A head of another shape cannot be loaded.
    loaded = started(make_trainer(2, load, watch, network=Network(4)), watch)
    assert torch.equal(loaded["module.body.weight"], weights["module.body.weight"])


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (lambda: Network(3, "trunk"), {}, "missing module.trunk.weight, module.trunk.bias; unexpected module.body"),
        (lambda: Network(4), {}, r"of another shape module.head.weight \(3, 4\) into \(4, 4\)"),
        (lambda: Network(4), {"strict": False}, "of another shape"),
        (
            lambda: Network(3),
            {"ignore_keys": ["module.haed.*"]},
            r"ignore_keys='module.haed.*': .* near: (module.head.\w+), (?!\1)module.head",
        ),
        (lambda: nn.Sequential(nn.Linear(5, 3)), {"strict": False}, "missing module.0.weight, .* unexpected"),
        (lambda: Network(3), {"ignore_keys": ["*"]}, "do not fit the model: no weight is left to load"),
        (
            lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)),
            {},
            "missing module.0.weight, module.0.bias, module.1.weight and 3 more; unexpected .* and 1 more",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(network: Any, arguments: dict, message: str, other):
    with pytest.raises(ValueError, match=message):
        make_trainer(2, LoadCheckpoint(other[0], **arguments), network=network())


def test_those_that_match_are_loaded_when_asked(other, caplog):
    caplog.set_level("INFO", "runner")
    folder, weights = other
    watch = Watch()
    loaded = started(make_trainer(2, LoadCheckpoint(folder, strict=False), watch, network=Network(3, "trunk")), watch)
    assert torch.equal(loaded["module.head.weight"], weights["module.head.weight"])
    assert "2 of 4 weights loaded" in caplog.text and "missing module.trunk.weight, module.trunk.bias" in caplog.text


@pytest.mark.parametrize(("event", "wins"), [("before_load", "trainer"), ("after_load", "callback")])
def test_the_later_load_wins(event: str, wins: str, other, tmp_path):
    with make_trainer(3) as trainer:
        save_checkpoint(trainer.state, tmp_path / "mine")
        mine = {key: weight.clone() for key, weight in trainer.state.unwrapped_model.state_dict().items()}
    watch = Watch()
    trainer = make_trainer(2, LoadCheckpoint(other[0], event=event), watch, load_path=tmp_path / "mine")
    assert equal(started(trainer, watch), mine if wins == "trainer" else other[1])


@pytest.mark.parametrize("event", ["before_load", "after_load"])
def test_a_resumed_run_keeps_its_own(event: str, other, tmp_path):
    with make_trainer(2, LoadCheckpoint(other[0], event=event)) as whole:
        whole.fit()
        expected = {key: weight.clone() for key, weight in whole.state.unwrapped_model.state_dict().items()}
    with make_trainer(2, LoadCheckpoint(other[0], event=event)) as first:
        first.fit(duration="3ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    again = make_trainer(2, LoadCheckpoint(other[0], event=event), resume_path=tmp_path / "checkpoint")
    with again as second:
        second.fit()
        assert equal(second.state.unwrapped_model.state_dict(), expected)


@pytest.mark.parametrize("event", ["before_load", "after_load"])
def test_a_resumed_run_does_not_need_the_checkpoint_it_began_with(event: str, other, tmp_path):
    with make_trainer(2, LoadCheckpoint(other[0], event=event)) as first:
        first.fit(duration="3ba")
        save_checkpoint(first.state, tmp_path / "checkpoint")
        expected = {key: weight.clone() for key, weight in first.state.unwrapped_model.state_dict().items()}
    gone = LoadCheckpoint(tmp_path / "gone", event=event)
    with make_trainer(2, gone, resume_path=tmp_path / "checkpoint") as second:
        assert equal(second.state.unwrapped_model.state_dict(), expected)


def test_the_average_is_loaded_and_a_new_average_begins_with_it(other, tmp_path):
    with make_trainer(1, algorithms=[EMA("2ba")]) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "averaged")
        with trainer.state.algorithms[0].evaluation_weights(trainer.state):
            average = {key: weight.clone() for key, weight in trainer.state.unwrapped_model.state_dict().items()}
    watch = Watch()
    second = make_trainer(2, LoadCheckpoint(tmp_path / "averaged"), watch, algorithms=[EMA("1000ba")])
    assert equal(started(second, watch), average)
    assert not equal(average, other[1])
    with second.state.algorithms[0].evaluation_weights(second.state):
        kept = second.state.unwrapped_model.state_dict()["module.head.weight"].clone()
    assert torch.allclose(kept, average["module.head.weight"], atol=1e-2)


def test_all_ranks_load(run_ranks, other):
    program = f"""
        import torch
        from torch import nn
        from runner.callbacks import LoadCheckpoint
        from runner import ClassificationModel, Trainer
        from runner.data import TensorLoader

        class Network(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(5, 4)
                self.head = nn.Linear(4, 3)

            def forward(self, x):
                return self.head(self.body(x))

        with Trainer(
            model=ClassificationModel(Network(), 3),
            train_dataloader=TensorLoader(torch.randn(24, 5), torch.arange(24) % 3, batch_size=4, shuffle=True),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.0),
            max_duration="1ep",
            device="cpu",
            callbacks=[LoadCheckpoint({str(other[0])!r}, event="after_load")],
        ) as trainer:
            trainer.fit()
            print([weight.sum().item() for weight in trainer.state.unwrapped_model.state_dict().values()])
    """
    expected = str([weight.sum().item() for weight in other[1].values()])
    assert [rank.stdout.strip() for rank in run_ranks(program)] == [expected] * 2


@pytest.mark.parametrize(
    ("name", "value"), [("checkpoint", None), ("checkpoint", 5), ("ignore_keys", "head.*"), ("event", "fit_start")]
)
def test_arguments_are_checked(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name}="):
        LoadCheckpoint(**{"checkpoint": "outputs", name: value})


@pytest.mark.parametrize("event", ["before_load", "after_load"])
def test_a_path_without_a_checkpoint_is_named(event: str, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint=.*empty.*no complete checkpoint"):
        make_trainer(2, LoadCheckpoint(tmp_path / "empty", event=event))
