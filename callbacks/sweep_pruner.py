"""Ends jobs of a sweep that are not worth training further."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.failures.checks import check_one_of, refuse_if
from runner.failures.errors import Pruned, wrong_argument
from runner.files.names import RESULT, SWEEP
from runner.files.whole import read_object
from runner.libraries.extras import require
from runner.training.metric_choice import MetricChoice, choose_metric

if TYPE_CHECKING:
    from runner import Logger, State
    from runner.callbacks._pruning_study import PruningStudy

log = logging.getLogger("runner")

PRUNERS = ("median", "successive_halving", "hyperband", "wilcoxon")


class SweepPruner(Callback):
    """Ends jobs of a sweep early if one of Optuna's pruners decides that they do worse than others.

    It works with any sweeper and launcher, and with parallel jobs: the jobs share a journal in the sweep's folder.
    After each evaluation rank 0 reports the metric and asks the pruner, which counts evaluations as its steps, from 1.
    With 'wilcoxon' it asks once, before training, and the pruner compares the job's setting with the best one over the
    seeds that have finished. A pruned job ends after a checkpoint, with the status PRUNED, and a rerun of the sweep
    does not continue it. `--revive all`, or `runner resume` with its folder, continues from there, is bit-identical to
    a job that was never pruned, and is not pruned again. Needs the package optuna.

    Args:
        monitor: metric of an evaluator to compare jobs by, such as 'eval/loss'; None means the sweep's objective.
        pruner: 'median', 'successive_halving', 'hyperband', 'wilcoxon', or a pruner object of Optuna.
        options: arguments of that pruner, as Optuna names them.

    Raises:
        ImportError: the package optuna is missing.
        ValueError: there is no such pruner, it does not take the options, or, at FIT_START, the run has no metric named
            `monitor`, or the run is not a job of a sweep.
    """

    only_in_sweeps = True

    def __init__(
        self, monitor: str | None = None, pruner: Any = "median", options: Mapping[str, Any] | None = None
    ) -> None:
        require("SweepPruner", "sweep", "optuna")
        self.monitor = monitor
        self._pruner = _make_pruner(pruner, options or {})
        self._by_seed = type(self._pruner).__name__ == "WilcoxonPruner"
        self._metric = MetricChoice("", "")
        self._study: PruningStudy | None = None  # on rank 0 of a job that may be pruned
        self._is_in_sweep = False
        self._evaluations = 0
        self._judged_at = -1  # batch of the last evaluation

    def fit_start(self, state: State, logger: Logger) -> None:
        sweep = read_object(state.run_dir.parent / SWEEP)
        if not sweep and not state.config:
            raise ValueError(
                "SweepPruner compares the jobs of a sweep: python -m runner -m +callbacks=sweep_pruner ..."
            )
        if not sweep:
            return  # a trial
        self._is_in_sweep = True
        self._metric = self._choose_metric(state)
        if self._by_seed and state.config.get("folds") is not None:
            raise ValueError("pruner='wilcoxon': compares settings over seeds, and folds cannot replace seeds")
        is_worse = self._ask_rank_zero(lambda: self._open_study(state, sweep["fixed"]))
        if is_worse and state.timestamp < state.max_duration:
            self._prune(state, logger, "its setting is worse with the seeds that have finished")

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if not self._is_in_sweep or not self._metric.is_fresh(state) or self._judged_at == state.timestamp.batch:
            return
        self._judged_at = state.timestamp.batch
        self._evaluations += 1
        if self._by_seed or state.timestamp >= state.max_duration:
            return
        value = self._metric.read(state)
        assert value is not None
        if self._ask_rank_zero(lambda: self._study is not None and self._study.should_prune(value, self._evaluations)):
            name = f"{self._metric.label}/{self._metric.name}"
            self._prune(state, logger, f"{name} is {value:.4g} at evaluation {self._evaluations}")

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._is_in_sweep:
            value = self._metric.read(state)
            self._ask_rank_zero(lambda: self._study is not None and self._study.finish(value))

    def close(self, state: State, logger: Logger) -> None:
        if state.error is not None and state.error is state.interruption and self._study is not None:
            self._study.prune()

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self._evaluations, "judged_at": self._judged_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evaluations = state["evaluations"]
        self._judged_at = state["judged_at"]

    def _choose_metric(self, state: State) -> MetricChoice:
        """Return the metric to compare jobs by."""
        objective = state.config.get("objective")
        if self.monitor is None and isinstance(objective, list):
            raise ValueError(f"monitor=None: there are several objectives; name one of them, such as {objective[0]}")
        chosen = self.monitor or objective
        if chosen is None and state.evaluators:
            label = state.evaluators[0].label
            chosen = f"{label}/{next(iter(state.eval_metrics[label]), 'loss')}"
        metric = choose_metric(state, chosen or "loss", "monitor" if self.monitor else "objective")
        if metric.label == "train":
            raise wrong_argument("monitor", chosen, "must be a metric of an evaluator, measured with the same weights")
        return metric

    def _open_study(self, state: State, fixed: list[str]) -> bool:
        """Open the study, and return whether a pruner that compares seeds prunes the job before it trains. Rank 0."""
        from runner.callbacks._pruning_study import PruningStudy

        overrides = [str(override) for override in read_object(state.run_dir / RESULT)["overrides"]]
        setting = sorted(override for override in overrides if override.partition("=")[0] not in (*fixed, "seed"))
        lower = self._metric.lower_is_better(state)
        study = PruningStudy(
            state.run_dir.parent, state.run_dir.name, " ".join(setting), state.rank_zero_seed, self._pruner, lower
        )
        if study.was_pruned:
            log.info("revived: this job was pruned, and will not be pruned again")
            return False
        self._study = study
        return self._by_seed and study.should_prune_setting()

    def _ask_rank_zero(self, question: Callable[[], bool | None]) -> bool:
        """Return rank 0's answer; False if the journal cannot be read or written. All ranks."""
        from runner import get_global_rank
        from runner.distributed.collectives import broadcast_object

        answer = False
        if get_global_rank() == 0:
            try:
                answer = bool(question())
            except (OSError, ValueError) as error:  # ValueError: the journal is damaged
                log.warning("sweep_pruner: %s; this job is not pruned", error)
                self._study = None
        return broadcast_object(answer)

    def _prune(self, state: State, logger: Logger, reason: str) -> None:
        log.info("pruned: %s", reason)
        logger.log_tags({"runner.pruned_at": str(state.timestamp.batch)})
        state.interrupt(Pruned(0))


def _make_pruner(pruner: Any, options: Mapping[str, Any]) -> Any:
    """Return the Optuna pruner with this name and options, or the object itself."""
    if not isinstance(pruner, str):
        reason = f"must be one of {', '.join(PRUNERS)}, or an Optuna pruner without options"
        refuse_if(options or not hasattr(pruner, "prune"), "pruner", pruner, reason)
        return pruner
    check_one_of("pruner", pruner, PRUNERS)
    from runner.callbacks._pruning_study import make_pruner

    try:
        return make_pruner(pruner, options)
    except ValueError as error:
        raise wrong_argument("options", dict(options), str(error)) from error
