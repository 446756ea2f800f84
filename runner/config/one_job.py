"""A command that runs one job: it composes the config once, whereas `hydra.main` composes it twice."""

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
from runner.libraries.shortcuts import is_taken

# Options, and the keys through which a config may say that there are many jobs, or have Hydra call something.
_FOR_HYDRA = re.compile(r"-|[+~]*hydra(=|[./](mode|searchpath|callbacks)\b)")


def is_one_job(arguments: Sequence[str]) -> bool:
    """Return whether a command runs one job and needs nothing else from Hydra.

    Hydra composes the config an extra time to find out, which takes a fifth of a second. Our own `conf/` sets
    nothing that decides it, so what is typed does.
    """
    return is_taken("composing") and not any(map(_FOR_HYDRA.match, arguments))


def run_one_job(task: TaskFunction, arguments: Sequence[str]) -> None:
    """Compose `conf/` with overrides and call a task with it, as `hydra.main` does."""
    with initialized(CONF, "runner"):
        config = compose("config", [*arguments, "hydra.mode=RUN"], return_hydra_config=True)
        callbacks: Any = Callback()  # does nothing; that of conf/ is for sweeps
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)
    result = run_job(task, config, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
    _ = result.return_value  # raises what the task has raised
