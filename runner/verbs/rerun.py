"""`runner rerun RUN`: trains the experiment of a run again, from its record."""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train the experiment of a run again from its record, in a new folder, and return the objective. All ranks.

    The recorded config counts; what is typed changes it. Code that no commit held is used as it was kept with the run.
    """
    return train.run(job)
