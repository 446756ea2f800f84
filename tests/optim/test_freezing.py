"""Layers that are unfrozen during training, modules that stay in evaluation mode, and gradients without optimizers."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Model, Trainer, save_checkpoint
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
    """Saves a checkpoint after a batch, and stops training."""

    def __init__(self, batch: int, path: Path):
        self.batch = batch
        self.path = path

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.batch:
            save_checkpoint(state, self.path)
            state.stop_training()


class KeepWeights(Callback):
    """Copies the final weights, gathered from all shards."""

    def fit_end(self, state, logger):
        self.weights = {name: whole(tensor).clone() for name, tensor in state.unwrapped_model.state_dict().items()}


def make_model(norm: bool = True) -> Model:
    """Return a model with a frozen backbone in evaluation mode, with or without batch norm, and a trainable head."""
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
        algorithms=[hook for hook in hooks if isinstance(hook, Algorithm)],
        callbacks=[hook for hook in hooks if not isinstance(hook, Algorithm)],
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state.unwrapped_model.state_dict().items()}


def assert_same_weights(trainer: Trainer, expected: Trainer) -> None:
    torch.testing.assert_close(weights_of(trainer), weights_of(expected), rtol=0, atol=0)


def test_a_layer_changes_only_if_it_is_unfrozen():
    frozen, unfrozen = weights_of(fit()), weights_of(fit(Unfreeze()))
    start = make_model().state_dict()
    name = "module.0.0.weight"
    assert torch.equal(frozen[name], start[name]) and not torch.equal(unfrozen[name], start[name])


AVERAGES: dict[str, Any] = {
    "none": list,
    "ema": lambda: [EMA("2ba")],
    "swa": lambda: [SWA(start="1ba", end="1dur", update_interval="1ba", bn_batches=0)],
    "lawa": lambda: [LAWA(window=4, update_interval="1ba", start="1ba", bn_batches=0)],
    "schedule free": lambda: [ScheduleFree(bn_batches=0)],
}


@functools.cache
def uninterrupted(average: str) -> Trainer:
    return fit(Unfreeze(), *AVERAGES[average]())


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("batch", [3, 5])  # before and after the layer is unfrozen
def test_a_run_that_unfreezes_a_layer_resumes_bit_for_bit(average: str, batch: int, tmp_path: Path):
    whole = uninterrupted(average)
    fit(Unfreeze(), *AVERAGES[average](), Stop(batch, tmp_path / "saved"))
    resumed = fit(Unfreeze(), *AVERAGES[average](), resume_path=tmp_path / "saved")
    for trainer in (whole, resumed):
        assert trainer.state.timestamp.batch == 9
        assert [len(optimizer.state_dict()["state"]) for optimizer in trainer.state.optimizers] == [6]
    assert_same_weights(resumed, whole)
    assert whole.state.eval_metric_values["eval"]["loss"] == resumed.state.eval_metric_values["eval"]["loss"]


def test_layers_frozen_by_an_algorithm_are_unfrozen_at_the_end_of_a_resumed_run(tmp_path: Path):
    model = make_model().requires_grad_(True)
    fit(LayerFreezing(0.0, 1.0), Stop(7, tmp_path / "saved"), model=model)
    trainer = fit(LayerFreezing(0.0, 1.0), model=model, resume_path=tmp_path / "saved")
    assert all(parameter.requires_grad for parameter in trainer.state.unwrapped_model.parameters())


def named_freezing(until: str | None = "1ep") -> LayerFreezing:
    return LayerFreezing(names=["*", "!module.1.*"], until=until)


def make_trainable(norm: bool = True) -> Model:
    """Return the same model with nothing frozen, in training mode."""
    return make_model(norm).requires_grad_(True).train()


class UnfreezeWeights(Callback):
    """Freezes the backbone before training and unfreezes it in the second epoch, without `LayerFreezing`."""

    def fit_start(self, state, logger):
        if state.timestamp.batch == 0:
            state.unwrapped_model.get_submodule("module.0").requires_grad_(False)

    def epoch_start(self, state, logger):
        if state.timestamp.epoch == 1:
            state.unwrapped_model.get_submodule("module.0").requires_grad_(True)


@pytest.mark.parametrize("until", ["1ep", "2ba", "3ba", "0.3dur"])
def test_parameters_frozen_by_name_train_from_the_first_epoch_that_starts_at_or_after_until(until: str):
    trainer = fit(named_freezing(until), model=make_trainable())
    assert_same_weights(trainer, fit(UnfreezeWeights(), model=make_trainable()))


def test_parameters_frozen_by_name_without_until_stay_frozen_for_the_whole_training():
    model = make_trainable()
    start, end = model.state_dict(), weights_of(fit(named_freezing(None), model=make_trainable()))
    changed = [name for name, _ in model.named_parameters() if not torch.equal(start[name], end[name])]
    assert changed == ["module.1.weight", "module.1.bias"]
    fit(named_freezing(None), model=model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_parameters_that_the_user_froze_stay_frozen_after_until():
    start, end = make_model().state_dict(), weights_of(fit(LayerFreezing(names=["*.1.bias"], until="1ep")))
    assert torch.equal(start["module.0.0.weight"], end["module.0.0.weight"])
    assert not torch.equal(start["module.1.bias"], end["module.1.bias"])


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_run_frozen_by_name_resumes_bit_for_bit_before_and_after_until(batch: int, tmp_path: Path):
    whole = fit(named_freezing(), model=make_trainable())
    fit(named_freezing(), Stop(batch, tmp_path / "saved"), model=make_trainable())
    resumed = fit(named_freezing(), model=make_trainable(), resume_path=tmp_path / "saved")
    assert resumed.state.timestamp.batch == 9
    assert_same_weights(resumed, whole)


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
        fit(LayerFreezing(**arguments), model=make_trainable())


def test_an_until_that_is_never_reached_gets_a_warning(caplog: pytest.LogCaptureFixture):
    fit(named_freezing("9ep"), model=make_trainable())
    assert "until='9ep': no epoch started at or after it" in caplog.text


def messages_with(text: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if text in message]


def test_gradients_that_no_optimizer_uses_get_a_single_warning(caplog: pytest.LogCaptureFixture):
    def head_only(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.module[1].parameters(), lr=0.5)

    fit(Unfreeze(), optimizers=head_only)
    (message,) = messages_with("no optimizer", caplog)
    assert "module.0.0.weight, module.0.0.bias, module.0.1.weight" in message
    caplog.clear()
    fit(Unfreeze())
    fit(optimizers=head_only)
    assert not messages_with("no optimizer", caplog)


class ReplaceHead(Callback):
    """Replaces the head after the first epoch."""

    def epoch_start(self, state, logger):
        if state.timestamp.epoch == 1:
            state.unwrapped_model.get_submodule("module").add_module("1", nn.Linear(5, 3).double())


def test_a_replaced_layer_without_an_optimizer_is_named(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "runner"):
        fit(ReplaceHead())
    (message,) = messages_with("no optimizer trains them", caplog)
    assert "module.1.weight, module.1.bias" in message


class RecordModes(Callback):
    """Records for each batch which modules are in training mode."""

    def __init__(self) -> None:
        self.modes: list[list[bool]] = []

    def before_forward(self, state, logger):
        self.modes.append([module.training for module in state.unwrapped_model.modules()])


def test_modules_in_evaluation_mode_stay_in_it_and_are_named(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "runner")
    recorder = RecordModes()
    trainer = fit(recorder, eval_interval="1ba")
    assert recorder.modes == [[True, True, False, False, False, False, True]] * 9
    message = "these modules stay in evaluation mode: module.0; call train() on those that should not"
    assert messages_with("evaluation mode", caplog) == [message]
    start = make_model().state_dict()
    assert torch.equal(weights_of(trainer)["module.0.1.running_mean"], start["module.0.1.running_mean"])


def test_a_model_that_is_entirely_in_evaluation_mode_is_trained_in_training_mode(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "runner")
    recorder = RecordModes()
    fit(recorder, model=make_model().eval())
    assert recorder.modes == [[True] * 7] * 9
    assert not messages_with("evaluation mode", caplog)


def fit_on_ranks() -> None:
    """Save the final weights of whole, stopped, resumed and sharded runs, frozen by a callback and by name."""
    path = Path("saved")
    runs = {
        "whole": ([], {}),
        "stopped": ([Stop(5, path)], {}),
        "resumed": ([], {"resume_path": path}),
        "sharded": ([], {"parallel": "fsdp"}),
    }
    for name, (hooks, options) in runs.items():
        weights = KeepWeights()
        fit(Unfreeze(), *hooks, weights, model=make_model(norm=False), **options)
        torch.save(weights.weights, f"{name}-{get_global_rank()}.pt")
        fit(named_freezing(), *hooks, weights, model=make_trainable(norm=False), **options)
        torch.save(weights.weights, f"named-{name}-{get_global_rank()}.pt")


def test_ranks_average_the_gradients_of_layers_that_are_unfrozen_during_training(
    tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_ranks(program_of("optim/test_freezing", "fit_on_ranks"), 2)
    by_callback = weights_of(fit(Unfreeze(), model=make_model(norm=False)))
    by_name = weights_of(fit(named_freezing(), model=make_trainable(norm=False)))
    for prefix, expected in (("", by_callback), ("named-", by_name)):
        for run in ("whole", "resumed", "sharded"):
            first, second = (torch.load(f"{prefix}{run}-{rank}.pt") for rank in range(2))
            torch.testing.assert_close(first, second, rtol=0, atol=0)
            torch.testing.assert_close(first, expected, rtol=1e-10, atol=1e-12)
