"""The config that a command line composes."""

from __future__ import annotations

from typing import Any

from hydra import compose

from runner.cli.catalogue import CONF
from runner.config.composed import to_plain
from runner.config.composing import initialized
from runner.config.experiment import Experiment


def composed(*overrides: str) -> dict[str, Any]:
    """What overrides and the files of conf/ make, as plain values."""
    with initialized(CONF):
        return to_plain(compose("config", [*overrides]))


def small_experiment(**changed: Any) -> Experiment:
    """An experiment whose sections are hardly more than their targets, with other values of some keys."""
    needed = {group: {"_target_": f"mine.{group}"} for group in ("model", "data", "optimizer")}
    single = dict.fromkeys(("folds", "run_name", "experiment_name", "budget", "objective", "test", "scheduler"))
    lists: dict[str, Any] = {"callbacks": {}, "algorithms": {}, "vars": {}}
    own = {"seed": 0, "init_weights": "in_order", "trainer": {"_target_": "runner.Trainer"}}
    launch = {"_target_": "runner.distributed.launch.Launch"}
    return Experiment({**needed, **single, **lists, **own, "launch": launch, **changed})
