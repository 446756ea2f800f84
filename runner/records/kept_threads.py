"""Keeps the number of CPU threads of a run that continues, because the last bits of its results depend on it."""

from __future__ import annotations

import logging

from runner.distributed.environment import is_rank_zero
from runner.distributed.launch import MOST_PER_CORE
from runner.distributed.threads import Threads, cores, threads_now
from runner.records.folder import run_folder_of
from runner.records.job import Job
from runner.records.record import Record

log = logging.getLogger("runner")


def keep_threads(job: Job) -> Threads:
    """Return the CPU threads for a job: those of the run that it continues, unless the user asked for a number.

    Warns if the number changes, because the run is then no longer exact. Call it on all ranks; rank 0 warns.
    """
    folder = None if job.resume is None else run_folder_of(job.resume)
    recorded = None if folder is None else Record(folder).threads
    if recorded is None:
        return job.threads
    current = threads_now(job.threads.number)
    if job.threads.is_requested or recorded > MOST_PER_CORE * cores():
        if current != recorded and is_rank_zero():
            reason = "" if job.threads.is_requested else f" ({recorded} are too many for {cores()} cores)"
            log.warning(
                "the run had %d CPU threads and goes on with %d%s: the last bits of its numbers may differ from a run "
                "that never stopped; launch.threads=%d is exact",
                *(recorded, current, reason, recorded),
            )
        return job.threads
    if recorded > cores() and is_rank_zero():
        log.warning(
            "the run goes on with %d CPU threads, as before, on %d cores: this is exact, but slow; launch.threads=%d "
            "is faster, but the last bits of its numbers may differ",
            *(recorded, cores(), cores()),
        )
    return Threads(recorded, is_requested=True)
