"""Restarts on this machine: after a failure of the machine, the same command begins again in the same process.

`os.execve` replaces the program, which gets rid of all of its state: memory, threads, connections, open files. What the
next attempt has to know travels in an environment variable, and nothing that an attempt starts sees it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from runner.distributed.endings import last_words, was_asked_to_end
from runner.distributed.environment import PARENT, for_attempts, from_attempts
from runner.distributed.local_ranks import LocalRanks, ranks
from runner.distributed.slurm import is_job
from runner.failures.errors import Restarted
from runner.failures.exit_codes import ENVIRONMENT

VARIABLE = "RUNNER_ATTEMPTS"
"""The environment variable: what attempts before this one knew, as JSON."""

before_restart: list[Callable[[], object]] = []
"""Functions that are called right before the command begins again."""

_begun: tuple[str, dict[str, str]] | None = None  # the working directory and environment of the command
_offers = 0
_is_asked_for = False


def begin() -> None:
    """Note how this command was started, before it changes its environment."""
    global _begun
    from_attempts.update(json.loads(os.environ.pop(VARIABLE, "{}")))
    for_attempts.update(from_attempts)
    _begun = os.getcwd(), dict(os.environ)


@contextmanager
def offered() -> Iterator[None]:
    """Within the context, `Restarted` may be raised, because whoever enters it begins again."""
    global _offers
    _offers += 1
    try:
        yield
    finally:
        _offers -= 1


def may_restart() -> bool:
    """Return whether a failure of the machine may end in a restart here, unless a signal has asked to end the run.

    Slurm, torchrun, and whoever started this process have their own.
    """
    is_ours = not is_job() and PARENT not in os.environ and isinstance(ranks(), LocalRanks)
    return _offers > 0 and is_ours and not was_asked_to_end()


def count(run_dir: str, most: int, batch: int) -> int:
    """Count a failure of a run, and return the number of the restart that follows, or 0 if all are used up.

    Args:
        run_dir: the run's folder.
        most: restarts in a row that may train no batch more than the one before.
        batch: batches trained according to the newest checkpoint; -1 without one.
    """
    key = f"restarts/{run_dir}"
    used, trained = json.loads(for_attempts.get(key, "[0, -1]"))
    number = 1 if batch > trained else used + 1
    if number > most:
        return 0
    for_attempts[key] = json.dumps([number, max(batch, trained)])
    return number


def ask() -> None:
    """Have `restart_if_asked` begin the command again. Rank 0."""
    global _is_asked_for
    _is_asked_for = True


def is_asked_for() -> bool:
    """Return whether the command is to begin again."""
    return _is_asked_for


def restart_if_asked() -> None:
    """Begin the command again if something asked for it: with its arguments, environment and working directory."""
    if not _is_asked_for or _begun is None:
        return
    folder, environment = _begun
    for call in before_restart:
        call()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for name in os.listdir("/dev/fd"):
        if int(name) > 2:
            with suppress(OSError):
                os.set_inheritable(int(name), False)  # those of drivers too, which would keep a GPU's memory
    os.chdir(folder)
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**environment, VARIABLE: json.dumps(for_attempts)})


@contextmanager
def restarted_when_ended(decide: Callable[[str], object]) -> Iterator[None]:
    """Within the context, begin the command again where `end_abruptly` would end it because the machine failed.

    Args:
        decide: a function of the reason that raises `Restarted` if it is to begin again.
    """

    def restart(code: int, reason: str) -> None:
        if code == ENVIRONMENT and _begun is not None:
            try:
                decide(reason)
            except Restarted:
                ask()
                restart_if_asked()

    last_words.insert(0, restart)  # before others say that the command has ended
    try:
        yield
    finally:
        last_words.remove(restart)
