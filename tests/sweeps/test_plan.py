"""The check of a sweep's jobs before the first one starts: which parts are created, and how errors name a job."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
from composed_configs import composed
from omegaconf import OmegaConf
from torch import nn

from runner import Callback, ClassificationModel
from runner.config.composing import parse_override
from runner.failures.errors import WrongConfig
from runner.sweeps.plan import PlannedJob, _check_all, check_jobs, name_job_in, planned_overrides

CREATED: list[str] = []


class OwnCallback(Callback):
    def __init__(self) -> None:
        CREATED.append("callback")


class Reading(ClassificationModel):
    """A model that cannot be created on the meta device, nor with a negative size on any device."""

    def __init__(self, size: int = 4) -> None:
        CREATED.append("model")
        if size == 0:
            raise ValueError(f"size={size!r}: must be at least 1")
        super().__init__(nn.Linear(64, size), 10)
        self.scale = float(next(self.parameters()).sum())


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A config whose callback and model add to `CREATED` when they are created."""
    monkeypatch.setitem(sys.modules, "planned_here", sys.modules[__name__])
    monkeypatch.setattr(sys, "argv", ["runner"])
    CREATED.clear()
    plain = composed("callbacks=none", "algorithms=none", "hydra.run.dir=.")
    return plain | {
        "callbacks": {"own": {"_target_": "planned_here.OwnCallback"}},
        "model": {"_target_": "planned_here.Reading", "size": 4},
    }


def jobs(config: Any, *changes: dict[str, Any]) -> list[PlannedJob]:
    """Return jobs, each with the config after one of the changes, which map keys to values."""
    planned = []
    for change in changes:
        changed = copy.deepcopy(config)
        for key, value in change.items():
            group, _, inner = key.partition(".")
            if inner:
                changed[group][inner] = value
            else:
                changed[key] = value
        planned.append(PlannedJob([f"{key}={value}" for key, value in change.items()], changed))
    return planned


def test_parts_that_jobs_share_are_created_once(config: Any):
    check_jobs(jobs(config, *({"seed": seed} for seed in range(5))), "basic", set())
    assert CREATED == ["callback", "model", "model"]  # the model on the meta device, which fails, and on the CPU
    CREATED.clear()
    check_jobs(jobs(config, *({"optimizer.lr": lr} for lr in (0.1, 0.2, 0.3))), "basic", set())
    assert CREATED.count("callback") == 1 and CREATED.count("model") == 2


def test_a_value_given_twice_makes_one_job():
    grid = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/sweeper": "basic"}}}})
    typed = [parse_override(text) for text in ("optimizer.lr=0.1,0.2,0.1", "seed=0", "data.batch_size=8,8")]
    planned = planned_overrides(grid, typed)
    assert planned == [[f"optimizer.lr={rate}", "seed=0", "data.batch_size=8"] for rate in ("0.1", "0.2")]


def test_a_job_that_cannot_be_created_is_named(config: Any):
    with pytest.raises(WrongConfig, match="negative dimension") as raised:
        check_jobs(jobs(config, {"model.size": 4, "seed": 0}, {"model.size": -3, "seed": 0}), "basic", set())
    assert str(raised.value).splitlines()[1:] == ["  in the job model.size=-3 seed=0"]
    assert isinstance(raised.value.__cause__, ValueError)


def test_runtime_errors_are_left_to_the_machine_that_trains(config: Any):
    """A ValueError is raised anyway, because a wrong value is wrong on every machine."""
    planned = jobs(config, {"model.size": -3})
    _check_all(planned, set(), runs_here=False)
    with pytest.raises(WrongConfig, match="RuntimeError"):
        _check_all(planned, set(), runs_here=True)
    with pytest.raises(WrongConfig, match="size=0: must be"):
        _check_all(jobs(config, {"model.size": 0}), set(), runs_here=False)


@pytest.mark.parametrize(
    ("overrides", "others", "message"),
    [
        ([], 0, "lr=3: too much"),
        (["+lr=3", "seed=1"], 4, "lr=3: too much"),
        (["seed=1", "model=a"], 0, "lr=3: too much\n  in the job seed=1 model=a"),
        (["seed=1"], 2, "lr=3: too much\n  in the job seed=1 and 2 more"),
    ],
)
def test_a_message_names_its_job_unless_it_names_the_key(overrides: list[str], others: int, message: str):
    assert name_job_in("lr=3: too much", "lr", overrides, others) == message
