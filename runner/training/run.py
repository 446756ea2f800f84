"""A run as the loops see it: its state, event listeners, data and clock, and the functions that each batch calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.checkpoints.base import forget_changed
from runner.core.randomness import ForwardStream, HookStream
from runner.distributed import standstill
from runner.distributed.collectives import all_reduce_sum
from runner.distributed.ranks import get_data_parallel_size
from runner.distributed.session import ending
from runner.distributed.sharding import is_sharded
from runner.distributed.shares import weigh_alike
from runner.libraries.backward import backward
from runner.models.first_loss import check_loss, warn_of_split_means
from runner.models.loss import Share
from runner.models.model import Model
from runner.optim.freezing import Freezing

if TYPE_CHECKING:
    from runner.core.engine import Engine
    from runner.core.state import State
    from runner.distributed.clock import Clock
    from runner.optim.scheduled_rates import ScheduledRates
    from runner.optim.steps import Steps
    from runner.timing.time import Time
    from runner.training.dataloader import BatchStream

Accumulate = Callable[["Run", Share], None]
"""A function that adds the gradient of `state.batch` to `.grad`, weighted by this rank's share of the global batch."""


@dataclass(kw_only=True)
class Run:
    """What the loops of training, evaluation and prediction work on; made by the Trainer."""

    state: State
    """The state, with its model on its device and its optimizers."""
    wrap: Callable[[], nn.Module]
    """Returns the model that training calls: wrapped by DDP, or itself."""
    engine: Engine
    """Fires events; `on` has a function for each."""
    clock: Clock
    """Measures training time, and reports a signal that asks training to end."""
    train_stream: BatchStream | None
    """The training data; None for a run that does not train."""
    eval_streams: dict[str, BatchStream]
    """The data of evaluators by label."""
    iteration_length: Time | None
    """Epochs in an iteration; None: the whole run is one."""
    steps: Steps
    """Steps the optimizers."""
    rates: Sequence[ScheduledRates]
    """Schedules that set learning rates before each batch."""
    epoch_schedulers: Sequence[Any]
    """Torch schedulers that step after each epoch."""
    accumulate: Accumulate
    """Computes the gradient of a batch; see `runner.training.accumulation`."""
    reduces_in_backward: bool
    """Whether DDP averages gradients over the ranks in the last backward pass of a batch."""
    loss_is_checked: bool = field(default=False, init=False)
    """Whether a training loss has passed `check_loss`."""

    def __post_init__(self) -> None:
        self.on = self.engine.on
        self.forward_stream = ForwardStream(self.state.seed, self.state.device)
        self.eval_stream = ForwardStream(self.state.seed, self.state.device, "evaluation")
        # Built-in algorithms have generators of their own. Those of users may draw from the global ones.
        has_own = any(not type(algorithm).__module__.startswith("runner.") for algorithm in self.state.algorithms)
        self.hook_stream = HookStream(self.state.seed, self.state.device, "hooks") if has_own else None
        self.world_size = get_data_parallel_size()
        self.has_loss = type(self.state.unwrapped_model).loss is not Model.loss
        is_uneven = self.train_stream is not None and self.train_stream.ranks_read is not None
        picks_samples = any(algorithm.picks_samples for algorithm in self.state.algorithms)
        self.root_gradients: dict[float, Tensor] = {}  # see `loss.root_gradient`
        self.backward = backward
        for algorithm in self.state.algorithms:
            self.accumulate = algorithm.wrap_accumulate(self.accumulate)
        self._sums_tokens = self.world_size > 1 and (picks_samples or is_uneven)
        self._mean_is_unknown = self.state.unwrapped_model.loss_averages == "unknown"
        self.weighs_by_samples = weigh_alike(self.state, self.engine.listeners)
        forget_changed(self.state.unwrapped_model)
        self.freezing = Freezing(self.state.unwrapped_model, self.state.optimizers)
        self.bind(self.wrap())
        standstill.watch_run(self)

    def bind(self, wrapped: nn.Module) -> None:
        """Choose the functions that each batch calls.

        Args:
            wrapped: the model that training calls: wrapped by DDP, or itself.
        """
        state = self.state
        model = state.unwrapped_model
        state.model = wrapped

        def autocast(function: Callable[..., Any]) -> Callable[..., Any]:
            return state.precision.autocast(state.device)(function)  # one for each: an autocast cannot contain itself

        self.parameters = list(model.parameters())
        self.is_sharded = is_sharded(model)
        parameter_names = dict(model.named_parameters(remove_duplicate=False)).keys()
        self.has_buffers = bool(model.state_dict().keys() - parameter_names)
        self.forward = autocast(wrapped)
        self.eval_forward = autocast(model.eval_forward)
        self.loss = autocast(model.loss)
        self.training_step = None if model.training_step is None else self.steps.tracked(autocast(model.training_step))
        self.unsynchronized: Callable[[], AbstractContextManager[Any]] = getattr(wrapped, "no_sync", nullcontext)

    def follow_freezing(self) -> None:
        """Wrap the model again if hooks froze or unfroze parameters, because DDP does not notice such changes."""
        if self.freezing.has_changed():
            self.bind(self.state.unwrapped_model)
            gc.collect()  # the old DDP is in reference cycles; its hooks on parameters must be gone before the new one
            self.bind(self.wrap())

    def check_loss(self, loss: Any, name: str, trains: bool) -> None:
        """Check a loss; called up to the first training loss, because a model always returns the same kind.

        Args:
            loss: the loss that the model returned.
            name: the method that returned it.
            trains: whether training called the method, rather than an evaluation.
        """
        check_loss(self.state, loss, name, trains)
        if self._mean_is_unknown and name == "loss":
            part = self.state.microbatch if trains else self.state.batch
            lengths = (stream.length for stream in self.eval_streams.values())
            self._mean_is_unknown = not warn_of_split_means(self.state, lengths, self.loss, part)
        self.loss_is_checked = trains

    def count_tokens(self, samples: int, all_samples: int) -> int:
        """Return the number of tokens in the global batch; 0 if the model does not count tokens. Call it on all ranks.

        Args:
            samples: number of samples on this rank; 0 if `state.batch` is only a stand-in for an empty share.
            all_samples: number of samples over all ranks.
        """
        tokens = self.state.unwrapped_model.num_tokens(self.state.batch)
        if tokens and self._sums_tokens:
            return int(all_reduce_sum(torch.tensor(tokens if samples else 0)))  # on the host
        if tokens and samples != all_samples:
            return tokens * all_samples // max(1, samples)  # the stand-in for an empty share is one sample
        return tokens

    def is_iteration_complete(self) -> bool:
        """Return whether the epoch that just ended completes an iteration."""
        state = self.state
        if self.iteration_length is None:
            return state.stop_requested or state.timestamp >= state.max_duration
        return state.timestamp.epoch_in_iteration >= self.iteration_length.value

    def end_if_interrupted(self) -> None:
        """End training between two batches if a signal or `State.interrupt` requested it.

        Raises:
            KeyboardInterrupt, SystemExit, ...: the exception of the signal or of the caller, on all ranks after the
                same batch.
        """
        error = ending(self.clock.signal) if self.clock.signal else self.state.interruption
        if error is not None:
            self.state.ended_between_batches = True
            raise error
