from __future__ import annotations

import os

import pytest

from runner.distributed.environment import environment, is_rank_zero, keep_across_restarts, without_ranks


def test_without_ranks_hides_and_restores_the_variables_of_a_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(KeyError), without_ranks():
        assert is_rank_zero()
        os.environ["WORLD_SIZE"] = "3"
        raise KeyError
    assert os.environ["RANK"] == "1" and "WORLD_SIZE" not in os.environ


def test_environment_sets_removes_and_restores_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    monkeypatch.delenv("NEW", raising=False)
    with environment({"CHANGED": "inside", "REMOVED": None, "NEW": "inside"}):
        assert os.environ["CHANGED"] == os.environ["NEW"] == "inside"
        assert "REMOVED" not in os.environ
    assert os.environ["CHANGED"] == os.environ["REMOVED"] == "before"
    assert "NEW" not in os.environ


def test_values_are_not_kept_across_restarts_without_torchrun():
    assert [keep_across_restarts("key", lambda value=value: value) for value in "ab"] == ["a", "b"]
