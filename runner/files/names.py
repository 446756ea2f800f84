"""Names of files in the folder of a run or a sweep that several modules read."""

from __future__ import annotations

CONFIG = "config.yaml"
"""Every value of a run's config, resolved."""
OVERRIDES = "overrides.yaml"
"""The overrides that the user typed for a run."""
ENVIRONMENT = "environment.json"
"""The command of a run, what it started from, and versions, hardware and commit."""
PATCH = "git.patch"
"""The uncommitted changes to the code of a run."""
SIGNATURE = "signature"
"""Proves which user made a record."""
CODE = "code"
"""The folder of the uncommitted modules of a run, laid out like an entry of `sys.path`."""
RECORD = (CONFIG, OVERRIDES, ENVIRONMENT, PATCH, SIGNATURE)
"""The files of a run's record, see `runner.records.record`."""
SESSIONS = "sessions"
"""The folder of the records of earlier sessions of a resumed run."""
RESULT = "result.json"
"""In a run's folder: its result, see `runner.records.result`."""
SWEEP = "sweep.json"
"""In a sweep's folder: describes the sweep, see `runner.sweeps.sweep`."""
