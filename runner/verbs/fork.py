"""`runner fork RUN BATCH`: trains a new run that begins with the state of another one after a batch."""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train a new run from the moment after a batch of another one, and return the objective. All ranks.

    The parent stays as it is. Where it has no checkpoint of that batch, the batches after its last one before it are
    trained again, bit for bit. Anything but the optimizer's class may be changed. `-m fork RUN ba100,ba200` begins one
    at each moment.
    """
    return train.run(job)
