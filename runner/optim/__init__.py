"""Muon, and groups of parameters for every optimizer."""

from __future__ import annotations

from runner.optim.muon import Muon
from runner.optim.param_groups import ParamGroups

__all__ = ["Muon", "ParamGroups"]
