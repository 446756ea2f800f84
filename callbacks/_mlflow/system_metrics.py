"""Samples system metrics during training with MLflow's monitors, and keeps them until they are sent."""

from __future__ import annotations

from typing import Any

from mlflow.entities import Run
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from runner.callbacks._mlflow.spool import now_ms

MAX_SAMPLES = 20_000  # about a day; while a server is away for longer, further samples are dropped
PREFIX = "system/"


class LoadMonitor(SystemMetricsMonitor):
    """Samples CPU, memory, disk, network and GPUs on a thread that never calls the server.

    MLflow's own monitor gives up after the first call that fails, and waits for the server when it finishes. Samples
    are `interval` seconds apart, and numbered from the last one that the run has.
    """

    def __init__(self, run: Run, interval: float, tracking_uri: str) -> None:
        super().__init__(run.info.run_id, interval, tracking_uri=tracking_uri)  # type: ignore[arg-type]
        known = [metric.step for metric in run.data._metric_objs if metric.key.startswith(PREFIX)]
        self._logging_step = max(known, default=-1) + 1
        self.samples: list[dict[str, Any]] = []
        """Samples as spool entries; the sender removes them."""

    def monitor(self) -> None:
        """Take samples until `finish` is called, on the thread that `start` creates."""
        while True:
            for _ in range(self.samples_before_logging):
                self.collect_metrics()
                if self._shutdown_event.wait(self.sampling_interval):
                    return
            self.publish_metrics(self.aggregate_metrics())

    def finish(self) -> None:
        """Stop sampling. Samples that are not sent yet stay available."""
        self._shutdown_event.set()
        if self._process is not None:
            self._process.join(1.0)

    def publish_metrics(self, metrics: dict[str, float]) -> None:
        """Store the measured values under MLflow's names, and begin the next sample."""
        if len(self.samples) < MAX_SAMPLES:
            named = {f"{PREFIX}{key}": value for key, value in metrics.items()}
            self.samples.append({"m": named, "s": self._logging_step, "t": now_ms()})
        self._logging_step += 1
        for monitor in self.monitors:
            monitor.clear_metrics()
