"""`runner resume RUN`: continues a run in its own folder, bit for bit as if it had never been interrupted.

It continues from the newest checkpoint, or from a named one, with the recorded config and the typed overrides. Changes
that affect training are refused unless `--allow-changes` names them. A run that ended before its first checkpoint
starts over.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train a run further, and return the objective. All ranks."""
    return train.run(job)
