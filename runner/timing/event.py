"""The forty events of a run, in the order in which they fire."""

from __future__ import annotations

import difflib
from enum import StrEnum


class Event(StrEnum):
    """A point in a run at which callbacks and algorithms act.

    The names are MosaicML Composer's. `event.value` is the name of the hook method. `Event("batch_start")`,
    `Event("BATCH_START")` and two old aliases (`TRAINING_START`, `TRAINING_END`) all resolve.

    .. code-block:: text

        INIT                     the model is on its device; optimizers given as factories do not exist yet
        BEFORE_LOAD, AFTER_LOAD  before and after loading a checkpoint; fired even if there is none

        FIT_START
        while timestamp < max_duration:
          ITERATION_START
          EPOCH_START            only when batch_in_epoch == 0
          loop:
            BEFORE_DATALOADER    batch = next(dataloader); leave the loop if none is left
            AFTER_DATALOADER     the batch is on the device
            BATCH_START
            BEFORE_TRAIN_BATCH   once per batch, whatever the number of microbatches
            for each microbatch:
              BEFORE_FORWARD   forward   AFTER_FORWARD
              BEFORE_LOSS      loss      AFTER_LOSS
              BEFORE_BACKWARD  backward  AFTER_BACKWARD
            AFTER_TRAIN_BATCH    gradients are final and unscaled: clip here
            optimizer step, timestamp.to_next_batch
            BATCH_END
            due evaluators:      EVAL_BEFORE_ALL { EVAL_START ... EVAL_END }* EVAL_AFTER_ALL
            BATCH_CHECKPOINT
          timestamp.to_next_epoch
          EPOCH_END, due evaluators, EPOCH_CHECKPOINT
          ITERATION_END, ITERATION_CHECKPOINT
        final run of the evaluators that have not run at this batch
        FIT_END

        evaluation, per batch:   EVAL_BATCH_START, EVAL_BEFORE_FORWARD, EVAL_AFTER_FORWARD, metrics, EVAL_BATCH_END
        trainer.eval():          EVAL_STANDALONE_START { EVAL_START ... EVAL_END }* EVAL_STANDALONE_END
        trainer.predict():       PREDICT_START { PREDICT_BATCH_START, PREDICT_BEFORE_FORWARD, PREDICT_AFTER_FORWARD,
                                 PREDICT_BATCH_END }* PREDICT_END
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"

    FIT_START = "fit_start"
    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    TRAINING_START = "fit_start"
    TRAINING_END = "fit_end"

    # Enum's own hash is a slow Python function, and each event of each batch looks up a table keyed by events.
    __hash__ = str.__hash__

    @property
    def closes_bracket(self) -> bool:
        """Whether algorithms run in reverse order at this event, so that the first to wrap is the last to unwrap."""
        return self in _CLOSING

    @classmethod
    def _missing_(cls, value: object) -> Event:
        name = str(value).lower()
        name = ALIASES.get(name, name)
        known = [event.value for event in cls]
        if name in known:
            return cls(name)
        near = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown event {value!r}; did you mean {near!r}? runner.Event lists all of them")


ALIASES = {"training_start": "fit_start", "training_end": "fit_end"}
"""Current names of events by their old names, which still work as hook methods and as strings."""

_CLOSING = frozenset(
    {
        Event.AFTER_FORWARD,
        Event.AFTER_LOSS,
        Event.AFTER_BACKWARD,
        Event.AFTER_TRAIN_BATCH,
        Event.EVAL_AFTER_FORWARD,
        Event.PREDICT_AFTER_FORWARD,
    }
)
