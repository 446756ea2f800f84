from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra

from runner.config.catalogue import CONF
from runner.config.hydra_mode import composed_once

CHECK = ("mode=check", "model=mlp", "callbacks=none")


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The overrides of each composition."""
    found: list[Any] = []
    load = ConfigLoaderImpl.load_configuration

    def count(loader: Any, config_name: Any, overrides: Any, *given: Any, **named: Any) -> Any:
        found.append(list(overrides))
        return load(loader, config_name, overrides, *given, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)
    return found


def test_a_command_is_composed_once(run_here: Any, composed: list[Any]):
    run_here(*CHECK, code=0)
    assert composed == [[*CHECK, "hydra.mode=RUN"]]


def test_a_sweep_is_composed_once_and_then_its_jobs(run_here: Any, composed: list[Any]):
    run_here("-m", "seed=0,1", *CHECK, code=0)
    assert "hydra.mode=MULTIRUN" in composed[0]
    assert all("seed=0,1" not in one for one in composed[1:])


def test_a_mode_that_is_typed_or_in_a_file_of_the_user_is_what_hydra_makes_of_it(tmp_path: Path, run_here: Any):
    assert "seed=1" in run_here("hydra.mode=MULTIRUN", "seed=0,1", *CHECK, code=0).out
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    assert "seed=1" in run_here("experiment=mine", "seed=0,1", *CHECK, code=0).out


def test_none_of_our_files_sets_it():
    for file in CONF.rglob("*.yaml"):
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        assert "mode" not in (content.get("hydra") or {}), file


@pytest.mark.parametrize("typed", ["--config-dir=conf", "-cd", "hydra.mode=RUN", "hydra.searchpath=[a]"])
def test_hydra_is_asked_where_something_else_may_set_it(typed: str):
    before = Hydra.get_mode
    with composed_once([typed]):
        assert Hydra.get_mode is before
    with composed_once(["seed=1"]):
        assert Hydra.get_mode is not before
    assert Hydra.get_mode is before
