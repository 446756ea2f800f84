"""Restarts on this machine: after the machine failed, the same command begins again in the same process.

`os.execve` replaces the program, and with it all state: memory, threads, connections, open files. An environment
variable passes facts to the next attempt; processes that an attempt starts do not see it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from runner.distributed.endings import at_abrupt_end, was_asked_to_end
from runner.distributed.environment import PARENT, for_attempts, from_attempts
from runner.distributed.local_ranks import LocalRanks, ranks
from runner.distributed.slurm import is_job
from runner.failures.errors import Restarted
from runner.failures.exit_codes import ENVIRONMENT_FAILED

VARIABLE = "RUNNER_ATTEMPTS"
"""Environment variable with the facts from earlier attempts, as JSON."""

before_restart: list[Callable[[], object]] = []
"""Functions to call right before the command begins again."""

_start: tuple[str, dict[str, str]] | None = None  # the working directory and environment of the command
_allowed_depth = 0
_is_requested = False


def save_start() -> None:
    """Save the working directory and environment of this command, before it changes them."""
    global _start
    from_attempts.update(json.loads(os.environ.pop(VARIABLE, "{}")))
    for_attempts.update(from_attempts)
    _start = os.getcwd(), dict(os.environ)


@contextmanager
def allowed() -> Iterator[None]:
    """Within the context, allow `Restarted` to be raised, because the caller begins again when it is."""
    global _allowed_depth
    _allowed_depth += 1
    try:
        yield
    finally:
        _allowed_depth -= 1


def may_restart() -> bool:
    """Return whether a failure of the machine may end in a restart here; not after a signal asked the run to end.

    Slurm, torchrun, or another run that started this process have restarts of their own.
    """
    is_outermost = not is_job() and PARENT not in os.environ and isinstance(ranks(), LocalRanks)
    return _allowed_depth > 0 and is_outermost and not was_asked_to_end()


def count_failure(run_dir: str, most: int, batch: int) -> int:
    """Count a failure of a run, and return the number of the next restart, or 0 if all are used up.

    Args:
        run_dir: the run's folder.
        most: maximum number of restarts in a row without progress in between.
        batch: batches trained at the newest checkpoint; -1 without a checkpoint.
    """
    key = f"restarts/{run_dir}"
    used, trained = json.loads(for_attempts.get(key, "[0, -1]"))
    number = 1 if batch > trained else used + 1
    if number > most:
        return 0
    for_attempts[key] = json.dumps([number, max(batch, trained)])
    return number


def request() -> None:
    """Have `restart_if_requested` begin the command again. Rank 0."""
    global _is_requested
    _is_requested = True


def is_requested() -> bool:
    """Return whether the command will begin again."""
    return _is_requested


def restart_if_requested() -> None:
    """Begin the command again, if requested, with its arguments, environment and working directory."""
    if not _is_requested or _start is None:
        return
    folder, environment = _start
    for function in before_restart:
        function()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            with suppress(OSError):
                os.set_inheritable(int(name), False)  # also those of drivers, which would keep GPU memory
    os.chdir(folder)
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**environment, VARIABLE: json.dumps(for_attempts)})


@contextmanager
def restarted_when_ended(decide: Callable[[str], object]) -> Iterator[None]:
    """Within the context, begin the command again if `end_abruptly` would end it after the machine failed.

    Args:
        decide: a function of the reason that raises `Restarted` if the command should begin again.
    """

    def restart(code: int, reason: str) -> None:
        if code == ENVIRONMENT_FAILED and _start is not None:
            try:
                decide(reason)
            except Restarted:
                request()
                restart_if_requested()

    at_abrupt_end.insert(0, restart)  # before other functions report that the command has ended
    try:
        yield
    finally:
        at_abrupt_end.remove(restart)
