"""Optimizers and schedules from a config: parameter groups, functions of the model, an optimizer per submodule."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from composed_configs import composed
from rank_runs import program_of
from torch import nn
from torch.nn.functional import softplus

from runner import Model
from runner.algorithms import ReduceOnPlateau
from runner.checkpoints.snapshot import save_checkpoint
from runner.config import build
from runner.config.experiment import Experiment
from runner.data import TensorLoader
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.history.optimizer_changes import change_optimizers

CONF = Path(__file__).resolve().parents[2] / "conf"
OWN = "optimized_here"
MLP = ("model=mlp", "algorithms=none", "callbacks=none", "trainer.device=cpu", "trainer.max_duration=1ba")


def configure_optimizers(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Make parameter groups from the model, like the method of nanoGPT."""
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate)


def decay(timestamp: Any, factor: float = 0.5) -> float:
    return factor ** (1 + timestamp.batch)


def load_nothing(seed: int = 0) -> Any:
    raise AssertionError("read")


class GAN(Model):
    """Steps its two networks alternately."""

    manual_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(1, 1)
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: Any) -> Any:
        return self.generator(batch[0])

    def training_step(self, state: Any) -> dict[str, torch.Tensor]:
        noise, real = state.microbatch
        to_generate, to_discriminate = state.optimizers
        fake = self.generator(noise)
        judged = (softplus(-self.discriminator(real)) + softplus(self.discriminator(fake.detach()))).mean()
        (judged * state.loss_scale).backward()
        to_discriminate.step()
        to_generate.zero_grad()
        fooled = softplus(-self.discriminator(fake)).mean()
        (fooled * state.loss_scale).backward()
        to_generate.step()
        return {"discriminator": judged.detach(), "generator": fooled.detach()}


def load_pairs(batch_size: int = 8) -> Any:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40, 1, generator=generator)
    return TensorLoader(noise, noise + 3, batch_size=batch_size, shuffle=True), None


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, OWN, sys.modules[__name__])


def plain(*overrides: str) -> dict[str, Any]:
    return composed(*MLP, *overrides)


def made(config: dict[str, Any], tmp_path: Path, resume: str | None = None) -> Any:
    build.check(Experiment(config))
    return build.build(Experiment(config), tmp_path / "run", "run", resume)


OPTIMIZERS = ("sgd", "adam", "adamw", "muon", "schedule_free")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rules_work_with_every_optimizer(name: str, tmp_path: Path):
    config = plain(f"optimizer={name}", "+optimizer/param_groups=[no_decay,layerwise]", "optimizer.weight_decay=0.1")
    with made(config, tmp_path) as trainer:
        (optimizer,) = trainer.state.optimizers
        names = [group["name"] for group in optimizer.param_groups]
        assert {*names} == {f"{kind}layerwise-{depth}" for kind in ("", "no_decay+") for depth in (0, 1, 2)}
        assert len(names) == 6
        trainer.fit()


def test_rules_group_the_parameters_after_surgery(tmp_path: Path):
    factorize = "+algorithms.factorize={_target_: runner.algorithms.Factorize, min_features: 8, latent_features: 4}"
    config = plain("optimizer=adamw", "+optimizer/param_groups=no_decay", factorize, "model.module.hidden=[32]")
    with made(config, tmp_path) as trainer:
        trainer.fit()
        grouped = [weight for group in trainer.state.optimizers[0].param_groups for weight in group["params"]]
        names = dict(trainer.state.unwrapped_model.named_parameters())
    assert len(names) == 6  # two factors and a bias, twice
    assert {id(weight) for weight in grouped} == {id(weight) for weight in names.values()} and len(grouped) == len(
        names
    )


def test_frozen_layers_stay_in_their_groups_and_stop_moving(tmp_path: Path):
    freezing = "+algorithms.freezing={_target_: runner.algorithms.LayerFreezing, freeze_start: 0.0}"
    config = plain("+optimizer/param_groups=[no_decay,layerwise]", freezing, "trainer.max_duration=2ep")
    with made(config, tmp_path) as trainer:
        groups = [len(group["params"]) for group in trainer.state.optimizers[0].param_groups]
        trainer.fit("1ep")
        first = next(trainer.state.unwrapped_model.parameters())
        assert not first.requires_grad
        frozen = first.clone()
        trainer.fit("1ep")
        assert torch.equal(first, frozen)
        assert [len(group["params"]) for group in trainer.state.optimizers[0].param_groups] == groups


def train_with_rules() -> None:
    """Train digits for 5 batches with two rules on all ranks, and save the weights."""
    config = plain("optimizer=adamw", "+optimizer/param_groups=[no_decay,layerwise]", "trainer.max_duration=5ba")
    with made(config, Path()) as trainer:
        trainer.fit()
        if get_global_rank() == 0:
            torch.save(trainer.state.unwrapped_model.state_dict(), f"{get_world_size()}.pt")


def test_two_ranks_with_rules_train_like_one_process(run_ranks: Any):
    train_with_rules()
    run_ranks(program_of("config/test_optimizers", "train_with_rules"), 2)
    of_one_rank, of_two_ranks = (torch.load(f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    for name, value in of_one_rank.items():
        torch.testing.assert_close(of_two_ranks[name], value, msg=name)


def test_the_function_of_nanogpt_groups_a_gpt(tmp_path: Path):
    small = ("model.module.d_model=16", "data.eval_bytes=256", "data.batch_size=4", "data.context=16")
    config = plain("model=gpt", "data=stdlib_text", "scheduler=none", *small)
    target = {"_target_": f"{OWN}.configure_optimizers", "_partial_": True}
    config["optimizer"] = target | {"learning_rate": 0.01, "weight_decay": 0.1}
    with made(config, tmp_path) as trainer:
        model = trainer.state.unwrapped_model
        decayed, others = trainer.state.optimizers[0].param_groups
        before = [weight.clone() for weight in model.parameters()]
        trainer.fit()
        assert not all(map(torch.equal, model.parameters(), before))
    assert {*map(id, decayed["params"])} == {id(weight) for weight in model.parameters() if weight.ndim >= 2}
    assert all(weight.ndim == 1 for weight in others["params"]) and others["params"]


def test_a_resumed_run_may_have_another_rate_for_all_groups_but_no_other_groups(tmp_path: Path):
    config = plain("optimizer=adamw", "+optimizer/param_groups=layerwise", "scheduler=none", "trainer.max_duration=1ba")
    with made(config, tmp_path) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "saved")
    saved = str(tmp_path / "saved")
    faster = config | {"optimizer": config["optimizer"] | {"lr": 0.5}}
    with made(faster, tmp_path, saved) as trainer:
        change_optimizers(trainer.state, faster)
        rates = [group["lr"] for group in trainer.state.optimizers[0].param_groups]
        assert rates == [0.5 * 0.75**2, 0.5 * 0.75, 0.5]
    with pytest.raises(ValueError, match="the parameter groups of AdamW have changed, from layerwise-2"):
        made(faster | {"optimizer": config["optimizer"] | {"param_groups": {}}}, tmp_path, saved)


def test_an_optimizer_can_be_a_function_of_the_model(tmp_path: Path):
    config = plain("scheduler=none")
    target = {"_target_": f"{OWN}.configure_optimizers", "_partial_": True}
    config["optimizer"] = target | {"learning_rate": 0.01, "weight_decay": 0.1}
    with made(config, tmp_path) as trainer:
        assert [group["weight_decay"] for group in trainer.state.optimizers[0].param_groups] == [0.1, 0.0]
        trainer.fit()
    del config["optimizer"]["_partial_"]
    with pytest.raises(
        ValueError, match=r"optimizer: optimized_here.* gets model only during training: add '_partial_: true'"
    ):
        build.check(Experiment(config))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"_target_": f"{OWN}.configure_optimizers", "learning_rate": -1, "weight_decay": 0.1}, "learning rate: -1"),
        ({"_target_": "runner.optim.Muon", "momentum": 2}, "momentum=2: must be a number, at least 0 and below 1"),
        (
            {"_target_": "torch.optim.SGD", "lr": 0.1, "param_groups": {"a": {"names": "nothing", "lr": 1}}},
            "param_groups.a.names='nothing': matches no parameter",
        ),
        ({"_target_": "torch.optim.SGD", "lr": 0.1, "param_groups": {"a": 1}}, "param_groups.a=1: must be a rule"),
    ],
)
def test_a_wrong_optimizer_is_refused_before_data_is_read(optimizer: dict[str, Any], message: str, tmp_path: Path):
    config = plain()
    config["data"] = {"_target_": f"{OWN}.load_nothing"}
    config["optimizer"] = {**optimizer, "_partial_": True}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        made(config, tmp_path)


def test_a_gan_steps_an_optimizer_for_each_submodule(tmp_path: Path):
    """Train a GAN with the optimizer file that docs/configs.md shows."""
    text = (CONF.parent / "docs" / "configs.md").read_text(encoding="utf-8")
    shown = re.search(r"```yaml\n(defaults:\n  - adam@generator\n.*?)```", text, re.DOTALL)
    assert shown is not None
    file = tmp_path / "optimizer" / "gan.yaml"
    file.parent.mkdir()
    file.write_text(shown[1])
    config = plain("optimizer=gan", f"hydra.searchpath=[{tmp_path}]", "scheduler=linear", "trainer.max_duration=2ep")
    config["model"] = {"_target_": f"{OWN}.GAN"}
    config["data"] = {"_target_": f"{OWN}.load_pairs"}
    with made(config, tmp_path) as trainer:
        before = [weight.detach().clone() for weight in trainer.state.unwrapped_model.parameters()]
        assert [optimizer.defaults["lr"] for optimizer in trainer.state.optimizers] == [2e-4, 1e-4]
        trainer.fit()
        moved = [
            (a - b).abs().max().item() for a, b in zip(trainer.state.unwrapped_model.parameters(), before, strict=True)
        ]
    assert all(0 < distance < 3e-3 for distance in moved)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"module": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}, "lr": 1}, "optimizer.lr=1: needs a"),
        ({"lr": 1}, "optimizer={'lr': 1}: needs a `_target_`; choose a file of conf/optimizer/"),
    ],
)
def test_an_optimizer_section_without_a_target_is_named(optimizer: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        build.check(Experiment({**plain(), "optimizer": optimizer}))


def test_an_optimizer_of_an_unknown_submodule_is_refused_before_data_is_read(tmp_path: Path):
    config = plain()
    config["optimizer"] = {"modul": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}}
    config["data"] = {"_target_": f"{OWN}.load_nothing"}
    with pytest.raises(ValueError, match=r"optimizers='modul': the keys must name submodules .* \['module'\]"):
        made(config, tmp_path)


def test_a_function_of_the_timestamp_is_a_schedule(tmp_path: Path):
    config = plain()
    config["scheduler"] = {"_target_": f"{OWN}.decay", "_partial_": True, "factor": 0.25}
    with made(config, tmp_path) as trainer:
        trainer.fit()
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.25


def test_a_scheduler_can_be_an_algorithm_that_watches_a_metric(tmp_path: Path):
    with made(plain("scheduler=reduce_on_plateau", "scheduler.patience=3ep"), tmp_path) as trainer:
        (algorithm,) = trainer.state.algorithms
        assert isinstance(algorithm, ReduceOnPlateau) and algorithm.config_key == "scheduler"
    config = plain("scheduler=reduce_on_plateau", "scheduler.monitor=los")
    with (
        made(config, tmp_path) as trainer,
        pytest.raises(ValueError, match="monitor='los'"),
        build.naming_hooks(Experiment(config)),
    ):
        trainer.fit()
