"""Facts about a process and its launch from environment variables: rank, launcher, restarts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from runner.distributed.launch_secret import signed, verified
from runner.distributed.slurm import keep_across_requeues

PARENT = "RUNNER_PARENT"
"""Environment variable of a rank or run that this program started: the process id of its parent."""

from_attempts: dict[str, str] = {}
"""Facts from earlier attempts of this command; see `runner.distributed.restarts`."""
for_attempts: dict[str, str] = {}
"""Facts for later attempts of this command."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that make a process one of several ranks."""


def is_rank_zero() -> bool:
    """Return whether this process is the only one, or rank 0, and so composes the jobs."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def environment(changes: Mapping[str, str] | Mapping[str, str | None]) -> Iterator[None]:
    """Within the context, set environment variables, or remove those whose value is None; restore them on exit."""
    previous = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(previous)


def without_ranks() -> AbstractContextManager[None]:
    """Return a context in which this process acts as a single one, even if torchrun started several."""
    return environment(dict.fromkeys(RANK_VARIABLES))


def keep_across_restarts(key: str, make: Callable[[], str]) -> str:
    """Return the result of `make`; after a restart by this program, torchrun or Slurm, its first result. Rank 0."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        for_attempts[key] = from_attempts[key] if key in from_attempts else keep_across_requeues(key, make)
        return for_attempts[key]
    from runner.distributed.store import launch_store

    store = launch_store()
    if not store.check([key]):
        store.set(key, signed(key, keep_across_requeues(key, make)))
    return verified(key, store.get(key))


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
