"""`runner rerun RUN`: trains the experiment of a run again, from its record, in a new folder.

The recorded config is used, with the overrides that are typed. Code that was uncommitted at the time is taken from the
copy kept with the run.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train the experiment of a run again, and return the objective. All ranks."""
    return train.run(job)
