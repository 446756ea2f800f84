"""The same command gives the same bits.

Adding a callback changes no numbers, nor does evaluating. A rerun is the same experiment whatever `conf/` has become.
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

MORE = "+callbacks=[speed_monitor,lr_monitor,optimizer_monitor,json_lines_logger]"


def test_the_same_command_trains_the_same_weights_also_with_more_callbacks(tmp_path: Path, run_app: Any):
    for name, more in (("first", ()), ("second", ()), ("watched", (MORE,))):
        run_app(*SHORT, *QUIET, f"hydra.run.dir={name}", *more)
    assert weights(tmp_path / "first") == weights(tmp_path / "second") == weights(tmp_path / "watched")


class Draws(Callback):
    """Draws from every global generator at every event, and leaves them elsewhere."""

    def __init__(self):
        self.drawn: list[float] = []

    def run_event(self, event, state, logger):
        self.drawn.append(float(torch.rand(len(self.drawn) % 3 + 1).sum()))
        numpy.random.rand(2)
        random.random()


@pytest.mark.parametrize("loader", LOADERS)
def test_equal_runs_are_equal_to_the_bit(loader: str):
    torch.manual_seed(1)
    first = run(loader)
    torch.manual_seed(2)  # what was drawn before a run does not matter
    assert equal(run(loader), first)
    assert not equal(run(loader, seed=1), first)


@pytest.mark.parametrize("arguments", [{}, {"grad_accum": 3}, {"microbatch_size": "auto"}], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_callback_that_draws_changes_no_number(loader: str, arguments: dict[str, Any]):
    draws = Draws()
    assert equal(run(loader, callbacks=[draws], **arguments), run(loader, **arguments))
    assert len(draws.drawn) > 100


class FrozenNorm(Algorithm):
    """Trains with the running statistics of batch norm."""

    def fit_start(self, state, logger):
        state.unwrapped_model.get_submodule("module.2").eval()


@pytest.mark.parametrize("algorithms", [[], [FrozenNorm()], [MixUp(), EMA("5ba")]], ids=["plain", "frozen", "averaged"])
def test_evaluations_change_no_training_number(algorithms: list[Algorithm]):
    never = run(eval_interval=0, algorithms=copy.deepcopy(algorithms))
    often = run(eval_interval="1ba", algorithms=copy.deepcopy(algorithms))
    for name in never["weights"]:
        assert torch.equal(never["weights"][name], often["weights"][name])
    for key in never["logged"]:
        assert never["logged"][key] == often["logged"][key]


@pytest.mark.slow
def test_a_rerun_is_the_same_experiment_whatever_conf_has_become(tmp_path: Path, run_app: Any):
    for name in ("runner", "callbacks", "algorithms", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "changed" / name, symlinks=True)
    start = (*SHORT, *QUIET, "optimizer.momentum=0.8", "scheduler=none")
    run_app(*start)
    (first,) = folders(tmp_path)
    before = tree(first)

    env = {"PYTHONPATH": str(tmp_path / "changed")}
    conf = tmp_path / "changed" / "conf"
    for file, old, new in (
        ("optimizer/sgd.yaml", "lr: 0.1", "lr: 0.3"),
        ("model/mlp.yaml", "[128, 128]", "[16]"),
        ("config.yaml", "\nseed: 0", "\nseed: 8"),
    ):
        text = (conf / file).read_text()
        assert old in text
        (conf / file).write_text(text.replace(old, new))
    done = run_app("rerun", str(first.relative_to(tmp_path)), env=env, real=True)
    (second,) = folders(tmp_path) - {first}
    assert weights(second) == weights(first)
    assert tree(first) == before
    (line,) = [line for line in done.stderr.splitlines() if "conf/ has changed" in line]
    assert "optimizer.lr: 0.1 -> 0.3" in line and "seed: 0 -> 8" in line and "momentum" not in line
    config, again = (yaml.safe_load((one / "config.yaml").read_text()) for one in (first, second))
    assert again == config

    run_app("rerun", str(second), "optimizer.lr=0.3", "~algorithms.batch_augment", env=env)  # what conf/ now says
    (third,) = folders(tmp_path) - {first, second}
    changed = yaml.safe_load((third / "config.yaml").read_text())
    expected = config | {"optimizer": config["optimizer"] | {"lr": 0.3}}
    expected["algorithms"] = {"label_smoothing": config["algorithms"]["label_smoothing"]}
    assert changed == expected
    assert weights(third) != weights(first)

    # Resumed, it continues unchanged.
    run_app("resume", str(first), LONGER, env=env)
    resumed = yaml.safe_load((first / "config.yaml").read_text())
    assert resumed["trainer"].pop("max_duration") == "3ep"
    assert config["trainer"].pop("max_duration") == "2ep"
    assert resumed == config
    assert yaml.safe_load((first / "sessions" / "1" / "config.yaml").read_text())["trainer"]["max_duration"] == "2ep"
    run_app(*start, LONGER, "hydra.run.dir=whole")
    assert weights(tmp_path / "whole", "ep3-ba9") == weights(first, "ep3-ba9")
