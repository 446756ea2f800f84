"""Optimizers, parameter groups and learning-rate schedules: how they are made, and how they step."""

from __future__ import annotations

from runner.optim.muon import Muon
from runner.optim.param_groups import ParamGroups

__all__ = ["Muon", "ParamGroups"]
