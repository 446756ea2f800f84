"""A choice typed beside a recipe: keys that the recipe sets for its replaced choice are dropped too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose
from main_runs import SHORT, run_folders
from omegaconf import OmegaConf

from runner.cli.catalogue import CONF
from runner.config.composing import initialized
from runner.config.replaced import without_replaced


def settle(*overrides: str) -> tuple[dict[str, Any], list[str]]:
    with initialized(CONF):
        composed = compose("config", [*overrides])
    config, dropped = without_replaced(composed, overrides, [])
    plain: Any = OmegaConf.to_container(config)
    return plain, dropped


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        ("experiment=digits_plain algorithms=none", "algorithms.batch_augment.pad"),
        ("experiment=digits_plain scheduler=none", "scheduler.t_warmup"),
        ("experiment=digits_plain optimizer=sgd", ""),
        ("experiment=digits_plain +algorithms=ema", ""),
        ("experiment=digits_fast algorithms=[label_smoothing]", "algorithms.batch_augment.pad"),
        (
            "experiment=digits_fast optimizer=adamw optimizer.lr=0.5",
            "algorithms.schedule_free.beta algorithms.schedule_free.bn_batches optimizer.betas",
        ),
        ("experiment=imagefolder_medium scheduler=constant", "scheduler.t_warmup"),  # set by the base recipe
        ("optimizer=adamw", ""),
    ],
)
def test_keys_for_a_replaced_choice_are_dropped(overrides: str, dropped: str):
    assert settle(*overrides.split())[1] == dropped.split()


def test_a_choice_that_replaces_one_of_a_recipe_keeps_its_defaults():
    chosen, _ = settle("experiment=digits_plain", "optimizer=adamw")
    usual, _ = settle("optimizer=adamw")
    assert chosen["optimizer"] == usual["optimizer"]
    chosen, _ = settle("experiment=stdlib_lm_fast", "model=mlp", "data=digits", "data.batch_size=32")
    usual, _ = settle("model=mlp")
    assert chosen["model"] == usual["model"] and chosen["data"]["batch_size"] == 32


def test_a_run_with_dropped_keys_says_so_in_one_line_and_can_be_rerun(folder: Path, run_here: Any):
    typed = (*SHORT, "experiment=digits_plain", "callbacks=none", "algorithms=none", "optimizer=adamw")
    notice = "INFO: dropped the recipe's values for replaced choices: "
    done = run_here(*typed, code=0)
    assert done.err.count(notice) == 1 and "algorithms.batch_augment.pad, " in done.err
    (run,) = run_folders(folder)
    again = run_here("rerun", str(run), code=0)
    assert "conf/ has changed" not in again.err
    (other,) = {*run_folders(folder)} - {run}
    records = [yaml.safe_load((path / "config.yaml").read_text()) for path in (run, other)]
    assert records[0]["optimizer"] == records[1]["optimizer"] and "momentum" not in records[0]["optimizer"]


@pytest.mark.slow
def test_a_sweep_over_optimizers_drops_keys_only_for_replaced_choices(folder: Path, run_here: Any):
    typed = (*SHORT, "experiment=digits_plain", "callbacks=none", "optimizer=sgd,adamw")
    done = run_here("-m", *typed, code=0)
    assert done.err.count("INFO: dropped the recipe's values") == 1
    rates = {
        path.parent.name: yaml.safe_load(path.read_text())["optimizer"]["lr"]
        for path in folder.glob("outputs/sweeps/*/*/*/config.yaml")
    }
    assert sorted(rates.values()) == [0.001, 0.1]
