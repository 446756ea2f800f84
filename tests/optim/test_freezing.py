"""Layers that are unfrozen later, modules that stay in evaluation mode, and gradients that nobody uses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Model, Trainer
from runner.algorithms import EMA, LAWA, SWA, LayerFreezing, ScheduleFree
from runner.data import TensorLoader
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import whole


class Unfreeze(Callback):
    """Unfreezes the backbone at the start of an epoch."""

    def __init__(self, epoch: int = 1):
        self.epoch = epoch

    def epoch_start(self, state, logger):
        if state.timestamp.epoch == self.epoch:
            state.unwrapped_model.get_submodule("module.0").requires_grad_(True).train()


class Stop(Callback):
    """Ends training after some batches, and saves."""

    def __init__(self, batch: int, path: Path):
        self.batch = batch
        self.path = path

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.batch:
            from runner import save_checkpoint

            save_checkpoint(state, self.path)
            state.stop_training()


class KeepWeights(Callback):
    """Keeps the final weights, whole."""

    def fit_end(self, state, logger):
        self.weights = {name: whole(one).clone() for name, one in state.unwrapped_model.state_dict().items()}


def make_model(norm: bool = True) -> Model:
    """A frozen backbone, with batch norm or without, and a trained head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5) if norm else nn.Identity(), nn.Tanh())
        backbone.requires_grad_(False).eval()
        return ClassificationModel(nn.Sequential(backbone, nn.Linear(5, 3)).double(), 3)


def loader() -> TensorLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return TensorLoader(inputs, inputs[:, :3].argmax(1), batch_size=8, shuffle=True)


def fit(*hooks: Any, model: Model | None = None, **options: Any) -> Trainer:
    options = {"optimizers": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9), **options}
    with Trainer(
        model=model or make_model(),
        train_dataloader=loader(),
        eval_dataloader=loader(),
        max_duration="3ep",
        algorithms=[one for one in hooks if isinstance(one, Algorithm)],
        callbacks=[one for one in hooks if not isinstance(one, Algorithm)],
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in trainer.state.unwrapped_model.state_dict().items()}


def test_a_layer_that_is_unfrozen_later_learns_from_then_on():
    frozen, unfrozen = weights_of(fit()), weights_of(fit(Unfreeze()))
    start = make_model().state_dict()
    name = "module.0.0.weight"
    assert torch.equal(frozen[name], start[name]) and not torch.equal(unfrozen[name], start[name])


AVERAGES: dict[str, Any] = {
    "none": None,
    "ema": lambda: EMA("2ba"),
    "swa": lambda: SWA(start="1ba", end="1dur", update_interval="1ba", bn_batches=0),
    "lawa": lambda: LAWA(window=4, update_interval="1ba", start="1ba", bn_batches=0),
    "schedule free": lambda: ScheduleFree(bn_batches=0),
}


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("batch", [3, 5, 7])
def test_a_run_with_unfrozen_layers_resumes_to_the_bit(name: str, batch: int, tmp_path: Path):
    def hooks() -> list[Any]:
        return [Unfreeze(), *([AVERAGES[name]()] if AVERAGES[name] else [])]

    whole = fit(*hooks())
    fit(*hooks(), Stop(batch, tmp_path / "saved"))
    resumed = fit(*hooks(), resume_path=tmp_path / "saved")
    assert resumed.state.timestamp.batch == whole.state.timestamp.batch == 9
    for one, other in zip(whole.state.optimizers, resumed.state.optimizers, strict=True):
        assert len(one.state_dict()["state"]) == len(other.state_dict()["state"]) == 6
    expected, actual = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(value, actual[key]) for key, value in expected.items())
    assert whole.state.eval_metric_values["eval"]["loss"] == resumed.state.eval_metric_values["eval"]["loss"]


def test_layers_that_an_algorithm_froze_are_free_again_after_a_resumed_run(tmp_path: Path):
    model = make_model().requires_grad_(True)
    fit(LayerFreezing(0.0, 1.0), Stop(7, tmp_path / "saved"), model=model)
    trainer = fit(LayerFreezing(0.0, 1.0), model=model, resume_path=tmp_path / "saved")
    assert all(one.requires_grad for one in trainer.state.unwrapped_model.parameters())


def named_freezing(until: str | None = "1ep") -> LayerFreezing:
    return LayerFreezing(names=["*", "!module.1.*"], until=until)


def trained(norm: bool = True) -> Model:
    """The same model, with nothing frozen and all in training mode."""
    return make_model(norm).requires_grad_(True).train()


class UnfreezeWeights(Callback):
    """Freezes the backbone before training, and unfreezes it at an epoch's start, without the algorithm."""

    def fit_start(self, state, logger):
        if state.timestamp.batch == 0:
            state.unwrapped_model.get_submodule("module.0").requires_grad_(False)

    def epoch_start(self, state, logger):
        if state.timestamp.epoch == 1:
            state.unwrapped_model.get_submodule("module.0").requires_grad_(True)


@pytest.mark.parametrize("until", ["1ep", "2ba", "3ba", "0.3dur"])
def test_parameters_frozen_by_name_learn_from_the_first_epoch_after_until(until: str):
    model = trained()
    expected = weights_of(fit(UnfreezeWeights(), model=trained()))
    actual = weights_of(fit(named_freezing(until), model=model))
    assert all(torch.equal(value, actual[key]) for key, value in expected.items())


def test_parameters_frozen_by_name_without_until_keep_their_values_and_are_free_at_the_end():
    model = trained()
    start, end = model.state_dict(), weights_of(fit(named_freezing(None), model=trained()))
    changed = [name for name, _ in model.named_parameters() if not torch.equal(start[name], end[name])]
    assert changed == ["module.1.weight", "module.1.bias"]
    fit(named_freezing(None), model=model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_unfreezing_by_name_leaves_what_the_model_froze_itself():
    start, end = make_model().state_dict(), weights_of(fit(LayerFreezing(names=["*.1.bias"], until="1ep")))
    assert torch.equal(start["module.0.0.weight"], end["module.0.0.weight"])
    assert not torch.equal(start["module.1.bias"], end["module.1.bias"])


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_run_frozen_by_name_resumes_to_the_bit_before_and_after_until(batch: int, tmp_path: Path):
    whole = fit(named_freezing(), model=trained())
    fit(named_freezing(), Stop(batch, tmp_path / "saved"), model=trained())
    resumed = fit(named_freezing(), model=trained(), resume_path=tmp_path / "saved")
    expected, actual = weights_of(whole), weights_of(resumed)
    assert resumed.state.timestamp.batch == 9
    assert all(torch.equal(value, actual[key]) for key, value in expected.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["*", "!module.1.wieght"]}, "names='!module.1.wieght': .* near: module.1.weight"),
        ({"names": ["*"]}, "freezes all"),
        ({"names": ["*.1.*", "!*"]}, "selects no parameter"),
        ({"names": "module.1.*"}, "must be a list of patterns"),
        ({"names": ["*", 3]}, "must be a list of patterns"),
        ({"names": ["*.1.*"], "freeze_level": 0.5}, "replaces freeze_start and freeze_level"),
        ({"until": "1ep"}, "until='1ep': is for names"),
        ({"names": ["*.1.*"], "until": "60sec"}, "until='60sec': differs from run to run"),
        ({"names": ["*.1.*"], "until": "soon"}, "until='soon'"),
    ],
)
def test_wrong_names_to_freeze_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        fit(LayerFreezing(**arguments), model=trained())


def test_a_time_to_unfreeze_that_is_never_reached_gets_a_warning(caplog: pytest.LogCaptureFixture):
    fit(named_freezing("9ep"), model=trained())
    assert [one for one in caplog.messages if "until='9ep': no epoch started at or after it" in one]


def test_a_gradient_that_no_optimizer_uses_is_named_once_per_change(caplog: pytest.LogCaptureFixture):
    def head_only(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.module[1].parameters(), lr=0.5)

    fit(Unfreeze(), optimizers=head_only)
    (message,) = [one.getMessage() for one in caplog.records if "no optimizer" in one.getMessage()]
    assert "module.0.0.weight, module.0.0.bias, module.0.1.weight" in message
    caplog.clear()
    fit(Unfreeze())
    fit(optimizers=head_only)
    assert not [one for one in caplog.records if "no optimizer" in one.getMessage()]


class Replace(Callback):
    """Puts another layer in the place of the head after the first epoch."""

    def epoch_start(self, state, logger):
        if state.timestamp.epoch == 1:
            state.unwrapped_model.get_submodule("module").add_module("1", nn.Linear(5, 3).double())


def test_a_layer_that_took_the_place_of_another_is_named(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "runner"):
        fit(Replace())
    named = [one.getMessage() for one in caplog.records if "no optimizer trains them" in one.getMessage()]
    assert ["module.1.weight, module.1.bias" in one for one in named] == [True]


def test_modules_in_evaluation_mode_stay_so_and_are_named(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "runner")
    seen: list[list[bool]] = []

    class Modes(Callback):
        def before_forward(self, state, logger):
            seen.append([one.training for one in state.unwrapped_model.modules()])

    trainer = fit(Modes(), eval_interval="1ba")
    expected = [True, True, False, False, False, False, True]
    assert seen == [expected] * 9
    messages = [one.getMessage() for one in caplog.records if "evaluation mode" in one.getMessage()]
    assert messages == ["these modules stay in evaluation mode: module.0; call train() on those that should not"]
    start = make_model().state_dict()
    assert torch.equal(weights_of(trainer)["module.0.1.running_mean"], start["module.0.1.running_mean"])
    caplog.clear()
    seen.clear()
    fit(Modes(), model=make_model().eval())
    assert seen == [[True] * 7] * 9 and not [one for one in caplog.records if "evaluation mode" in one.getMessage()]


def on_ranks() -> None:
    """Save what ranks leave."""
    path = Path("saved")
    runs = {
        "whole": ([], {}),
        "stopped": ([Stop(5, path)], {}),
        "resumed": ([], {"resume_path": path}),
        "sharded": ([], {"parallel": "fsdp"}),
    }
    for name, (hooks, options) in runs.items():
        end = KeepWeights()
        fit(Unfreeze(), *hooks, end, model=make_model(norm=False), **options)
        torch.save(end.weights, f"{name}-{get_global_rank()}.pt")
        end = KeepWeights()
        fit(named_freezing(), *hooks, end, model=trained(norm=False), **options)
        torch.save(end.weights, f"named-{name}-{get_global_rank()}.pt")


def test_ranks_average_the_gradients_of_layers_that_are_unfrozen_later(
    tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_ranks(program_of("optim/test_freezing", "on_ranks"), 2)
    alone = weights_of(fit(Unfreeze(), model=make_model(norm=False)))
    named = weights_of(fit(named_freezing(), model=trained(norm=False)))
    names = ("whole", "resumed", "sharded")
    for name, alone in [*((name, alone) for name in names), *((f"named-{name}", named) for name in names)]:
        first, second = (torch.load(f"{name}-{rank}.pt") for rank in range(2))
        for key, value in alone.items():
            assert torch.equal(first[key], second[key])
            torch.testing.assert_close(first[key], value, rtol=1e-10, atol=1e-12)
