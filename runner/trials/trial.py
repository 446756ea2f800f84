"""A trial: the Trainer of a config, trained briefly to measure something; nothing is kept.

Its model, data, optimizers, algorithms and callbacks are made for it alone, and its folder is temporary. The streams of
random numbers are functions of the seed, so a run that is made after a trial in the same process has the same numbers.
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
from runner.core.destination import LoggerDestination
from runner.core.engine import overrides
from runner.core.hooks import Callback
from runner.training.trainer import Trainer
from runner.trials.dry_run import collecting_warnings


@contextmanager
def trial(
    config: Mapping[str, Any], watchers: Mapping[str, Callback], *, watched: bool = True, **changed: Any
) -> Iterator[Trainer]:
    """Yield the Trainer of a config, which logs nothing and leaves nothing behind. All ranks.

    The arguments are those of `make_trial`.
    """
    with (
        torch.random.fork_rng(),
        collecting_warnings([]),  # the run itself gives them
        tempfile.TemporaryDirectory(prefix="runner-trial-") as folder,
    ):
        with make_trial(config, Path(folder, "run"), watchers, watched=watched, **changed) as trainer:
            yield trainer
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the run that follows


def make_trial(
    config: Mapping[str, Any], folder: Path, watchers: Mapping[str, Callback], *, watched: bool = True, **changed: Any
) -> Trainer:
    """Return the Trainer of a config, which logs nothing. All ranks.

    Destinations are made but not called: they would write, print or connect.

    Args:
        config: a config that `build.check` has accepted.
        folder: folder that callbacks may write to.
        watchers: callbacks that are added, by key; they take the place of the config's own of that key.
        watched: whether the config's own callbacks run too, except destinations; otherwise only the ones that load
            weights.
        changed: arguments of the Trainer in place of the config's.
    """
    section = {key: value for key, value in config["trainer"].items() if key not in changed} | {"session": None}
    parts = build.make_parts(config, uploads=False)
    callbacks = {
        key: one
        for key, one in parts.pop("callbacks").items()
        if (watched or overrides(one, "before_load")) and not isinstance(one, LoggerDestination)
    }
    model = build.make_model(config)
    train, evaluation = build.make_data(config)
    return build.assemble(
        {**config, "trainer": section},
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
