"""Keeps the number of CPU threads when a run continues, because the last bits of its numbers depend on it."""

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

    Warns if the run continues with another number, which is not exact. All ranks; rank 0 warns.
    """
    folder = None if job.resume is None else run_folder_of(job.resume)
    before = None if folder is None else Record(folder).threads
    if before is None:
        return job.threads
    now = threads_now(job.threads.number)
    if job.threads.is_requested or before > MOST_PER_CORE * cores():
        if now != before and is_rank_zero():
            reason = "" if job.threads.is_requested else f" ({before} are too many for {cores()} cores)"
            log.warning(
                "the run had %d CPU threads and goes on with %d%s: the last bits of its numbers may differ from a run "
                "that never stopped; launch.threads=%d is exact",
                *(before, now, reason, before),
            )
        return job.threads
    if before > cores() and is_rank_zero():
        log.warning(
            "the run goes on with %d CPU threads, as before, on %d cores: this is exact, but slow; launch.threads=%d "
            "is faster, but the last bits of its numbers may differ",
            *(before, cores(), cores()),
        )
    return Threads(before, is_requested=True)
