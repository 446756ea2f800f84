"""The Hydra sweeper that trains the jobs of a decision, one seed at a time, until everything is decided."""

from __future__ import annotations

import time
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runner.config.errors import config_errors
from runner.distributed.threads import parallel_jobs
from runner.failures.errors import SweepRefused, WrongConfig
from runner.sweeps import sweep as sweeps
from runner.sweeps.decide.contenders import SWEEPER
from runner.sweeps.decide.contest import Look
from runner.sweeps.decide.outcome import describe, introduce
from runner.sweeps.sweep import Sweep


class DecideSweeper(Sweeper):
    """Trains the settings of the sweep that this process leads, with equal seeds, and compares them after each seed.

    Args:
        params: overrides for all jobs, as other sweepers have them.
    """

    def __init__(self, params: Any = None) -> None:
        self._launcher: Launcher | None = None
        self._places = 1

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        name = config.hydra.runtime.choices["hydra/launcher"]
        self._places = config.hydra.launcher.array_parallelism if "submitit" in name else parallel_jobs(config.hydra)

    def sweep(self, arguments: list[str]) -> None:
        """Train until everything is decided, until the seeds or the time are used up, or until a job fails."""
        sweep = sweeps.current
        assert self._launcher is not None and sweep is not None
        contest, progress = sweep.contest, sweep.progress
        assert contest is not None and progress is not None
        progress.say(*introduce(contest))
        began = time.monotonic()
        slowest = 0.0  # seconds
        looked = number = 0
        look = self._look(sweep)
        while True:
            for seeds in range(looked + 1, look.seeds + 1):
                progress.say(describe(look.after(seeds)))
            looked = look.seeds
            jobs = look.next_jobs(self._places)
            if not jobs or time.monotonic() - began + slowest > contest.seconds:
                return
            started = time.monotonic()
            overrides = [[*contest.shared, *contest.contenders[index].job(seed)] for index, seed in jobs]
            for job in self._launcher.launch(overrides, initial_job_idx=number):
                _ = job.return_value  # raises the error of the launcher, if any
            number += len(jobs)
            slowest = max(slowest, time.monotonic() - started)
            look = self._look(sweep)
            if any(len(look.objectives[index]) <= seed for index, seed in jobs):
                return  # a job failed, or the sweep was stopped

    def _look(self, sweep: Sweep) -> Look:
        """Return what the results so far say.

        Raises:
            SweepRefused: the settings cannot be compared.
        """
        assert sweep.contest is not None
        results = sweep.results_of_contest()
        try:
            with config_errors():
                sweep.contest.check_comparable(results)
        except WrongConfig as error:
            raise SweepRefused(error) from error
        return sweep.contest.look(results)


def register() -> None:
    """Make the sweeper a choice of `hydra/sweeper`."""
    # Hydra only takes plugins whose names are in this package, wherever their classes are.
    name = f"hydra_plugins.runner.{DecideSweeper.__name__}"
    Plugins.instance().class_name_to_class[name] = DecideSweeper
    ConfigStore.instance().store(group="hydra/sweeper", name=SWEEPER, node={"_target_": name, "params": {}})
