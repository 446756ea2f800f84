"""Logs the speed of training: throughput over a window, utilization of the device's peak, and time spent."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.callbacks._clock import SAMPLING, DeviceStopwatch, seconds_in, wait_and_read_clock
from runner.callbacks._peak_flops import find_peak
from runner.failures.checks import check_number, check_whole

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")


class SpeedMonitor(Callback):
    """Logs the throughput over the last batches, and how much time was spent.

    Values are logged at most every 50 ms and for the last batch, and the times once more at FIT_END. The time of a
    batch runs from its request to its BATCH_END: it includes waiting for data, but no evaluations, checkpoints or gaps
    between epochs. Until the window is full, rates are over the batches so far. The host runs ahead of a GPU, so there
    rates cover the batches that the GPU has completed, by its own clock; evaluations, checkpoints and FIT_END wait for
    it.

    Args:
        window_size: number of batches over which rates are taken, at least 1.
        gpu_flops_available: peak of one device in floating-point operations per second, for `mfu`. None looks it up in
            a table of GPUs by the run's precision; if the table lacks it, `mfu` is not logged, with a warning on CUDA.
        time_unit: unit of `time/*`: 'seconds', 'minutes', 'hours' or 'days'.

    Raises:
        ValueError: an argument is out of range.

    Logs:
        throughput/batches_per_sec: batches over all ranks, per second.
        throughput/samples_per_sec: samples over all ranks, per second.
        throughput/tokens_per_sec: tokens over all ranks if the model counts them, per second.
        throughput/flops_per_sec: floating-point operations over all ranks if the model has `flops_per_batch`, per
            second; every rank is assumed to do the same number.
        throughput/device/...: each of these divided by the number of ranks, per second.
        throughput/device/mfu: model FLOPs utilization, the fraction of the device's peak that is used, in [0, 1]
            (Chowdhery et al. 2022, arXiv:2204.02311).
        time/train: time spent in training batches, in `time_unit`.
        time/val: time spent in evaluations, in `time_unit`.
        time/total: time since FIT_START, including everything and the time before a resume, in `time_unit`.
    """

    def __init__(
        self, window_size: int = 100, gpu_flops_available: float | None = None, time_unit: str = "hours"
    ) -> None:
        check_whole("window_size", window_size, 1, "a number of batches")
        check_number("gpu_flops_available", gpu_flops_available, "(0, inf]", none="that of the GPU's data sheet")
        self.window_size = window_size
        self.gpu_flops_available = gpu_flops_available
        self.time_unit = time_unit
        self._unit = seconds_in(time_unit)
        # Set at FIT_START.
        self._ranks = 1
        self._data_ranks = 1  # ranks with their own samples
        self._peak: float | None = None  # floating-point operations per second
        self._stopwatch: DeviceStopwatch | None = None  # on a GPU only
        # Saved in checkpoints.
        self._train = 0.0  # seconds spent in training batches
        self._val = 0.0  # seconds spent in evaluations
        self._total = 0.0  # seconds since the first FIT_START, without the current fit
        self._flops = 0.0  # floating-point operations over all ranks
        # Seconds trained, batches, samples, tokens and operations, before the window's first batch and after each.
        self._window: deque[tuple[float, ...]] = deque(maxlen=window_size + 1)
        # Readings of the host's clock, in seconds.
        self._fit_started: float | None = None  # None outside of a fit
        self._batch_requested = 0.0
        self._evaluation_started = 0.0
        self._next_log = 0.0
        self._logged_batch: int | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner.distributed.ranks import get_data_parallel_size, get_world_size

        self._ranks = get_world_size()
        self._data_ranks = get_data_parallel_size()
        self._fit_started = time.perf_counter()
        self._peak = self.gpu_flops_available or _look_up_peak(state)
        self._stopwatch = DeviceStopwatch() if state.device.type == "cuda" else None
        if not self._window:
            now = state.timestamp
            self._window.append((self._train, now.batch, now.sample, now.token, self._flops))

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._batch_requested = time.perf_counter()
        if self._stopwatch is not None:
            self._stopwatch.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        ended = time.perf_counter()
        now = state.timestamp
        flops = state.unwrapped_model.flops_per_batch(state.batch)
        if flops is not None:
            self._flops += flops * self._data_ranks
        counts = (now.batch, now.sample, now.token, self._flops)
        if self._stopwatch is None:
            self._train += ended - self._batch_requested
            self._window.append((self._train, *counts))
        else:
            self._stopwatch.stop(counts)
            self._take_laps()
        if ended >= self._next_log and len(self._window) > 1:
            self._next_log = ended + SAMPLING
            self._logged_batch = now.batch
            logger.log_uncopied(self._rates() | self._times())

    def eval_before_all(self, state: State, logger: Logger) -> None:
        # The intended host-device sync, once per group of evaluations.
        self._evaluation_started = wait_and_read_clock(state.device)
        self._take_laps()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._val += time.perf_counter() - self._evaluation_started

    def fit_end(self, state: State, logger: Logger) -> None:
        self._take_laps(wait=True)  # the intended host-device sync at the end
        if self._logged_batch is not None:  # time after the last batch counts, such as an evaluation
            rates = {} if self._logged_batch == state.timestamp.batch else self._rates()
            logger.log_uncopied(rates | self._times())
        self._total = self._seconds_in_total()
        self._fit_started = None

    def state_dict(self) -> dict[str, Any]:
        self._take_laps(wait=True)  # a checkpoint waits for the device anyway
        return {
            "train": self._train,
            "val": self._val,
            "total": self._seconds_in_total(),
            "flops": self._flops,
            "window": [list(totals) for totals in self._window],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._train = state["train"]
        self._val = state["val"]
        self._total = state["total"]
        self._flops = state["flops"]
        self._window = deque((tuple(totals) for totals in state["window"]), maxlen=self.window_size + 1)

    def _take_laps(self, wait: bool = False) -> None:
        """Count the batches that a GPU has completed."""
        for seconds, counts in self._stopwatch.completed_laps(wait) if self._stopwatch is not None else ():
            self._train += seconds
            self._window.append((self._train, *counts))

    def _rates(self) -> dict[str, float]:
        ranks = self._ranks
        train, batch, sample, token, operations = self._window[-1]
        first_train, *first = self._window[0]
        seconds = train - first_train
        counts = {"batches": batch - first[0], "samples": sample - first[1]}
        if token:
            counts["tokens"] = token - first[2]
        if operations:
            counts["flops"] = operations - first[3]
        rates = {f"{name}_per_sec": count / seconds for name, count in counts.items()}
        metrics = {f"throughput/{name}": rate for name, rate in rates.items()}
        metrics |= {f"throughput/device/{name}": rate / ranks for name, rate in rates.items()}
        if operations and self._peak is not None:
            metrics["throughput/device/mfu"] = rates["flops_per_sec"] / ranks / self._peak
        return metrics

    def _times(self) -> dict[str, float]:
        times = {"train": self._train, "val": self._val, "total": self._seconds_in_total()}
        return {f"time/{name}": spent / self._unit for name, spent in times.items()}

    def _seconds_in_total(self) -> float:
        return self._total + (0.0 if self._fit_started is None else time.perf_counter() - self._fit_started)


def _look_up_peak(state: State) -> float | None:
    if state.device.type != "cuda":
        return None
    import torch

    from runner import get_global_rank

    name = torch.cuda.get_device_name(state.device)
    peak = find_peak(name, state.precision, tf32=torch.backends.cuda.matmul.fp32_precision == "tf32")
    if peak is None and get_global_rank() == 0:
        log.warning("no MFU: the peak of %s in %s is unknown; set gpu_flops_available", name, state.precision)
    return peak
