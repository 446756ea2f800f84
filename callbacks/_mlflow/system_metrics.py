"""The machine's load while a run trains, sampled by MLflow's own probes and kept here until it is sent."""

from __future__ import annotations

from typing import Any

from mlflow.entities import Run
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from runner.callbacks._mlflow.spool import now_ms

KEPT = 20_000  # samples, about a day of them: a server that is away for longer misses those that follow
PREFIX = "system/"


class LoadMonitor(SystemMetricsMonitor):
    """Samples CPU, memory, disk, network and GPUs in a thread that asks no server.

    MLflow's own gives up for good at the first call that fails, and waits for the server when it is finished.

    Args:
        run: samples are numbered on from those that it has.
        interval: seconds between two samples.
        tracking_uri: the run's store.
    """

    def __init__(self, run: Run, interval: float, tracking_uri: str) -> None:
        super().__init__(run.info.run_id, interval, tracking_uri=tracking_uri)  # type: ignore[arg-type]
        known = [metric.step for metric in run.data._metric_objs if metric.key.startswith(PREFIX)]
        self._logging_step = max(known, default=-1) + 1
        self.samples: list[dict[str, Any]] = []
        """Entries as in a spool; whoever sends them takes them out."""

    def monitor(self) -> None:
        """Sample until `finish` is called; runs in the thread that `start` makes."""
        while True:
            for _ in range(self.samples_before_logging):
                self.collect_metrics()
                if self._shutdown_event.wait(self.sampling_interval):
                    return
            self.publish_metrics(self.aggregate_metrics())

    def finish(self) -> None:
        """Stop sampling; what was sampled stays to be sent."""
        self._shutdown_event.set()
        if self._process is not None:
            self._process.join(1.0)

    def publish_metrics(self, metrics: dict[str, float]) -> None:
        """Keep what was measured, by MLflow's names, and begin the next sample."""
        if len(self.samples) < KEPT:
            named = {f"{PREFIX}{key}": value for key, value in metrics.items()}
            self.samples.append({"m": named, "s": self._logging_step, "t": now_ms()})
        self._logging_step += 1
        for monitor in self.monitors:
            monitor.clear_metrics()
