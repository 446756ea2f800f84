"""`runner fork RUN BATCH`: trains a new run that begins with the state of another one after a batch.

The other run stays as it is. Where it has no checkpoint of that batch, the batches since its last one are retrained,
bit for bit. Anything but the class of the optimizer may be changed. `runner -m fork RUN ba100,ba200` begins a run at
each of several batches.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train a fork, and return the objective. All ranks."""
    return train.run(job)
