"""Trials: briefly trains the Trainer of an experiment to measure something; nothing is kept.

Its model, data, optimizers, algorithms and callbacks are made for it alone, and its folder is temporary. The streams of
random numbers are functions of the seed, so a trial does not change the numbers of a later run in the same process.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runner.config import build
from runner.config.experiment import Experiment
from runner.core.destination import LoggerDestination
from runner.core.engine import overrides
from runner.core.hooks import Callback
from runner.training.trainer import Trainer
from runner.trials.dry_run import collecting_warnings


@contextmanager
def trial(
    experiment: Experiment, watchers: Mapping[str, Callback], *, watched: bool = True, **changed: Any
) -> Iterator[Trainer]:
    """Yield the Trainer of an experiment, which logs nothing and leaves nothing behind. All ranks.

    The arguments are those of `make_trial`.
    """
    with (
        torch.random.fork_rng(),
        collecting_warnings([]),  # the run itself prints them
        tempfile.TemporaryDirectory(prefix="runner-trial-") as folder,
    ):
        with make_trial(experiment, Path(folder, "run"), watchers, watched=watched, **changed) as trainer:
            yield trainer
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the next run


def make_trial(
    experiment: Experiment, folder: Path, watchers: Mapping[str, Callback], *, watched: bool = True, **changed: Any
) -> Trainer:
    """Return the Trainer of an experiment, which logs nothing. All ranks.

    Destinations are made but not called: they would write, print or connect.

    Args:
        experiment: an experiment that has passed `build.check`.
        folder: folder that callbacks may write to.
        watchers: callbacks to add, by key; they replace the experiment's callback of the same key.
        watched: whether its own callbacks run too, except destinations; otherwise only those that load weights.
        changed: arguments of the Trainer that replace those of the experiment.
    """
    section = experiment.trainer.without(*changed).changed(session=None)
    parts = build.make_parts(experiment, uploads=False)
    callbacks = {
        key: callback
        for key, callback in parts.pop("callbacks").items()
        if (watched or overrides(callback, "before_load")) and not isinstance(callback, LoggerDestination)
    }
    experiment, model, (train, evaluation) = build.make_model_and_data(experiment)
    return build.assemble(
        experiment.changed(trainer=section.plain),
        folder,
        "trial",
        **{
            **parts,
            "model": model,
            "train_dataloader": train,
            "eval_dataloader": evaluation,
            "loggers": [LoggerDestination()],  # values are logged as in the run, and then dropped
            "callbacks": {**callbacks, **watchers},
            **changed,
        },
    )
