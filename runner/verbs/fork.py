"""`runner fork RUN BATCH`: trains a new run that begins with the state of another run after a batch.

The original run stays untouched. If it has no checkpoint at that batch, the batches since the nearest earlier one
are retrained, bit for bit. Almost anything may change, except for example the class of the optimizer. `runner -m fork
RUN ba100,ba200` begins a run at each of these batches.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train a fork, and return the objective. All ranks."""
    from runner.trials.forking import begin_fork  # imports torch

    return train.train(job, begin_fork)
