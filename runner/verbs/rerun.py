"""`runner rerun RUN`: trains the experiment of a run again, from its record, in a new folder.

It uses the recorded config with the typed overrides. Code that was uncommitted at the time comes from the copy kept
with the run.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train the experiment of a run again, and return the objective. All ranks."""
    return train.run(job)
