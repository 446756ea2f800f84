"""Names of files that are read in several places."""

from __future__ import annotations

RESULT = "result.json"
"""In a run's folder: its result, see `runner.records.result`."""
SWEEP = "sweep.json"
"""In a sweep's folder: describes the sweep, see `runner.sweeps.sweep`."""
