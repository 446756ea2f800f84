"""`runner resume RUN`: trains a run further, in its own folder; to the bit as if it had not been interrupted."""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs import train


def run(job: Job) -> Objective:
    """Train a run further from its latest or a named checkpoint, and return the objective. All ranks.

    The recorded config counts; what is typed changes it. Changes that affect training are refused unless
    `--allow-changes` names them. A run that ended before its first checkpoint starts over in its folder.
    """
    return train.run(job)
