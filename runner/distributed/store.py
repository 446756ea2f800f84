"""Where the ranks of a launch meet: one store, for their jobs, each other's addresses, and what failed first."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import traceback
import uuid
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from runner.distributed.launch_secret import signed, verified
from runner.failures import UNKNOWN, Facts, RankFailed, facts_of

log = logging.getLogger("runner")

TIMEOUT = timedelta(minutes=30)
LOCALHOST = "127.0.0.1"
POLL = 0.05  # seconds between two looks at the store
OF_THE_DEVICE = (torch.AcceleratorError, torch.OutOfMemoryError)
SETTLE = 1.0  # seconds after which nobody else is known to have failed first

stopping = threading.Event()
"""Set when this process knows that the job has failed, here or on another rank."""
agreed_to_end = threading.Event()
"""Set when this process knows that all ranks end because of a signal."""

_launch: Store | None = None
_round: Store | None = None
_job = 0
_groups = 0


def launch_store() -> Store:
    """Return the store of the launch, which outlives its ranks under torchrun: the agent keeps it over restarts."""
    global _launch
    if _launch is None:
        _launch, _, _ = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    return _launch


def host(listener: int) -> None:
    """Make this process, rank 0, the host of the store.

    Args:
        listener: descriptor of a listening socket, owned by the store from now on. Ranks may have called there already.
    """
    global _launch, _round
    _launch = _round = TCPStore(
        LOCALHOST, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=listener
    )


def connect() -> Store:
    """Return another connection to the store that this process hosts: on the first, another thread may be waiting."""
    if not isinstance(_launch, TCPStore):
        raise RuntimeError("this process hosts no store")
    return TCPStore(LOCALHOST, _launch.port, is_master=False)


def disconnect() -> None:
    """Forget the ranks of before; others will meet anew."""
    global _launch, _round
    _launch = _round = None


def current_store() -> Store:
    """Return the store of those ranks that run at present, made at the first call. All ranks."""
    global _round
    if _round is None:
        store = launch_store()
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        _round = PrefixStore(_agree_on_round(store), store) if kept else store
    return _round


def begin_job(number: int) -> None:
    """Use keys of its own for a job: what earlier ones left there is stale. All ranks."""
    global _job, _groups
    _job = number
    _groups = 0
    stopping.clear()
    agreed_to_end.clear()


def group_store() -> Store:
    """Return a store for a new process group, once all ranks have come to make one. All ranks.

    Raises:
        RankFailed: one of them will not come.
    """
    global _groups
    _groups += 1
    store = current_store()
    name = f"job/{_job}/group/{_groups}"
    store.set(f"{name}/{_rank()}", "here")
    everyone = [f"{name}/{rank}" for rank in range(_world_size())]
    while not store.check(everyone):
        failure = find_failure(store)
        if failure is not None:
            raise failure
        time.sleep(POLL)
    return PrefixStore(name, store)


def first_failure(error: BaseException) -> BaseException:
    """Return why the ranks fail: `error`, or a RankFailed where that only follows from another's; tell the others.

    What follows from another's failure is a RuntimeError, by which torch says that a rank has left; not one of this
    rank's own device. Signals are agreed upon, and no failure. Any rank.
    """
    is_news = not stopping.is_set()
    stopping.set()
    if _round is None or _world_size() == 1 or not isinstance(error, Exception) or isinstance(error, RankFailed):
        return error
    follows = isinstance(error, RuntimeError) and not isinstance(
        error, (torch.AcceleratorError, torch.OutOfMemoryError)
    )
    if isinstance(error, torch.AcceleratorError) and is_news:
        # Told now, for NCCL's watchdogs may end this process, and those that wait for it, at any moment.
        log.error("rank %d cannot go on, as its device failed", _rank(), exc_info=error)
    try:
        if follows:
            _await_failure(_round)
        first = report_failure(_round, _rank(), "".join(traceback.format_exception(error)), facts_of(error))
    except RuntimeError:  # the host of the store has ended
        return error
    return first if follows and first.rank != _rank() else error


def _await_failure(store: Store) -> None:
    """Wait a moment for the failure of another rank to be reported: one that was killed is reported for by rank 0."""
    deadline = time.monotonic() + SETTLE
    while not store.check([_failure_key()]) and time.monotonic() < deadline:
        time.sleep(POLL)


def report_failure(store: Store, rank: int, trace: str, facts: Facts = UNKNOWN) -> RankFailed:
    """Tell all ranks that one has failed, and return what failed first."""
    name = _failure_key()
    mine = signed(name, json.dumps([rank, trace, facts.to_data()]))
    store.compare_set(name, "", mine)
    if (first := find_failure(store)) is None:  # someone else wrote there
        store.set(name, mine)
    return first or RankFailed(rank, trace, facts)


def find_failure(store: Store) -> RankFailed | None:
    """Return what failed first in this job, None while nothing did; what no rank of this launch wrote is ignored."""
    name = _failure_key()
    with suppress(PermissionError):
        if store.check([name]):
            rank, trace, facts = json.loads(verified(name, store.get(name)))
            return RankFailed(rank, trace, Facts.from_data(facts))
    return None


def _failure_key() -> str:
    return f"job/{_job}/failure"


def _agree_on_round(store: Store) -> str:
    """Return a name that all ranks that run at present agree on, and none of before a restart had. All ranks.

    torchrun's count of restarts is no such name: of two nodes, one counts a failure where the other sees a newcomer.
    So rank 0 takes a new name and welcomes whoever calls under it; those of an earlier round are never welcomed.
    """
    if _rank() == 0:
        name = f"round/{store.add('rounds', 1)}"
        store.set("round", name)
        for rank in range(1, _world_size()):
            store.set(f"{name}/welcome/{store.get(f'{name}/caller/{rank}').decode()}", "")
        return name
    me = uuid.uuid4().hex
    while True:
        name = store.get("round").decode()
        store.set(f"{name}/caller/{_rank()}", me)
        time.sleep(POLL)
        if store.check([f"{name}/welcome/{me}"]):
            return name


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
