"""The store that the ranks of a launch share: it holds their jobs, addresses and first failure."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from runner.distributed.launch_secret import signed, verified
from runner.failures.errors import RankFailed
from runner.failures.facts import UNKNOWN, Facts, annotate, facts_to_report
from runner.failures.tracebacks import format_failure

log = logging.getLogger("runner")

TIMEOUT = timedelta(minutes=30)
LOCALHOST = "127.0.0.1"
POLL = 0.05  # seconds between two checks of the store
LOST = re.compile(r"Connection (reset|closed) by peer|Broken pipe|Connection timed out|No route to host")
"""Error messages of torch's backends when another rank has become unreachable."""
SETTLE = 1.0  # seconds to wait for another rank to report that it failed first

stopping = threading.Event()
"""Set when this process knows that the job has failed, here or on another rank."""
agreed_to_end = threading.Event()
"""Set when this process knows that all ranks end because of a signal."""

_launch: Store | None = None
_round: Store | None = None
_job = 0
_groups = 0


def launch_store() -> Store:
    """Return the store of the launch. Under torchrun, the agent keeps it when it restarts the ranks."""
    global _launch
    if _launch is None:
        _launch, _, _ = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    return _launch


def host(listener: int) -> None:
    """Make this process, rank 0, the host of the store.

    The store takes over the listening socket; ranks may have connected to it already.
    """
    global _launch, _round
    _launch = _round = TCPStore(
        LOCALHOST, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=listener
    )


def connect() -> Store:
    """Return a second connection to the store that this process hosts, because a thread may be blocking the first."""
    if not isinstance(_launch, TCPStore):
        raise RuntimeError("this process hosts no store")
    return TCPStore(LOCALHOST, _launch.port, is_master=False)


def disconnect() -> None:
    """Forget the store, so that the next ranks share a new one."""
    global _launch, _round
    _launch = _round = None


def current_store() -> Store:
    """Return the store of the current ranks, made at the first call. All ranks."""
    global _round
    if _round is None:
        store = launch_store()
        survives_restarts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        _round = PrefixStore(_agree_on_round(store), store) if survives_restarts else store
    return _round


def begin_job(number: int) -> None:
    """Use separate keys for each job, because those of earlier jobs are stale. All ranks."""
    global _job, _groups
    _job = number
    _groups = 0
    stopping.clear()
    agreed_to_end.clear()


def group_store() -> Store:
    """Return a store for a new process group, once all ranks are ready to make one. All ranks.

    Raises:
        RankFailed: a rank failed, so it will never be ready.
    """
    global _groups
    _groups += 1
    store = current_store()
    name = f"job/{_job}/group/{_groups}"
    store.set(f"{name}/{_rank()}", "here")
    keys = [f"{name}/{rank}" for rank in range(_world_size())]
    while not store.check(keys):
        failure = find_failure(store)
        if failure is not None:
            raise failure
        time.sleep(POLL)
    return PrefixStore(name, store)


def first_failure(error: BaseException) -> BaseException:
    """Return the first failure, `error` or a RankFailed from another rank, and report `error` to the others.

    A RuntimeError counts as a consequence of another rank's failure, because torch raises it when a rank has gone,
    unless this rank's own device raised it. Signals are not failures: all ranks agree on those. Any rank.
    """
    is_first_error = not stopping.is_set()
    stopping.set()
    if _round is None or _world_size() == 1 or not isinstance(error, Exception) or isinstance(error, RankFailed):
        return error
    is_consequence = isinstance(error, RuntimeError) and not isinstance(
        error, (torch.AcceleratorError, torch.OutOfMemoryError)
    )
    if isinstance(error, torch.AcceleratorError) and is_first_error:
        # Log it now, because NCCL's watchdogs may end this process, and ranks that wait for it, at any moment.
        log.error("rank %d cannot continue: its device failed", _rank(), exc_info=error)
    try:
        if is_consequence:
            _await_failure(_round)
            if LOST.search(str(error)) and find_failure(_round) is None:
                annotate(error, of_environment=True)  # the missing rank was killed, or its machine was lost
        first = report_failure(_round, _rank(), format_failure(error), facts_to_report(error))
    except RuntimeError:  # the host of the store has ended
        annotate(error, of_environment=True)
        return error
    return first if is_consequence and first.rank != _rank() else error


def _await_failure(store: Store) -> None:
    """Wait up to `SETTLE` seconds for a failure of another rank; rank 0 reports ranks that were killed."""
    deadline = time.monotonic() + SETTLE
    while not store.check([job_key("failure")]) and time.monotonic() < deadline:
        time.sleep(POLL)


def report_failure(store: Store, rank: int, trace: str, facts: Facts = UNKNOWN) -> RankFailed:
    """Report to all ranks that `rank` failed, and return the first failure reported."""
    name = job_key("failure")
    report = signed(name, json.dumps([rank, trace, facts.to_data()]))
    store.compare_set(name, "", report)
    if (first := find_failure(store)) is None:  # the key holds a value that no rank has written
        store.set(name, report)
    return first or RankFailed(rank, trace, facts)


def find_failure(store: Store) -> RankFailed | None:
    """Return the first failure of this job, or None; reports not signed by this launch are ignored."""
    name = job_key("failure")
    with suppress(PermissionError):
        if store.check([name]):
            rank, trace, facts = json.loads(verified(name, store.get(name)))
            return RankFailed(rank, trace, Facts.from_data(facts))
    return None


def job_key(name: str) -> str:
    """Return the store's key for a name within the current job."""
    return f"job/{_job}/{name}"


def _agree_on_round(store: Store) -> str:
    """Return a name on which the current ranks agree, and that was not used before a restart. All ranks.

    torchrun's count of restarts cannot serve as the name, because it may differ between nodes: one counts a failure,
    the other a new member. So rank 0 chooses a new name and acknowledges every rank that calls under it; ranks of an
    earlier round are never acknowledged.
    """
    if _rank() == 0:
        name = f"round/{store.add('rounds', 1)}"
        store.set("round", name)
        for rank in range(1, _world_size()):
            store.set(f"{name}/acknowledged/{store.get(f'{name}/caller/{rank}').decode()}", "")
        return name
    caller = uuid.uuid4().hex
    while True:
        name = store.get("round").decode()
        store.set(f"{name}/caller/{_rank()}", caller)
        time.sleep(POLL)
        if store.check([f"{name}/acknowledged/{caller}"]):
            return name


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
