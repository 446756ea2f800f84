"""Algorithms that change training, one class per file; loaded on first use, so that importing one imports no other."""

from __future__ import annotations

from runner.core.plugins import Plugins

plugins = Plugins(__name__, __path__[0])
__getattr__ = plugins.load
__dir__ = plugins.names
