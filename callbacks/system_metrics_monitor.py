"""Logs the load of the machines in the run: CPU, memory, disk, network and GPUs."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runner import Callback, Time
from runner.failures.checks import parse_interval
from runner.libraries.extras import how_to_install

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

# Readings of a machine, taken by its first rank, and readings of a GPU, taken by its rank, in this order.
MACHINE = (
    *("cpu_percent", "memory_percent", "memory_gb", "disk_percent"),
    *("disk_read_mb_per_sec", "disk_write_mb_per_sec", "network_sent_mb_per_sec", "network_received_mb_per_sec"),
)
GPU = ("percent", "memory_gb", "temperature_celsius", "power_watts")


class SystemMetricsMonitor(Callback):
    """Logs the load of every machine and GPU in use, at an interval.

    `MLflowLogger` already does this for the machine of rank 0; this callback is for more machines and other
    destinations. Readings are gathered on the host, without waiting for a GPU, and rank 0 logs them. Rates are means
    since the previous reading. GPU readings need the package nvidia-ml-py; if it is missing there is one warning.
    Readings that a GPU lacks, for example a virtual or partitioned one, are left out.
    Checkpoints contain no readings.

    Args:
        interval: how often to log, as a time string or a number of epochs; an interval in seconds counts training, not
            evaluation.

    Raises:
        ValueError: `interval` is not a time above 0.

    Logs:
        system/node{n}/cpu_percent: utilization of all cores, percent.
        system/node{n}/memory_percent: memory in use, percent.
        system/node{n}/memory_gb: memory in use, GB (1e9 bytes).
        system/node{n}/disk_percent: space in use on the file system of the run's folder, percent.
        system/node{n}/disk_read_mb_per_sec, .../disk_write_mb_per_sec: traffic of all disks, MB (1e6 bytes) per second.
        system/node{n}/network_sent_mb_per_sec, .../network_received_mb_per_sec: traffic of all interfaces, MB (1e6
            bytes) per second.
        system/node{n}/gpu{i}_percent: utilization of the GPU of the machine's i-th rank, percent.
        system/node{n}/gpu{i}_memory_gb: memory in use on that GPU, GB (1e9 bytes).
        system/node{n}/gpu{i}_temperature_celsius: temperature of that GPU, degrees Celsius.
        system/node{n}/gpu{i}_power_watts: power drawn by that GPU, watts.
    """

    def __init__(self, interval: str | int | Time = "10s") -> None:
        self.interval = parse_interval("interval", interval, "10s")
        self._keys: list[tuple[list[str], list[str]]] = []  # for each rank: keys of its machine, and of its GPU
        self._reads_gpu = False
        self._previous: tuple[float, list[float]] = (0.0, [])  # clock in seconds; bytes read, written, sent, received

    def fit_start(self, state: State, logger: Logger) -> None:
        import psutil

        from runner import get_local_rank

        self._keys = []
        node = -1
        for (local_rank,) in _gather([float(get_local_rank())]):
            node += local_rank == 0
            prefix = f"system/node{node}/"
            gpu = f"gpu{int(local_rank)}_"
            machine = [prefix + name for name in MACHINE] if local_rank == 0 else []
            self._keys.append((machine, [prefix + gpu + name for name in GPU]))
        self._reads_gpu = state.device.type == "cuda"
        if self._reads_gpu and importlib.util.find_spec("pynvml") is None:
            self._reads_gpu = False
            if get_local_rank() == 0:  # one rank per machine, because machines may differ
                log.warning("system_metrics_monitor reads no GPU: it needs nvidia-ml-py: %s", how_to_install("gpu"))
        psutil.cpu_percent()  # later calls measure from here
        self._previous = time.perf_counter(), _count_bytes()

    def batch_end(self, state: State, logger: Logger) -> None:
        if not state.is_due(self.interval):
            return
        metrics = {}
        for (machine, gpu), values in zip(self._keys, _gather(self._read(state)), strict=True):
            metrics |= zip(machine, values, strict=False)
            metrics |= zip(gpu, values[len(MACHINE) :], strict=True)
        logger.log_metrics({key: value for key, value in metrics.items() if not math.isnan(value)})

    epoch_end = batch_end

    def _read(self, state: State) -> list[float]:
        """Return this rank's readings in the order of `MACHINE` and `GPU`, NaN for those that do not exist."""
        import psutil

        memory = psutil.virtual_memory()
        previous_time, previous_counts = self._previous
        now = time.perf_counter()
        counts = _count_bytes()
        self._previous = (now, counts)
        seconds = now - previous_time
        rates = [(count - previous) / 1e6 / seconds for count, previous in zip(counts, previous_counts, strict=True)]
        run_dir = state.run_dir.absolute()  # which may not exist yet
        folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
        disk = psutil.disk_usage(str(folder)).percent
        used = memory.total - memory.available
        return [psutil.cpu_percent(), memory.percent, used / 1e9, disk, *rates, *self._read_gpu(state.device)]

    def _read_gpu(self, device: Any) -> list[float]:
        if not self._reads_gpu:
            return [math.nan] * len(GPU)
        import pynvml  # pyright: ignore[reportMissingImports]
        from torch import cuda

        def read(gauge: Callable[[Any], int]) -> float:
            try:
                return float(gauge(device))
            except (pynvml.NVMLError, RuntimeError):  # RuntimeError: from torch, if the GPU is partitioned
                return math.nan

        free, total = cuda.mem_get_info(device)
        return [
            read(cuda.utilization),
            (total - free) / 1e9,
            read(cuda.temperature),
            read(cuda.power_draw) / 1e3,
        ]


def _count_bytes() -> list[float]:
    """Return the bytes read, written, sent and received so far, NaN if unknown."""
    import psutil

    disk = psutil.disk_io_counters()
    network = psutil.net_io_counters()
    return [
        *((disk.read_bytes, disk.write_bytes) if disk else (math.nan, math.nan)),
        *((network.bytes_sent, network.bytes_recv) if network else (math.nan, math.nan)),
    ]


def _gather(values: list[float]) -> list[list[float]]:
    """Return the values of every rank, gathered on the host. Call it on all ranks with equally many values."""
    from runner import get_world_size

    if get_world_size() == 1:
        return [values]
    import torch
    import torch.distributed as dist

    mine = torch.tensor(values, dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(get_world_size())]
    dist.all_gather(ranks, mine)
    return [rank.tolist() for rank in ranks]
