"""`runner decide SETTINGS`: trains settings with equal seeds until it is known which is better.

Settings are typed as in a sweep, `optimizer.lr=0.1,0.2`; or as several overrides in quotes, 'optimizer=sgd
optimizer.lr=0.1' optimizer=adamw; or as '' for the experiment as it is. Other overrides hold for all settings.

After each seed it looks at the objectives, and stops once each setting is better or worse than the first one, or equal
to it within `--margin`, or once the seeds or the time are used up. The p-values and intervals stay valid at every look,
so stopping early is honest; several settings share an error of 5 %. With `--best` it eliminates settings until the best
one is left. With `--campaign`, at most 5 % of all claims of a campaign are expected to be wrong, however many decisions
it has. The same command continues a decision that was cut off. It is a sweep in all else: launchers, reports, MLflow.
"""

from __future__ import annotations

from runner.records.job import Job
from runner.records.result import Objective
from runner.verbs.train import train


def run(job: Job) -> Objective:
    """Train one setting with one seed, and return its objective. All ranks."""
    return train(job)
