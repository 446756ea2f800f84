"""Base classes of callbacks and algorithms: one method per event, called as `hook(state, logger)`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from runner.timing.event import ALIASES, Event

if TYPE_CHECKING:
    from runner.core.logger import Logger
    from runner.core.state import State


Handler = Callable[["State", "Logger"], Any]
"""A function called at an event, as `handler(state, logger)`."""


class Hooks:
    """One no-op method per event: override those you need; the others cost nothing.

    Hooks run on all ranks. A hook that reads a value from the device or writes a file should do so at an interval, and
    on rank 0 alone if one copy is enough. A class with a public method `(self, state, logger)` whose name is close to
    an event's raises TypeError when it is defined, so that a misspelled hook is never silently ignored. A hook with
    other parameters raises it when the Trainer is made. Subclasses need not call `super().__init__()`.
    """

    config_key: str = ""
    """The name in the config, under which the state is saved; the Trainer fills it in if it is empty."""
    has_trained: bool = False
    """Whether this object took part in a `fit`, and may hold state of that run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in vars(cls).items():
            if name.startswith("_") or not inspect.isfunction(method) or name in _EVENT_METHODS:
                continue
            parameters = [*inspect.signature(method).parameters][1:]
            is_foreign = name.startswith("on_") and name[3:] in _EVENT_METHODS  # the names of other libraries
            if (parameters != ["state", "logger"] and not is_foreign) or hasattr(Hooks, name):
                continue
            near = [name[3:]] if is_foreign else difflib.get_close_matches(name, _EVENT_METHODS, n=1, cutoff=0.75)
            if near:
                remedy = "give it another name" if is_foreign else "give it other arguments"
                raise TypeError(
                    f"{cls.__name__}.{name}({', '.join(parameters)}) would never be called: unknown event {name!r}; "
                    f"did you mean {near[0]!r}? If it is not a hook, {remedy}."
                )
        for alias, name in ALIASES.items():
            methods = next(vars(base) for base in cls.__mro__ if alias in vars(base) or name in vars(base))
            if alias in methods:
                if methods.get(name, methods[alias]) is not methods[alias]:
                    raise TypeError(f"{cls.__name__} has both {alias!r} and {name!r}, the same event: keep one")
                setattr(cls, name, methods[alias])

    @classmethod
    def warm_up(cls) -> None:
        """Start helpers that are slow to start; the command line calls this on rank 0, before it imports torch.

        Must leave no trace if no run follows.
        """

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Handle any event. If overridden, it is called at every event, instead of the methods named after events.

        By default it calls the method named after the event, then `apply` if `match` returns true.
        """
        getattr(self, event.value)(state, logger)
        if self.match(event, state):
            self.apply(event, state, logger)

    def match(self, event: Event, state: State) -> bool:
        """Return whether to call `apply` at an event. It is called at every event if both are defined."""
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> Any:
        """Act at an event that `match` chose; the return value is ignored."""

    def close(self, state: State, logger: Logger) -> None:
        """Clean up after the run or its failure (`state.error`). Called once, even if another hook's `close` fails."""

    def post_close(self) -> None:
        """Release what other hooks may still need in their `close`."""

    def gather_state(self) -> None:
        """Gather all ranks' state on rank 0, before a checkpoint saves its `state_dict`. Called on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors, numbers, strings, lists and dicts. Default: nothing.

        After an error within a batch, the run may be resumed from before that batch, so everything that a hook does
        between BATCH_START and AFTER_TRAIN_BATCH must be safe to repeat.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def init(self, state: State, logger: Logger) -> None:
        """INIT: the model is on its device; optimizers given as factories do not exist yet. Change the model here."""

    def before_load(self, state: State, logger: Logger) -> None:
        """BEFORE_LOAD: optimizers exist; a checkpoint, if any, is about to be loaded."""

    def after_load(self, state: State, logger: Logger) -> None:
        """AFTER_LOAD: the checkpoint is loaded; the model is about to be wrapped and compiled."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """FIT_START: `fit` begins; a second `fit` fires it again."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """ITERATION_START: an iteration of `iteration_length` begins."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """EPOCH_START: an epoch begins; none of its batches is trained yet."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """BEFORE_DATALOADER: before each `next(dataloader)`, including the one that raises StopIteration."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """AFTER_DATALOADER: `state.batch` is on the device. Change the batch here."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """BATCH_START: the batch is about to be trained."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """BEFORE_TRAIN_BATCH: once per batch, before its first microbatch."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """BEFORE_FORWARD: `state.microbatch` is set."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """AFTER_FORWARD: `state.outputs` is set. Algorithms run in reverse."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """BEFORE_LOSS: change targets here."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """AFTER_LOSS: `state.loss` is set. Algorithms run in reverse."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """BEFORE_BACKWARD: the loss is final."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """AFTER_BACKWARD: `.grad` includes this microbatch's gradients. Algorithms run in reverse."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """AFTER_TRAIN_BATCH: gradients are final and unscaled, the optimizers step next. Algorithms run in reverse."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """BATCH_END: `state.timestamp` already counts this batch."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """BATCH_CHECKPOINT: after the evaluations that were due at this batch."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """EPOCH_END: `state.timestamp` already counts this epoch."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """EPOCH_CHECKPOINT: after the evaluations that were due at this epoch."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """ITERATION_END: `state.timestamp` already counts this iteration."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """ITERATION_CHECKPOINT: after ITERATION_END."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """FIT_END: training and its final evaluation are done."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """EVAL_BEFORE_ALL: during training, before the evaluators that are due."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """EVAL_START: one evaluator begins; `state.dataloader_label` is its label."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """EVAL_BATCH_START: `state.batch` is the evaluator's batch, on the device."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """EVAL_BEFORE_FORWARD: before the model sees the batch."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """EVAL_AFTER_FORWARD: `state.outputs` is set, metrics come next. Algorithms run in reverse."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """EVAL_BATCH_END: the metrics have seen the batch."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """EVAL_END: `state.eval_metric_values[label]` is complete, over all ranks."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """EVAL_AFTER_ALL: the evaluators that were due have run; training's batch, weights and dataloader are back."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """EVAL_STANDALONE_START: `trainer.eval()` begins."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """EVAL_STANDALONE_END: `trainer.eval()` ends; the state is as it was before."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """PREDICT_START: `trainer.predict()` begins."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """PREDICT_BATCH_START: `state.batch` is on the device."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """PREDICT_BEFORE_FORWARD: before the model sees the batch."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """PREDICT_AFTER_FORWARD: `state.outputs` is set. Algorithms run in reverse."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """PREDICT_BATCH_END: the outputs are on their way to the CPU."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """PREDICT_END: all batches were predicted."""


_EVENT_METHODS = frozenset({*(event.value for event in Event), *ALIASES})


class Callback(Hooks):
    """An observer: reads the state and never writes to it, so that adding one changes no numbers."""

    only_in_training: ClassVar[bool] = False
    """Whether commands that only evaluate or predict leave it out."""
    only_in_sweeps: ClassVar[bool] = False
    """Whether a run that has it is refused outside of a sweep."""

    def wrap_handler(self, handler: Handler, owner: Hooks, event: Event) -> Handler:
        """Return what an engine should call instead of a callback's, algorithm's or destination's handler.

        For callbacks that measure other hooks. It is called once per handler, when the engine is made, so it costs
        nothing if nobody overrides it. Wrappers must use `functools.wraps(handler)`. Default: the handler itself.
        """
        return handler


class Algorithm(Hooks):
    """A change to training: it may write to the state, and declares how it combines with other algorithms.

    `runs_before`, `runs_after` and `conflicts_with` hold class names of other algorithms.
    """

    runs_before: ClassVar[Iterable[str]] = ()
    runs_after: ClassVar[Iterable[str]] = ()
    conflicts_with: ClassVar[Iterable[str]] = ()
    picks_samples: ClassVar[bool] = False
    """Whether it drops samples from batches. Ranks may then train different numbers of tokens, and must sum them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for key in ("runs_before", "runs_after", "conflicts_with"):
            if isinstance(names := getattr(cls, key), str):
                raise TypeError(f"{cls.__name__}.{key}={names!r}: must be a set of class names, {{{names!r}}}")

    def evaluation_weights(self, state: State) -> AbstractContextManager[None]:
        """Return a context in which the model holds the weights to evaluate and to export (an average, say)."""
        return nullcontext()

    def wrap_accumulate(self, accumulate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Return the function that computes the gradient of each batch; default: the one without this algorithm.

        Both have the type `runner.training.run.Accumulate`.
        """
        return accumulate
