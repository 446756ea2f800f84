"""Configs composed from a command line, and a minimal experiment."""

from __future__ import annotations

from typing import Any

from hydra import compose

from runner.cli.catalogue import CONF
from runner.config.composed import to_plain
from runner.config.composing import initialized
from runner.config.experiment import Experiment


def composed(*overrides: str) -> dict[str, Any]:
    """Return the config that overrides and the files of conf/ compose, as plain values."""
    with initialized(CONF):
        return to_plain(compose("config", [*overrides]))


def small_experiment(**sections: Any) -> Experiment:
    """Return an experiment whose sections hold only their targets, except for the sections that are passed."""
    required = {group: {"_target_": f"mine.{group}"} for group in ("model", "data", "optimizer")}
    unset = dict.fromkeys(("folds", "run_name", "experiment_name", "budget", "objective", "test", "scheduler"))
    empty: dict[str, Any] = {"callbacks": {}, "algorithms": {}, "vars": {}}
    fixed = {"seed": 0, "init_weights": "in_order", "trainer": {"_target_": "runner.Trainer"}}
    launch = {"_target_": "runner.distributed.launch.Launch"}
    return Experiment({**required, **unset, **empty, **fixed, "launch": launch, **sections})
