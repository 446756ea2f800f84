"""The jobs of a sweep before the first one starts: which parts are created as a check, and how errors name a job."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
from composed_configs import composed
from torch import nn

from runner import Callback, ClassificationModel
from runner.failures.errors import WrongConfig
from runner.sweeps.plan import PlannedJob, _check_all, check_jobs, name_job_in

MADE: list[str] = []


class Witness(Callback):
    def __init__(self) -> None:
        MADE.append("callback")


class Reading(ClassificationModel):
    """Cannot be created on the meta device, nor with a negative size on any device."""

    def __init__(self, size: int = 4) -> None:
        MADE.append("model")
        if size == 0:
            raise ValueError(f"size={size!r}: must be at least 1")
        super().__init__(nn.Linear(64, size), 10)
        self.scale = float(next(self.parameters()).sum())


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "planned_here", sys.modules[__name__])
    monkeypatch.setattr(sys, "argv", ["runner"])
    MADE.clear()
    plain = composed("callbacks=none", "algorithms=none", "hydra.run.dir=.")
    return plain | {
        "callbacks": {"witness": {"_target_": "planned_here.Witness"}},
        "model": {"_target_": "planned_here.Reading", "size": 4},
    }


def jobs(config: Any, *changes: dict[str, Any]) -> list[PlannedJob]:
    """A job for each change: the value of a group's key."""
    planned = []
    for change in changes:
        own = copy.deepcopy(config)
        for key, value in change.items():
            group, _, inner = key.partition(".")
            if inner:
                own[group][inner] = value
            else:
                own[key] = value
        planned.append(PlannedJob([f"{key}={value}" for key, value in change.items()], own))
    return planned


def test_what_many_jobs_share_is_made_once(config: Any):
    check_jobs(jobs(config, *({"seed": seed} for seed in range(5))), "basic", set())
    assert MADE == ["callback", "model", "model"]  # unsuccessfully on the meta device, then with memory
    MADE.clear()
    check_jobs(jobs(config, *({"optimizer.lr": lr} for lr in (0.1, 0.2, 0.3))), "basic", set())
    assert MADE.count("callback") == 1 and MADE.count("model") == 2


def test_the_job_that_cannot_be_made_is_named(config: Any):
    with pytest.raises(WrongConfig, match="negative dimension") as raised:
        check_jobs(jobs(config, {"model.size": 4, "seed": 0}, {"model.size": -3, "seed": 0}), "basic", set())
    assert str(raised.value).splitlines()[1:] == ["  in the job model.size=-3 seed=0"]
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_a_machine_cannot_do_is_left_to_the_one_that_trains(config: Any):
    """A wrong value is wrong on every machine."""
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
def test_a_message_names_its_job_unless_a_key_of_it_does(overrides: list[str], others: int, message: str):
    assert name_job_in("lr=3: too much", "lr", overrides, others) == message
