"""The state of a run at a given moment: data only."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.core.destination import LoggerDestination
from runner.core.hooks import Algorithm, Callback
from runner.distributed.ranks import get_data_parallel_rank
from runner.timing.time import Interval, Progress, Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from runner.models.model import Model
    from runner.training.dataloader import BatchStream
    from runner.training.evaluator import Evaluator
    from runner.training.precision import Precision

Batch = Any
"""A tensor, or an arbitrarily nested tuple, list or mapping of tensors; dimension 0 indexes samples."""


@dataclass(slots=True, kw_only=True)
class State:
    """The state of a run on this rank. Callbacks read it; algorithms may also write to it.

    Fields that describe work in progress, such as `batch`, are unset until they first have a value: reading one before
    that raises an AttributeError instead of returning None.
    """

    unwrapped_model: Model
    """The model without DDP or compilation around it, with its own methods and clean names in `state_dict`."""
    model: nn.Module
    """The model that training calls: wrapped in DDP and compiled, if the run does either."""
    device: torch.device
    """The device that holds this rank's model and batches."""
    precision: Precision
    """The number formats and the autocast context of a forward pass."""
    rank_zero_seed: int
    """The run's seed, equal on all ranks."""
    run_name: str
    """The run's name, equal on all ranks."""
    run_dir: Path = Path()
    """The run's folder, equal on all ranks; created on the first write."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The resolved config of the run; empty for a run that was set up in Python."""

    max_duration: Time
    """The length of training, in any unit but `dur`."""
    timestamp: Timestamp = Timestamp()
    """Progress of training over all ranks. Timestamps are immutable: each time training advances, a new one is set."""
    previous_timestamp: Timestamp = Timestamp()
    """The timestamp before the last advance. An interval is due if it has a multiple between the two timestamps."""
    eval_timestamp: Timestamp = Timestamp()
    """Progress of the current evaluator, or of the last one that ran."""
    predict_timestamp: Timestamp = Timestamp()
    """Progress of the current prediction, or of the last one."""

    algorithms: tuple[Algorithm, ...] = ()
    """The algorithms, in the order in which they run."""
    callbacks: tuple[Callback, ...] = ()
    """The callbacks, in the order in which they run."""
    loggers: tuple[LoggerDestination, ...] = ()
    """The logger destinations that are active on this rank."""
    evaluators: Sequence[Evaluator] = ()
    """The evaluators, in the order given, which is the order in which they run."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    """The optimizers, in the order given; at INIT only optimizers that were not given as factories."""
    schedulers: list[Any] = field(default_factory=list[Any])
    """The schedulers that set learning rates: `runner.optim.scheduled_rates.ScheduledRates` and torch's own."""
    scaler: torch.amp.GradScaler | None = None
    """The loss scaler for amp_fp16, otherwise None."""

    ddp_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments for torch's DistributedDataParallel; hooks may set them at INIT."""

    train_dataloader: Iterable[Batch] | None = None
    """The training dataloader as given; None for a run that only evaluates or predicts."""
    stream: BatchStream | None = None
    """The stream being read now: the training data, an evaluator's data, or the data to predict."""
    train_dataloader_len: int | None = None
    """Batches per epoch; None if the training dataloader has no length."""

    grad_accum: int = 1
    """Microbatches per batch; ignored if `microbatch_size` is set."""
    microbatch_size: int | str | None = None
    """Samples per microbatch on this rank; 'auto': as many as fit in memory; None: split by `grad_accum`."""
    fitting_size: int | None = field(default=None, init=False)
    """With 'auto', the current number of samples per microbatch, halved whenever memory runs out; None before the
    first batch."""

    batch: Batch = field(init=False)
    """This rank's batch, on the device."""
    batch_is_padding: bool = field(default=False, init=False)
    """Whether this rank's share of the global batch is empty. `batch` is then a stand-in with weight 0."""
    microbatch: Batch = field(init=False)
    """The slice of `batch` being processed; `batch` itself if there is only one microbatch."""
    microbatch_start: int = field(default=0, init=False)
    """The index in `batch` of the first sample of `microbatch`."""
    outputs: Any = field(init=False)
    """The model's outputs for `microbatch` (for `batch` in evaluation and prediction)."""
    loss: Tensor | dict[str, Tensor] = field(init=False)
    """The loss of `microbatch` as the model returned it, unscaled."""
    loss_scale: float | Tensor = field(default=1.0, init=False)
    """The factor by which a model's own `training_step` multiplies its losses before backward: this microbatch's share
    of the global batch, times the scale of the fp16 scaler."""
    total_loss: Tensor = field(init=False)
    """The loss of this rank's whole batch, detached and zero-dimensional; complete at AFTER_TRAIN_BATCH."""
    loss_parts: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)
    """The parts of `total_loss` by name if the model returns a dict; detached and zero-dimensional."""
    train_metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    """Metrics over this epoch's training batches, by name."""
    eval_metrics: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Evaluation metrics by evaluator label and metric name."""
    train_metric_values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The values of `train_metrics` at the last EPOCH_END, over all ranks."""
    eval_metric_values: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    """The latest evaluation results over all ranks, by evaluator label and metric name; 'loss' is the mean loss."""

    resumed_from: Path | None = field(default=None, init=False)
    """The checkpoint from which this run was resumed; at BEFORE_LOAD it may still be the folder that holds it."""
    unfinished_hooks: dict[str, list[str]] = field(default_factory=dict[str, list[str]], init=False)
    """The event at which a callback failed, and the config keys of the hooks that must still handle it when the run is
    resumed; empty if no callback failed."""
    stop_requested: bool = field(default=False, init=False)
    """Whether `stop_training` was called."""
    interruption: BaseException | None = field(default=None, init=False)
    """The argument of `interrupt`; None if it was not called."""
    is_consistent: bool = field(default=False, init=False)
    """Whether this rank's weights, optimizers and metrics all belong to `timestamp`, so that a checkpoint taken now
    resumes bit for bit. The training loop and `changing` set it; an algorithm that changes any of these before the
    optimizer step sets it to False."""
    ended_between_batches: bool = field(default=False, init=False)
    """Whether a signal ended training after a complete batch, the same batch on all ranks."""
    error: BaseException | None = field(default=None, init=False)
    """The exception that ended the run, including KeyboardInterrupt and SystemExit; set before `close`, else None."""

    def describe(self) -> str:
        """Return the model, the position in training, the optimizers and the hooks, in one line."""
        model = self.unwrapped_model
        inner = getattr(model, "module", None)
        name = type(model).__name__ + ("" if inner is None else f"({type(inner).__name__})")
        parts = [
            f"{name} of {sum(parameter.numel() for parameter in model.parameters()):,} parameters",
            f"at {self.timestamp.batch}ba of {self.max_duration}",
            f"{self.precision} on {self.device}",
            *(type(optimizer).__name__ for optimizer in self.optimizers),
        ]
        for group in ("algorithms", "callbacks", "loggers"):
            if keys := [hook.config_key for hook in getattr(self, group)]:
                parts.append(f"{group} {', '.join(keys)}")
        return "; ".join([*parts, f"run {str(self.run_dir)!r}"])

    def __repr__(self) -> str:
        return f"State({self.describe()})"

    def drop_outputs(self) -> None:
        """Unset the last outputs and loss, so that their memory is free for the next forward pass."""
        self.outputs = self.loss = None  # type: ignore[assignment]
        del self.outputs, self.loss  # set to None first, because unset fields cannot be deleted

    def stop_training(self) -> None:
        """End training after the current batch or epoch and its checkpoint event. Call it on all ranks."""
        self.stop_requested = True

    def interrupt(self, error: BaseException) -> None:
        """End training between two batches, as a signal does: a checkpoint is saved, and the run can be resumed.

        Unlike with `stop_training`, no final evaluation and no FIT_END follow, and the run raises an exception. Call it
        on all ranks, before the end of training.

        Args:
            error: the exception to raise after the checkpoint event of the current batch or epoch, or before the first
                batch if called at FIT_START.
        """
        self.interruption = error

    @contextmanager
    def changing(self, settles: bool = True) -> Generator[None]:
        """Mark the state as inconsistent while the body of a `with` statement changes it.

        After an error the state stays inconsistent, unless only the `unfinished_hooks` remain to be called.

        Args:
            settles: whether the state is consistent after the body.
        """
        self.is_consistent = False
        try:
            yield
            self.is_consistent = settles
        finally:
            self.is_consistent |= bool(self.unfinished_hooks)

    def restart_time(self) -> None:
        """Start another phase of training: reset time, training metrics, and when evaluators last ran."""
        self.timestamp = self.previous_timestamp = Timestamp()
        for metric in self.train_metrics.values():
            metric.reset()
        for evaluator in self.evaluators:
            evaluator.evaluated_at = None

    def step_time(self, timestamp: Timestamp) -> None:
        """Advance to a later timestamp and remember the current one as the previous."""
        self.previous_timestamp = self.timestamp
        self.timestamp = timestamp

    def is_due(self, interval: Interval) -> bool:
        """Return whether the last advance of time reached a multiple of an interval."""
        if interval.is_at_epoch_ends and self.timestamp.batch_in_epoch:
            return False  # a shortcut: most calls come in the middle of an epoch
        return interval.is_due(self.previous_timestamp, self.timestamp, self.max_duration, self.train_dataloader_len)

    def due_evaluators(self) -> list[Evaluator]:
        """Return the evaluators that are due now, in the order in which they run."""
        return [evaluator for evaluator in self.evaluators if evaluator.is_due(self)]

    def owed_evaluators(self) -> list[Evaluator]:
        """Return the evaluators that still have to run at the end of training."""
        return [evaluator for evaluator in self.evaluators if evaluator.is_owed(self)]

    @property
    def seed(self) -> int:
        """The seed of this rank's streams: `rank_zero_seed` plus its rank among those that read different samples."""
        return self.rank_zero_seed + get_data_parallel_rank()

    @property
    def dataloader(self) -> Iterable[Batch] | None:
        """The dataloader being read now: the training one, an evaluator's, or the one to predict."""
        return None if self.stream is None else self.stream.loader

    @property
    def dataloader_label(self) -> str | None:
        """The label of `dataloader`: 'train', the evaluator's label, or 'predict'."""
        return None if self.stream is None else self.stream.label

    @property
    def dataloader_len(self) -> int | None:
        """Batches per pass over `dataloader` on each rank; None if it has no length."""
        return None if self.stream is None else self.stream.length

    @property
    def samples_per_microbatch(self) -> int | None:
        """Samples per microbatch on this rank, or None to split by `grad_accum`."""
        return self.microbatch_size if isinstance(self.microbatch_size, int) else self.fitting_size

    @property
    def progress(self) -> Progress:
        """The position in training, with the lengths that are needed to convert units."""
        return Progress(self.timestamp, self.max_duration, self.train_dataloader_len)

    def get_elapsed_duration(self) -> Time:
        """Return the fraction of `max_duration` that has passed, as a Time in `dur`; at most 1."""
        return Time(min(1.0, self.progress.elapsed_in(TimeUnit.DURATION)), TimeUnit.DURATION)

    @property
    def metric_values(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The latest metric values by label: 'train' and the label of each evaluator."""
        return {"train": self.train_metric_values, **self.eval_metric_values}
