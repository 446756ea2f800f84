"""Restarts of a command on one machine: their number, and the values that one attempt passes to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from runner.distributed import environment, restarts
from runner.distributed.environment import PARENT, keep_across_restarts
from runner.distributed.launch import Launch


@pytest.fixture(autouse=True)
def first_attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets this process look like the first attempt of a command."""
    monkeypatch.setattr(restarts, "_start", None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv(PARENT, raising=False)
    for values in (environment.from_attempts, environment.for_attempts):
        values.clear()
    yield
    for values in (environment.from_attempts, environment.for_attempts):
        values.clear()


def test_a_checkpoint_of_a_later_batch_resets_the_count():
    batches = [-1, -1, 4, 4, 4, 9, 9, 9, 9]
    assert [restarts.count_failure("run", 2, batch) for batch in batches] == [1, 2, 1, 2, 0, 1, 2, 0, 0]
    assert restarts.count_failure("another run", 2, 4) == 1
    assert restarts.count_failure("run", 0, 20) == 0


def test_an_attempt_inherits_the_values_of_earlier_ones_but_its_child_processes_do_not(monkeypatch: pytest.MonkeyPatch):
    restarts.save_start()
    assert keep_across_restarts("folder", lambda: "first") == "first"
    restarts.count_failure("run", 3, 5)
    monkeypatch.setenv(restarts.VARIABLE, json.dumps(environment.for_attempts))
    restarts.save_start()
    assert restarts.VARIABLE not in os.environ
    assert keep_across_restarts("folder", lambda: "second") == "first"
    assert keep_across_restarts("other", lambda: "third") == "third"
    assert restarts.count_failure("run", 3, 5) == 2


@pytest.mark.parametrize(("variable", "value"), [("SLURM_JOB_ID", "7"), (PARENT, "1")])
def test_only_a_command_that_nothing_else_restarts_may_restart(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    assert not restarts.may_restart()
    with restarts.allowed():
        assert restarts.may_restart()
        monkeypatch.setenv(variable, value)
        assert not restarts.may_restart()


@pytest.mark.parametrize("value", [-1, True, 1.5, "3", None])
def test_an_invalid_number_of_restarts_is_refused(value: Any):
    with pytest.raises(ValueError, match="restarts=.*: must be a whole number, 0 or more"):
        Launch(restarts=value)
