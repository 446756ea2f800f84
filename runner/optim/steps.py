"""Step optimizers after each batch: directly, with the loss scaler of amp_fp16, or in the model's own code.

For each batch the training loop calls `finish_gradients`, fires AFTER_TRAIN_BATCH, and calls `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from runner.distributed.gradients import all_reduce_gradients
from runner.distributed.ranks import get_world_size
from runner.libraries.optimizers import step

if TYPE_CHECKING:
    from runner.core.state import State


class Steps:
    """Steps each optimizer, then the torch schedulers that step after every batch.

    `averages_gradients` says whether gradients must still be averaged over the ranks after backward.
    """

    def __init__(self, state: State, schedulers: Iterable[Any], averages_gradients: bool) -> None:
        self.state = state
        self.schedulers = [*schedulers]
        self.averages_gradients = averages_gradients

    def finish_gradients(self) -> None:
        """Average gradients over the ranks, unless DDP did so during backward. Call it on all ranks."""
        if self.averages_gradients:
            all_reduce_gradients(self.state.model.parameters())

    def step(self) -> None:
        """Step optimizers and schedulers."""
        for optimizer in self.state.optimizers:
            step(optimizer)
        for scheduler in self.schedulers:
            scheduler.step()

    def tracked(self, training_step: Callable[[State], Any]) -> Callable[[State], Any]:
        """Return a model's `training_step`, wrapped if this class needs to know when it runs."""
        return training_step

    def close(self) -> None:
        """Restore the optimizers to their original state."""


class ScaledSteps(Steps):
    """Steps with the loss scaler of amp_fp16, which skips a step if gradients overflow.

    If an optimizer skips its step, its scheduler does not step either. An optimizer whose parameters have no gradients
    does not step, just as without a scaler.
    """

    def __init__(self, state: State, schedulers: Iterable[Any], averages_gradients: bool) -> None:
        super().__init__(state, schedulers, averages_gradients)
        assert state.scaler is not None
        self.scaler = state.scaler
        self._unscaled: list[Optimizer] = []
        self._stepped: set[int] = set()
        self._hooks = [optimizer.register_step_post_hook(self._record_step) for optimizer in state.optimizers]

    def finish_gradients(self) -> None:
        super().finish_gradients()
        self._unscaled = [optimizer for optimizer in self.state.optimizers if has_gradients(optimizer)]
        for optimizer in self._unscaled:
            self.scaler.unscale_(optimizer)

    def step(self) -> None:
        self._stepped.clear()
        for optimizer in self._unscaled:
            self.scaler.step(optimizer)  # an intended host-device sync: torch reads back one flag
        if self._unscaled:
            self.scaler.update()
        for scheduler in self.schedulers:
            if id(scheduler.optimizer) in self._stepped:
                scheduler.step()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))


class OwnSteps(Steps):
    """Steps for a model with its own `training_step`.

    With `manual_optimization`, the model steps the optimizers, and `run_steps` is None. While `training_step` runs,
    `optimizer.step()` first averages the gradients of that optimizer over the ranks, and unscales them with amp_fp16. A
    closure computes gradients itself, so it works only on a single rank and without amp_fp16. Without
    `manual_optimization`, the model must not step optimizers: `run_steps` steps them after `training_step`.
    """

    def __init__(self, state: State, schedulers: Iterable[Any], run_steps: Steps | None) -> None:
        super().__init__(state, schedulers, averages_gradients=False)
        self._run_steps = run_steps
        self._is_running = False  # whether the model's training_step is running
        self._has_stepped = False  # whether training_step has ever stepped an optimizer
        self._stepped: set[int] = set()  # the optimizers that the scaler has stepped in this batch
        self._own_steps = [vars(optimizer).get("step") for optimizer in state.optimizers]
        for optimizer in state.optimizers:
            optimizer.step = self._wrap(optimizer, optimizer.step)

    def tracked(self, training_step: Callable[[State], Any]) -> Callable[[State], Any]:
        """Return a model's `training_step`, wrapped so that optimizers know when it runs."""

        def wrapped(state: State) -> Any:
            self._is_running = True
            try:
                return training_step(state)
            finally:
                self._is_running = False

        return wrapped

    def finish_gradients(self) -> None:
        if self._run_steps is not None:
            self._run_steps.finish_gradients()

    def step(self) -> None:
        if self._run_steps is not None:
            self._run_steps.step()
            return
        if not self._has_stepped:
            model = type(self.state.unwrapped_model).__name__
            remedy = "call step() on some of state.optimizers, or leave manual_optimization out"
            raise RuntimeError(f"{model}.training_step stepped no optimizer, with manual_optimization=True: {remedy}")
        if self._stepped and self.state.scaler is not None:
            self.state.scaler.update()
            self._stepped.clear()
        for scheduler in self.schedulers:
            scheduler.step()

    def close(self) -> None:
        for optimizer, own_step in zip(self.state.optimizers, self._own_steps, strict=True):
            vars(optimizer).pop("step", None)
            if own_step is not None:
                optimizer.step = own_step
        if self._run_steps is not None:
            self._run_steps.close()

    def _wrap(self, optimizer: Optimizer, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step_fn)
        def step(*arguments: Any, **named: Any) -> Any:
            if not self._is_running:
                return step_fn(*arguments, **named)
            name = type(optimizer).__name__
            model = type(self.state.unwrapped_model).__name__
            if self._run_steps is not None:
                remedy = f"set manual_optimization = True in {model}, or leave the step to the run"
                raise RuntimeError(f"{model}.training_step stepped {name}, which the run steps after it: {remedy}")
            if (arguments or named) and (get_world_size() > 1 or self.state.scaler is not None):
                limits = "only on a single rank without amp_fp16; call backward() before step() instead"
                raise TypeError(f"{model}.training_step: {name}.step() takes a closure {limits}")
            return self._step(optimizer, partial(step_fn, *arguments, **named))

        return step

    def _step(self, optimizer: Optimizer, step_fn: Callable[[], Any]) -> Any:
        state = self.state
        if get_world_size() > 1:
            all_reduce_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])
        state.is_consistent = False
        self._has_stepped = True
        if state.scaler is None:
            return step_fn()
        if id(optimizer) in self._stepped:
            name = type(optimizer).__name__
            raise RuntimeError(f"precision='amp_fp16': {name} can step only once per batch; use amp_bf16")
        if has_gradients(optimizer):
            self._stepped.add(id(optimizer))
            self._is_running = False
            state.scaler.step(optimizer)
            self._is_running = True


def make_steps(state: State, schedulers: Iterable[Any], averages_gradients: bool) -> Steps:
    """Return the `Steps` of a run, for its precision and its model; the arguments are those of `Steps`."""
    steps = (Steps if state.scaler is None else ScaledSteps)(state, schedulers, averages_gradients)
    model = state.unwrapped_model
    if model.training_step is None:
        return steps
    return OwnSteps(state, schedulers, None if model.manual_optimization else steps)


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
