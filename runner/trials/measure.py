"""Converts a budget into a number of batches, measured in a trial before a run begins.

The seconds of a batch are the mean over the part of the trial after its warm-up, with everything that the run does in
training except logging; those of an evaluation are measured after training. Floating-point operations are counted on
one batch. The run then trains the largest number of batches within the budget.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.checkpoints.files import find_checkpoint, read_config
from runner.config.experiment import Experiment
from runner.config.length import fitted
from runner.core.hooks import Callback
from runner.core.logger import Logger
from runner.core.state import State
from runner.distributed.collectives import broadcast_object
from runner.distributed.ranks import get_data_parallel_size, get_global_rank
from runner.failures.errors import WrongKey
from runner.timing.time import TimeUnit, convert
from runner.training.budget import Budget
from runner.training.evaluator import Evaluator
from runner.trials.trial import trial

log = logging.getLogger("runner")

SHARE = 0.1  # of the budget that the trial uses
LEAST = 2.0  # seconds of the trial
MOST = 60.0
WARM_UP = 0.25  # of the trial
WARM_BATCHES = 3
MOST_BATCHES = 10**9
BRIEF = 1.0  # seconds; evaluations shorter than this are repeated, because the first was a warm-up


@dataclass(frozen=True)
class Pace:
    """The time that a run takes for training and evaluation.

    Attributes:
        batch: seconds of a batch.
        evaluations: for each evaluator the seconds it takes, and a function from the batches of the run to the number
            of its evaluations.
    """

    batch: float
    evaluations: Sequence[tuple[float, Callable[[int], float]]]

    def seconds(self, of: str, batches: int) -> float:
        """Return the seconds that `batches` batches take in 'training', in 'evaluation', or in 'all'."""
        training = self.batch * batches if of != "evaluation" else 0.0
        evaluation = sum(seconds * count(batches) for seconds, count in self.evaluations) if of != "training" else 0.0
        return training + evaluation

    def fill(self, budget: Budget) -> int:
        """Return the largest number of batches that the budget has room for."""
        first = self.seconds(budget.of, 1)
        if first > budget.seconds:
            raise WrongKey("budget", f"one batch already takes {first:.3g} s of {budget.of}", repr(budget.limit))
        if self.seconds(budget.of, MOST_BATCHES) <= budget.seconds:
            reason = "does not grow with the batches; give a budget of training, or an eval_interval in batches"
            raise WrongKey("budget", f"the time of {budget.of} {reason}", repr(budget.limit))
        low = 1
        high = MOST_BATCHES
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds(budget.of, middle) <= budget.seconds:
                low = middle
            else:
                high = middle
        return low


class OperationCounter(Callback):
    """Counts the floating-point operations of the first batch of a trial, and ends the trial after it."""

    def __init__(self) -> None:
        self.operations = 0.0  # of all ranks together

    def batch_end(self, state: State, logger: Logger) -> None:
        self.operations = operations_of(state) * get_data_parallel_size()
        end_trial(state)


class Stopwatch(Callback):
    """Times the batches of a trial after its warm-up, and ends the trial after the given seconds of training."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._marks: list[tuple[int, float]] = [(0, 0.0)]  # batches and seconds, from the end of the warm-up
        self._last = (0, 0.0)

    @property
    def seconds_per_batch(self) -> float:
        """The mean over the batches after the warm-up, or over all batches if the run ended within it."""
        batches, end = self._last
        start, begin = self._marks[-1]
        if batches == start:
            start, begin = self._marks[0]
        return (end - begin) / (batches - start)

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch
        seconds = state.timestamp.total_wct  # equal on all ranks, evaluations left out
        if seconds == self._last[1]:
            return  # the ranks have not agreed on the time of this batch
        self._last = (batch, seconds)
        is_warm = len(self._marks) > 1
        if not is_warm and batch >= WARM_BATCHES and seconds >= WARM_UP * self.seconds:
            self._marks.append(self._last)
        elif is_warm and seconds - self._marks[1][1] >= (1 - WARM_UP) * self.seconds:
            end_trial(state)


def end_trial(state: State) -> None:
    """End training after this batch, without the evaluations at the end."""
    state.stop_training()
    for evaluator in state.evaluators:
        evaluator.evaluated_at = state.timestamp.batch


def operations_of(state: State) -> float:
    """Return the floating-point operations of a training step on the current batch of this rank.

    If the model does not know their number, they are six for each weight and each token, or sample of data without
    tokens: two in the forward pass, four in the backward pass. Kaplan et al., Scaling laws for neural language models,
    2020 (arXiv:2001.08361). That holds for weights that are used once, not for convolutions.
    """
    model = state.unwrapped_model
    known = model.flops_per_batch(state.batch)
    if known is not None:
        return known
    weights = sum(parameter.numel() for parameter in model.parameters())
    return 6.0 * weights * (model.num_tokens(state.batch) or model.num_samples(state.batch))


def settle_budget(experiment: Experiment, resume: str | None) -> Experiment:
    """Return an experiment with the number of batches of its budget, and a schedule scaled to it. All ranks.

    Without a budget, or if the number is known already, the experiment is returned unchanged. A resumed run keeps the
    number that its checkpoint has for the same budget; otherwise it is measured.
    """
    budget = experiment.budget
    if budget is None or budget.batches is not None:
        return experiment
    if resume is not None:
        saved = read_config(find_checkpoint(resume)) or {}
        if saved.get("budget") and Budget.parse(saved["budget"]).limit == budget.limit:
            ratio = saved["trainer"]["scale_schedule_ratio"]
            return experiment.changed(budget=saved["budget"]).with_trainer(scale_schedule_ratio=ratio)
    return measure(experiment, budget) if budget.flop is None else count(experiment, budget)


def count(experiment: Experiment, budget: Budget) -> Experiment:
    """Return an experiment that trains the batches that fit into a budget of operations. All ranks."""
    counter = OperationCounter()
    tried = experiment.changed(budget=None)
    with trial(tried, {"trial": counter}, scale_schedule_ratio=1.0, resume_path=None) as trainer:
        trainer.fit()
        each = broadcast_object(counter.operations)
        length = trainer.state.train_dataloader_len
    assert budget.flop is not None
    batches = int(budget.flop / each)
    if batches < 1:
        raise WrongKey("budget", f"one batch already takes {each:.3g} floating-point operations", repr(budget.limit))
    if get_global_rank() == 0:
        log.info("budget=%s: %s batches of %.3g floating-point operations", budget.limit, f"{batches:,}", each)
    return fitted(experiment, batches, length)


def measure(experiment: Experiment, budget: Budget) -> Experiment:
    """Return an experiment that trains the batches that fit into the budget, measured in a trial. All ranks."""
    began = time.monotonic()
    watch = Stopwatch(min(MOST, max(LEAST, SHARE * budget.seconds)))
    tried = experiment.changed(budget=None)
    with trial(tried, {"trial": watch}, scale_schedule_ratio=1.0, resume_path=None) as trainer:
        trainer.fit()
        state = trainer.state
        evaluators = [evaluator for evaluator in state.evaluators if evaluator.is_on] if budget.of != "training" else []
        pace = Pace(
            watch.seconds_per_batch,
            [
                (_time(lambda part=part: trainer.eval([part]), state.device), _counter(part, state))
                for part in evaluators
            ],
        )
        batches = broadcast_object(pace.fill(budget) if get_global_rank() == 0 else 0)
        length = state.train_dataloader_len
    if get_global_rank() == 0:
        also = f" and evaluations of {sum(seconds for seconds, _ in pace.evaluations):.3g} s" if evaluators else ""
        seconds = f"{pace.batch * 1000:.3g} ms{also}, measured in {time.monotonic() - began:.1f} s"
        log.info("budget=%s: %s batches of %s", budget.limit, f"{batches:,}", seconds)
    return fitted(experiment, batches, length)


def _time(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call; for a brief function, those of its second call."""
    seconds = math.inf
    for _ in range(2):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        if seconds > BRIEF:
            break
    return seconds


def _counter(evaluator: Evaluator, state: State) -> Callable[[int], float]:
    """Return a function from the batches of a run to the number of times that an evaluator runs, end included."""
    interval: Any = evaluator.eval_interval
    if callable(interval):
        reason = "a function decides when to evaluate, so the time of evaluation is unknown; give a time string"
        raise WrongKey("trainer.eval_interval", f"{reason}, or a budget of training", evaluator.label)
    length: Any = interval.time
    now = state.timestamp
    if length.unit is TimeUnit.DURATION:
        return lambda batches: min(batches, math.ceil(1 / length.exact))
    if length.unit in (TimeUnit.EPOCH, TimeUnit.BATCH):
        every = float(convert(length, TimeUnit.BATCH, None, state.train_dataloader_len))
    else:
        every = length.value * now.batch / max(now.count(length.unit), 1e-9)
    return lambda batches: math.ceil(batches / max(every, 1.0))
