"""The same command gives the same bits.

Neither adding a callback nor evaluating changes the numbers. A rerun is the same experiment, even if the files of
`conf/` have changed.
"""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from kept_runs import LONGER, QUIET, ROOT, SHORT, folders, tree, weights
from random_runs import LOADERS, equal, run

from runner import Algorithm, Callback
from runner.algorithms import EMA, MixUp

MORE_CALLBACKS = "+callbacks=[speed_monitor,lr_monitor,optimizer_monitor,json_lines_logger]"


def test_the_same_command_trains_the_same_weights_even_with_more_callbacks(tmp_path: Path, run_app: Any):
    for name, more in (("first", ()), ("second", ()), ("watched", (MORE_CALLBACKS,))):
        run_app(*SHORT, *QUIET, f"hydra.run.dir={name}", *more)
    assert weights(tmp_path / "first") == weights(tmp_path / "second") == weights(tmp_path / "watched")


class Draws(Callback):
    """Draws from every global generator at every event, which advances them."""

    def __init__(self):
        self.drawn: list[float] = []

    def run_event(self, event, state, logger):
        self.drawn.append(float(torch.rand(len(self.drawn) % 3 + 1).sum()))
        numpy.random.rand(2)
        random.random()


@pytest.mark.parametrize("loader", LOADERS)
def test_runs_with_the_same_seed_are_bit_identical(loader: str):
    torch.manual_seed(1)
    first = run(loader)
    torch.manual_seed(2)  # the state of the global generator before a run does not matter
    assert equal(run(loader), first)
    assert not equal(run(loader, seed=1), first)


@pytest.mark.parametrize("arguments", [{}, {"grad_accum": 3}, {"microbatch_size": "auto"}], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_callback_that_draws_random_numbers_does_not_change_the_run(loader: str, arguments: dict[str, Any]):
    draws = Draws()
    assert equal(run(loader, callbacks=[draws], **arguments), run(loader, **arguments))
    assert len(draws.drawn) > 100


class FrozenNorm(Algorithm):
    """Trains with the running statistics of batch norm."""

    def fit_start(self, state, logger):
        state.unwrapped_model.get_submodule("module.2").eval()


@pytest.mark.parametrize("algorithms", [[], [FrozenNorm()], [MixUp(), EMA("5ba")]], ids=["plain", "frozen", "averaged"])
def test_evaluations_do_not_change_training(algorithms: list[Algorithm]):
    without = run(eval_interval=0, algorithms=copy.deepcopy(algorithms))
    evaluated = run(eval_interval="1ba", algorithms=copy.deepcopy(algorithms))
    for name in without["weights"]:
        assert torch.equal(without["weights"][name], evaluated["weights"][name])
    for key in without["logged"]:
        assert without["logged"][key] == evaluated["logged"][key]


START = (*SHORT, *QUIET, "optimizer.momentum=0.8", "scheduler=none")


@pytest.fixture
def first(tmp_path: Path, run_app: Any) -> Path:
    """The folder of a run."""
    run_app(*START)
    return folders(tmp_path).pop()


@pytest.fixture
def changed(tmp_path: Path) -> dict[str, str]:
    """An environment with a copy of the project in which files of `conf/` have changed."""
    for name in ("runner", "callbacks", "algorithms", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "changed" / name, symlinks=True)
    for file, old, new in (
        ("optimizer/sgd.yaml", "lr: 0.1", "lr: 0.3"),
        ("model/mlp.yaml", "[128, 128]", "[16]"),
        ("config.yaml", "\nseed: 0", "\nseed: 8"),
    ):
        path = tmp_path / "changed" / "conf" / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    return {"PYTHONPATH": str(tmp_path / "changed")}


def config_of(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())


@pytest.mark.slow
def test_a_rerun_is_the_same_experiment_even_if_conf_has_changed(
    first: Path, changed: Any, tmp_path: Path, run_app: Any
):
    before = tree(first)
    finished = run_app("rerun", str(first.relative_to(tmp_path)), env=changed, real=True)
    (second,) = folders(tmp_path) - {first}
    assert weights(second) == weights(first) and config_of(second) == config_of(first)
    assert tree(first) == before
    (line,) = [line for line in finished.stderr.splitlines() if "conf/ has changed" in line]
    assert "optimizer.lr: 0.1 -> 0.3" in line and "seed: 0 -> 8" in line and "momentum" not in line

    run_app("rerun", str(second), "optimizer.lr=0.3", "~algorithms.batch_augment", env=changed)  # the changed value
    (third,) = folders(tmp_path) - {first, second}
    expected = config_of(first)
    expected["optimizer"]["lr"] = 0.3
    del expected["algorithms"]["batch_augment"]
    assert config_of(third) == expected and weights(third) != weights(first)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_experiment_even_if_conf_has_changed(
    first: Path, changed: Any, tmp_path: Path, run_app: Any
):
    before = config_of(first)
    run_app("resume", str(first), LONGER, env=changed)
    run_app(*START, LONGER, "hydra.run.dir=whole")
    assert weights(tmp_path / "whole", "ep3-ba9") == weights(first, "ep3-ba9")
    assert config_of(first) == before | {"trainer": before["trainer"] | {"max_duration": "3ep"}}
    assert config_of(first / "sessions" / "1")["trainer"]["max_duration"] == "2ep"
