"""Records a run in the form that MLPerf's rules require."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Callback, TimeUnit
from runner.callbacks import _mlperf
from runner.callbacks._disk import disk_errors_reported
from runner.failures.checks import check_number, check_one_of, check_whole
from runner.failures.errors import wrong_argument
from runner.files.values import Command, InnerPath
from runner.files.whole import write_atomically
from runner.libraries.extras import require
from runner.training.metric_choice import MetricChoice, choose_metric

if TYPE_CHECKING:
    from runner import Logger, State

# The benchmarks whose open-division rules require only keys that a trainer can know.
BENCHMARKS = ("bert", "dlrm_dcnv2", "gnn", "resnet", "ssd", "unet3d")


class MLPerfCallback(Callback):
    """Writes the result of a run and a description of the system in the form of MLPerf Training 4.0, open division.

    The result is `results/{system}/{benchmark}/result_{index}.txt` under `root_folder`, which the compliance checker of
    mlperf_logging accepts (`--ruleset 4.0.0`, because later ones have no resnet). The description is
    `systems/{system}.json`; fields that only people can fill in, such as the cooling, are empty. An epoch is a block.
    The MLPerf run ends with success when an evaluation reaches the target, and is marked as aborted if training ends
    before. The package mlperf-logging is needed. Rank 0 writes. A resumed run continues its result, and the time in
    between counts.

    Args:
        root_folder: folder for the files, relative to the run's folder; those of several runs can be merged.
        index: index of this run within a submission, from 0.
        benchmark: 'bert', 'dlrm_dcnv2', 'gnn', 'resnet', 'ssd' or 'unet3d'.
        target: value that the metric has to reach.
        division: division of the submission; only 'open' is supported.
        metric_name: metric to report as accuracy. If lower values are better, the target is reached from above, and
            the checker accepts only a result in which the metric falls below 1.0.
        metric_label: label of the evaluator that has the metric.
        submitter: name of the organization that submits the result.
        system_name: name of the system; None derives it from the nodes and devices.
        status: status of the system: 'onprem', 'cloud', 'preview' or 'research'.
        cache_clear_cmd: command that clears the system's caches, run at INIT on the first rank of each machine; None
            means that they are not cleared, and the result says so.
        host_processors_per_node: number of processor sockets per node; None takes what the system reports.
        exit_at_target: whether training stops when the target is reached.

    Raises:
        ValueError: an argument is out of range, or, at INIT, the command failed, or, at FIT_START, the run has no such
            metric.
        ImportError: the package mlperf-logging is missing.
    """

    def __init__(
        self,
        root_folder: InnerPath,
        index: int,
        benchmark: str = "resnet",
        target: float = 0.759,
        division: str = "open",
        metric_name: str = "MulticlassAccuracy",
        metric_label: str = "eval",
        submitter: str = "unnamed",
        system_name: str | None = None,
        status: str = "onprem",
        cache_clear_cmd: Command | None = None,
        host_processors_per_node: int | None = None,
        exit_at_target: bool = False,
    ) -> None:
        check_one_of("benchmark", benchmark, BENCHMARKS)
        check_one_of("division", division, ("open",))
        check_one_of("status", status, _mlperf.STATUSES)
        check_whole("index", index, 0)
        check_whole("host_processors_per_node", host_processors_per_node, 1, none="what the system reports")
        _mlperf.check_names(root_folder, submitter, system_name, cache_clear_cmd)
        check_number("target", target, "(-inf, inf)")
        if metric_label == "train":
            raise wrong_argument("metric_label", metric_label, "must be the label of an evaluator, such as 'eval'")
        require("MLPerfCallback", "mlperf", "mlperf_logging")
        self.folder = Path(root_folder)
        self.index = index
        self.benchmark = benchmark
        self.target = target
        self.metric_label = metric_label
        self.metric_name = metric_name
        self.cache_clear_cmd = cache_clear_cmd
        self.exit_at_target = exit_at_target
        self._status = status
        self._system = {"submitter": submitter, "division": division, "status": _mlperf.STATUSES[status]}
        self._system |= {"system_name": system_name} if system_name is not None else {}
        if host_processors_per_node is not None:
            self._system["host_processors_per_node"] = str(host_processors_per_node)
        self._metric = MetricChoice(metric_label, metric_name)
        self._result = _mlperf.MlperfLog()  # on all ranks; rank 0 writes it to a file
        self._is_training = False

    def init(self, state: State, logger: Logger) -> None:
        from runner import get_local_rank

        if self.cache_clear_cmd is not None and get_local_rank() == 0:
            _mlperf.run_command("cache_clear_cmd", self.cache_clear_cmd)
        self._system = _mlperf.describe_system(state) | self._system
        self._system.setdefault("system_name", _mlperf.name_system(self._system))
        result = self._result
        result.event("cache_clear", self.cache_clear_cmd is not None)
        result.start("init")
        result.event("submission_benchmark", self.benchmark)
        for key, name in (("division", "division"), ("org", "submitter"), ("platform", "system_name")):
            result.event(f"submission_{key}", self._system[name])
        result.event("submission_status", self._status)

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        self._metric = choose_metric(state, self.metric_name, "metric_name", self.metric_label)
        self._is_training = True
        if self._result.is_in("init"):
            for key, value in _mlperf.describe_data(state, self.metric_label).items():
                self._result.event(key, value)
            self._result.end("init")
            self._result.start("run")
        if get_global_rank() == 0:
            folder = state.run_dir / self.folder
            name = self._system["system_name"]
            with disk_errors_reported(self.config_key):
                write_atomically(folder / "systems" / f"{name}.json", json.dumps(self._system, indent=4) + "\n")
                results = folder / "results" / name / self.benchmark
                self._result.open(results / f"result_{self.index}.txt", self.config_key)
            if self._metric.lower_is_better(state):
                reason = f"lower values of metric_name={self.metric_name!r} are better, so it is not an accuracy"
                self._result.warn_of_refusal(reason)

    def epoch_start(self, state: State, logger: Logger) -> None:
        if self._result.is_in("run"):
            self._result.start("block", first_epoch_num=state.timestamp.epoch + 1, epoch_count=1)
            self._result.start("epoch", epoch_num=state.timestamp.epoch + 1)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._result.end("block")

    def eval_start(self, state: State, logger: Logger) -> None:
        if self._is_training and self._result.is_in("run") and state.dataloader_label == self.metric_label:
            self._result.start("eval", epoch_num=float(state.progress.elapsed_in(TimeUnit.EPOCH)))

    def eval_end(self, state: State, logger: Logger) -> None:
        if not self._result.is_in("eval") or state.dataloader_label != self.metric_label:
            return
        value = self._metric.read(state)
        assert value is not None  # it has just been evaluated
        self._result.add_accuracy(value, self._metric.name, epoch_num=float(state.progress.elapsed_in(TimeUnit.EPOCH)))
        self._result.end("eval")
        if value <= self.target if self._metric.lower_is_better(state) else value >= self.target:
            self._result.end("run", status="success")
            if self.exit_at_target:
                state.stop_training()  # on every rank, because all have the same value

    def fit_end(self, state: State, logger: Logger) -> None:
        self._is_training = False

    def close(self, state: State, logger: Logger) -> None:
        result = self._result.state_dict()
        self._result.end("run", status="aborted")
        self._result.load_state_dict(result)  # a checkpoint written later can then continue the run

    def state_dict(self) -> dict[str, Any]:
        return self._result.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._result.load_state_dict(state)
