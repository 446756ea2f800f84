"""`runner decide SETTINGS`: trains settings with equal seeds until it is known which is better.

Settings are written as in a sweep, `optimizer.lr=0.1,0.2`; or as several overrides in quotes, 'optimizer=sgd
optimizer.lr=0.1' optimizer=adamw; or as '' for the experiment as it is. Other overrides apply to all settings.

After each seed it compares the objectives. It stops once each setting has turned out better than the first, worse, or
equal within `--margin`, or once the seeds or the time run out. The p-values and intervals are valid after every seed,
so it is safe to stop early; the error rate for all settings together is 5 %. With `--best` it eliminates settings until
only the best is left. With `--campaign`, at most 5 % of a campaign's claims are expected to be wrong, however many
decisions it has. Repeat the command to continue if interrupted. Launchers, reports and MLflow work as in a sweep.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs.train import train


def run(job: Job) -> Objective:
    """Train one setting with one seed, and return its objective. All ranks."""
    return train(job)
