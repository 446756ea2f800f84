"""What a run knows at this moment: data only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.destination import LoggerDestination
from runner.distributed.collectives import get_global_rank
from runner.hooks import Algorithm, Callback
from runner.time import Interval, Progress, Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from runner.dataloader import BatchStream
    from runner.evaluator import Evaluator
    from runner.model import Model
    from runner.precision import Precision

Batch = Any
"""A tensor, or a tuple, list or mapping of tensors, nested as one likes; dimension 0 counts samples."""


@dataclass(slots=True, kw_only=True)
class State:
    """The state of a run, as this rank sees it; callbacks read it, algorithms may also write to it.

    Fields of what is in flight are unset before they first exist: reading one is an `AttributeError`, not a `None`.
    """

    unwrapped_model: Model
    """The model without DDP or compilation around it: its own methods, and clean names in `state_dict`."""
    model: nn.Module
    """The model as wrapped for DDP and compiled: call this one in training."""
    device: torch.device
    """Where the model and the batches of this rank are."""
    precision: Precision
    """Number formats and the autocast context of a forward pass."""
    rank_zero_seed: int
    """The run's seed, equal on all ranks."""
    run_name: str
    """Name of the run, equal on all ranks."""
    run_dir: Path = Path()
    """Folder of the run, equal on all ranks; made by whoever first writes to it."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config that made the run; empty for a run made in Python."""

    max_duration: Time
    """When training ends, in any unit but `dur`."""
    timestamp: Timestamp = Timestamp()
    """Progress of training, over all ranks; made anew at each step, never changed in place."""
    previous_timestamp: Timestamp = Timestamp()
    """The timestamp before the last step of time; an interval is due when it lies between the two."""
    eval_timestamp: Timestamp = Timestamp()
    """Progress of the evaluator that runs now, or ran last."""
    predict_timestamp: Timestamp = Timestamp()
    """Progress of the prediction that runs now, or ran last."""

    algorithms: tuple[Algorithm, ...] = ()
    """In the order in which they run."""
    callbacks: tuple[Callback, ...] = ()
    """In the order in which they run."""
    loggers: tuple[LoggerDestination, ...] = ()
    """Destinations that work on this rank."""
    evaluators: Sequence[Evaluator] = ()
    """In the order given; they run in it."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    """In the order given; at INIT only those that were not given as factories."""
    schedulers: list[Any] = field(default_factory=list)
    """What sets the learning rates: `runner.optim.scheduled_rates.ScheduledRates` and torch's own schedulers."""
    scaler: torch.amp.GradScaler | None = None
    """Loss scaler of amp_fp16, otherwise None."""

    train_dataloader: Iterable[Batch] | None = None
    """As given; None for a run that only evaluates or predicts."""
    stream: BatchStream | None = None
    """What is being read now: the training data, an evaluator's, or the data being predicted."""
    train_dataloader_len: int | None = None
    """Batches per epoch; None when the loader does not say."""

    grad_accum: int = 1
    """Microbatches per batch; with `microbatch_size` it is not used."""
    microbatch_size: int | str | None = None
    """Samples per microbatch on this rank; 'auto': as many as memory suffices for; None: split by `grad_accum`."""
    fitting_size: int | None = field(default=None, init=False)
    """With 'auto', the samples per microbatch for which memory has sufficed so far; None before the first batch."""

    batch: Batch = field(init=False)
    """This rank's batch, on the device."""
    batch_is_padding: bool = field(default=False, init=False)
    """Whether this rank's share of the global batch is empty, so that `batch` stands in for it and weighs nothing."""
    microbatch: Batch = field(init=False)
    """The slice of `batch` in flight; the same object when there is one microbatch."""
    microbatch_start: int = field(default=0, init=False)
    """Index in `batch` of the first sample of `microbatch`."""
    outputs: Any = field(init=False)
    """What the model returned for `microbatch` (or for `batch`, in evaluation and prediction)."""
    loss: Tensor | dict[str, Tensor] = field(init=False)
    """Loss of `microbatch` as the model returned it, unscaled."""
    loss_scale: float | Tensor = field(default=1.0, init=False)
    """What a model's own `training_step` multiplies its losses by before backward: this microbatch's share of the
    batch of all ranks, and the factor of the fp16 scaler."""
    total_loss: Tensor = field(init=False)
    """Loss of this rank's whole batch, detached, zero-dimensional; complete at AFTER_TRAIN_BATCH."""
    loss_parts: dict[str, Tensor] = field(default_factory=dict, init=False)
    """The parts of `total_loss`, where the model returns a dict; detached, zero-dimensional."""
    train_metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics over the training batches of this epoch, by name."""
    eval_metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metrics by evaluator label and name."""
    train_metric_values: dict[str, Tensor] = field(default_factory=dict)
    """Values of `train_metrics` at the last EPOCH_END, over all ranks."""
    eval_metric_values: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Last values by evaluator label and name, over all ranks; 'loss' is the mean loss."""

    resumed_from: Path | None = field(default=None, init=False)
    """The checkpoint that this run goes on from."""
    unheard: dict[str, list[str]] = field(default_factory=dict, init=False)
    """An event in which a callback failed, with the config keys of those who are yet to hear it in a resumed run."""
    stop_requested: bool = field(default=False, init=False)
    """Whether `stop_training` was called."""
    is_consistent: bool = field(default=False, init=False)
    """Whether weights, optimizers and metrics on this rank are those of `timestamp`, so that a checkpoint taken now can
    be resumed to the bit. Set by `changing`; an algorithm that changes them earlier in a batch sets it to False."""
    ended_between_batches: bool = field(default=False, init=False)
    """Whether a signal ended training after a whole batch, the same one on all ranks."""
    error: BaseException | None = field(default=None, init=False)
    """What ended the run, set before `close`; None while all is well. KeyboardInterrupt and SystemExit too."""

    def stop_training(self) -> None:
        """End training after the current batch's (or epoch's) checkpoint event. Call it on all ranks alike."""
        self.stop_requested = True

    @contextmanager
    def changing(self, settles: bool = True) -> Iterator[None]:
        """Inside, the state is not consistent, as something of it changes; afterwards it is.

        An error leaves it inconsistent, except where all that is missing is known to `unheard`.

        Args:
            settles: whether the state is consistent afterwards.
        """
        self.is_consistent = False
        try:
            yield
        except BaseException:
            self.is_consistent = bool(self.unheard)
            raise
        self.is_consistent = settles

    def step_time(self, timestamp: Timestamp) -> None:
        """Move on to a later timestamp."""
        self.previous_timestamp = self.timestamp
        self.timestamp = timestamp

    def is_due(self, interval: Interval) -> bool:
        """Whether the last step of time reached a multiple of an interval."""
        return interval.is_due(self.previous_timestamp, self.timestamp, self.max_duration, self.train_dataloader_len)

    @property
    def seed(self) -> int:
        """Seed of this rank's streams of randomness: `rank_zero_seed` plus the rank."""
        return self.rank_zero_seed + get_global_rank()

    @property
    def dataloader(self) -> Iterable[Batch] | None:
        """What is being read now: the train dataloader, an evaluator's, or the one being predicted."""
        return None if self.stream is None else self.stream.loader

    @property
    def dataloader_label(self) -> str | None:
        """'train', the evaluator's label, or 'predict'."""
        return None if self.stream is None else self.stream.label

    @property
    def dataloader_len(self) -> int | None:
        """Batches per pass over `dataloader` on each rank; None when it does not say."""
        return None if self.stream is None else self.stream.length

    @property
    def samples_per_microbatch(self) -> int | None:
        """Samples per microbatch on this rank, or None to split by `grad_accum`."""
        return self.microbatch_size if isinstance(self.microbatch_size, int) else self.fitting_size

    @property
    def progress(self) -> Progress:
        """Where training stands, with what is needed to convert units."""
        return Progress(self.timestamp, self.max_duration, self.train_dataloader_len)

    def get_elapsed_duration(self) -> Time:
        """Return the fraction of `max_duration` that has passed, as a Time in `dur`; at most 1."""
        return Time(min(1.0, self.progress.elapsed_in(TimeUnit.DURATION)), TimeUnit.DURATION)

    @property
    def metric_values(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Last metric values by label: 'train', and each evaluator's."""
        return {"train": self.train_metric_values, **self.eval_metric_values}
