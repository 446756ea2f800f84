"""Logs how much memory a run uses."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.callbacks._clock import SAMPLING
from runner.failures.checks import check_whole
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    import torch

    from runner import Logger, State

log = logging.getLogger("runner")

CUDA_STATISTICS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}
GIGABYTE = 1e9
STATUS = "/proc/self/status"


class MemoryMonitor(Callback):
    """Logs the memory in use at the end of a batch: the device's on CUDA, otherwise the process's.

    Values are logged at most every 50 ms. They are those of rank 0; at an interval there are also the average, minimum
    and maximum over all ranks, which the hosts exchange in one transfer. Nothing here waits for a device. Peaks are
    since the start of the process.

    Args:
        memory_keys: statistics of `torch.cuda.memory_stats` to log, mapped to their names; None means those below.
            Sizes in bytes are logged in GB, counts as they are. It has no effect without a GPU.
        dist_aggregate_batch_interval: batches between two comparisons of the ranks, at least 1; None means none.

    Raises:
        ValueError: an argument is out of range, or, at FIT_START, a key of `memory_keys` is not a statistic.

    Logs:
        memory/{current,peak}_{allocated,active,inactive,reserved}_mem: memory of CUDA's caching allocator, GB (1e9
            bytes).
        memory/alloc_retries: how often the allocator had to free its cache and try again, a count.
        memory/rss, memory/peak_rss: resident set size of the process, if the model is not on CUDA, GB.
        memory/..._avg, memory/..._min, memory/..._max: each of these over all ranks, at the interval, in its unit.
    """

    def __init__(
        self, memory_keys: Mapping[str, str] | None = None, dist_aggregate_batch_interval: int | None = None
    ) -> None:
        if memory_keys is not None and not (isinstance(memory_keys, Mapping) and memory_keys):
            example = dict([*CUDA_STATISTICS.items()][:1])
            raise wrong_argument(
                "memory_keys", memory_keys, f"must map statistics to names, such as {example}, or be None"
            )
        interval = dist_aggregate_batch_interval
        check_whole("dist_aggregate_batch_interval", interval, 1, "a number of batches", none="no comparison")
        self.memory_keys = memory_keys
        self.dist_aggregate_batch_interval = interval
        self._read: Callable[[], dict[str, float]] = dict
        self._status: int | None = None
        self._next_log = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        if state.device.type == "cuda":
            names = dict(self.memory_keys or CUDA_STATISTICS)
            _check_names(names, state.device)
            self._read = partial(_read_allocator, names, state.device)
            return
        if self.memory_keys is not None and get_global_rank() == 0:
            log.warning("memory_keys is not used: the model is on %s; memory/rss is logged", state.device.type)
        if os.path.exists(STATUS):
            self._status = os.open(STATUS, os.O_RDONLY) if self._status is None else self._status
            self._read = partial(_read_status, self._status)
        else:
            self._read = _read_process

    def batch_end(self, state: State, logger: Logger) -> None:
        interval = self.dist_aggregate_batch_interval
        compares = interval is not None and state.timestamp.batch % interval == 0
        now = time.perf_counter()
        if compares or (logger.destinations and now >= self._next_log):
            self._next_log = now + SAMPLING
            metrics = {f"memory/{name}": value for name, value in self._read().items()}
            logger.log_uncopied(metrics | _compare_ranks(metrics) if compares else metrics)

    def post_close(self) -> None:
        if self._status is not None:
            os.close(self._status)
            self._status = None


def _check_names(names: Mapping[str, str], device: torch.device) -> None:
    import torch

    known = torch.cuda.memory_stats(device)
    for name in names:
        if name not in known:
            near = ", ".join(get_close_matches(name, known, n=3) or CUDA_STATISTICS)
            raise wrong_argument(
                "memory_keys", dict(names), f"{name!r} is not a key of torch.cuda.memory_stats; near: {near}"
            )


def _read_allocator(names: Mapping[str, str], device: torch.device) -> dict[str, float]:
    import torch

    statistics = torch.cuda.memory_stats(device)
    return {name: float(statistics[key]) / (GIGABYTE if "bytes" in key else 1) for key, name in names.items()}


def _read_status(file: int) -> dict[str, float]:
    """Return the resident set sizes from Linux's status file, which takes a few microseconds."""
    # Not getrusage(), whose peak is at least that of the parent process.
    peak, now = re.findall(rb"Vm(?:HWM|RSS):\s*(\d+) kB", os.pread(file, 4096, 0))
    return {"rss": int(now) * 1024 / GIGABYTE, "peak_rss": int(peak) * 1024 / GIGABYTE}


def _read_process() -> dict[str, float]:
    """Return the resident set sizes on systems without /proc."""
    import resource

    import psutil

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return {"rss": psutil.Process().memory_info().rss / GIGABYTE, "peak_rss": peak / GIGABYTE}


def _compare_ranks(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return average, minimum and maximum over the ranks. Call it on all ranks, with the same keys."""
    import torch
    import torch.distributed as dist

    from runner import get_world_size

    mine = torch.tensor([*metrics.values()], dtype=torch.float64)  # on the host, so that nothing waits for a device
    ranks = [mine]
    if get_world_size() > 1:
        ranks = [torch.empty_like(mine) for _ in range(get_world_size())]
        dist.all_gather(ranks, mine)
    values = torch.stack(ranks)
    summaries = {"avg": values.mean(dim=0), "min": values.amin(dim=0), "max": values.amax(dim=0)}
    return {f"{key}_{kind}": value for kind, row in summaries.items() for key, value in zip(metrics, row, strict=True)}
