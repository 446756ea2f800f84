"""Make and step optimizers, with parameter groups and learning-rate schedules."""

from __future__ import annotations

from runner.optim.muon import Muon
from runner.optim.param_groups import ParamGroups

__all__ = ["Muon", "ParamGroups"]
