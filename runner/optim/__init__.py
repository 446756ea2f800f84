"""Optimizers beside torch's own."""

from __future__ import annotations

from runner.optim.muon import Muon
from runner.optim.selective_decay import SGD, AdamW

__all__ = ["SGD", "AdamW", "Muon"]
