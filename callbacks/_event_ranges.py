"""Named ranges of a timeline, each between two events."""

from __future__ import annotations

from runner import Event

RANGES = {
    "fit": (Event.FIT_START, Event.FIT_END),
    "epoch": (Event.EPOCH_START, Event.EPOCH_CHECKPOINT),
    "dataloader": (Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER),
    "batch": (Event.BATCH_START, Event.BATCH_CHECKPOINT),
    "forward": (Event.BEFORE_FORWARD, Event.AFTER_FORWARD),
    "loss": (Event.BEFORE_LOSS, Event.AFTER_LOSS),
    "backward": (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    "optimizer step": (Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
    "evaluation": (Event.EVAL_START, Event.EVAL_END),
    "eval batch": (Event.EVAL_BATCH_START, Event.EVAL_BATCH_END),
    "eval forward": (Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD),
    "prediction": (Event.PREDICT_START, Event.PREDICT_END),
    "predict batch": (Event.PREDICT_BATCH_START, Event.PREDICT_BATCH_END),
    "predict forward": (Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD),
}
"""The events that open and close each range. A range lasts from the end of the first to the beginning of the second.
Ranges nest or are disjoint; a range that is never closed ends with the range around it."""

OPENED_AT: dict[Event, str] = {opening: name for name, (opening, _) in RANGES.items()}
CLOSED_AT: dict[Event, str] = {closing: name for name, (_, closing) in RANGES.items()}
CLOSED_AT[Event.EPOCH_END] = "dataloader"  # the last request of an epoch finds the loader exhausted
