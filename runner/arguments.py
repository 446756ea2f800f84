"""What the Trainer checks of its arguments before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.engine import overrides
from runner.event import Event
from runner.state import State
from runner.time import Time, TimeUnit


def listed(value: Any) -> list[Any]:
    """Return a list of one object, of several, or of a mapping's values, whose keys become config keys."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            one.config_key = one.config_key or key
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def check_duration(value: str | int | Time, name: str = "max_duration") -> Time:
    """Return a length of training; an int counts epochs.

    Raises:
        ValueError: it is no time, not positive, or in 'dur' or 'iter'.
    """
    duration = Time.parse_or_epochs(value, name)
    if duration.unit in (TimeUnit.DURATION, TimeUnit.ITERATION) or duration.value <= 0:
        raise ValueError(
            f"{name}={value!r}: must be more than 0, in ep, ba, sp, tok or seconds, such as '10ep' or '1h30m'"
        )
    return duration


def check_iteration_length(value: str | int | Time | None) -> Time | None:
    """Return the length of an iteration in epochs, None for the whole run.

    Raises:
        ValueError: it is not in epochs.
    """
    if value is None:
        return None
    length = Time.parse_or_epochs(value, "iteration_length")
    if length.unit is not TimeUnit.EPOCH or length.value <= 0:
        raise ValueError(f"iteration_length={value!r}: must be in epochs and more than 0, such as '2ep'")
    return length


def check_microbatches(grad_accum: int, microbatch_size: int | str | None) -> None:
    """Raise where batches cannot be split as asked.

    Raises:
        ValueError: a number is not positive, or both ways of splitting are given.
    """
    if not isinstance(grad_accum, int) or isinstance(grad_accum, bool) or grad_accum < 1:
        raise ValueError(f"grad_accum={grad_accum!r}: must be an int of at least 1")
    if microbatch_size not in (None, "auto") and (not isinstance(microbatch_size, int) or microbatch_size < 1):
        raise ValueError(f"microbatch_size={microbatch_size!r}: must be an int of at least 1, 'auto', or None")
    if microbatch_size is not None and grad_accum > 1:
        raise ValueError(
            f"grad_accum={grad_accum!r} and microbatch_size={microbatch_size!r} exclude one another: give one"
        )


_UNSEEN = (Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD)


def refuse_unseen_hooks(state: State) -> None:
    """Raise where someone listens to an event inside the step of a model that has its own `training_step`.

    Raises:
        ValueError: it would never be called.
    """
    if state.unwrapped_model.training_step is None:
        return
    for one in (*state.algorithms, *state.callbacks, *state.loggers):
        for event in _UNSEEN:
            if overrides(one, event):
                raise ValueError(
                    f"{type(one).__name__} acts at {event.name}, which does not happen with {type(state.unwrapped_model).__name__}: "
                    "its own training_step does forward, loss and backward. Remove one of them."
                )
