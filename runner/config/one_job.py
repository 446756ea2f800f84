"""Runs a command with one job and composes its config once, whereas `hydra.main` composes it twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, TaskFunction

from runner.cli.catalogue import CONF
from runner.config.composing import initialized
from runner.libraries.shortcuts import is_enabled

# Options, and keys that ask for several jobs or make Hydra call something.
_FOR_HYDRA = re.compile(r"-|[+~]*hydra(=|[./](mode|searchpath|callbacks)\b)")


def is_one_job(arguments: Sequence[str]) -> bool:
    """Return whether a command runs one job and needs nothing else from Hydra.

    To find out, Hydra would compose the config once more, which takes a fifth of a second. Nothing in the runner's
    `conf/` affects the answer, so the typed arguments are enough.
    """
    return is_enabled("composing") and not any(map(_FOR_HYDRA.match, arguments))


def run_one_job(task: TaskFunction, arguments: Sequence[str]) -> None:
    """Compose `conf/` with overrides and call a task with it, as `hydra.main` does."""
    with initialized(CONF, "runner"):
        config = compose("config", [*arguments, "hydra.mode=RUN"], return_hydra_config=True)
        callbacks: Any = Callback()  # does nothing; the callback in conf/ is for sweeps
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)
    result = run_job(task, config, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
    _ = result.return_value  # raises the exception of the task, if any
