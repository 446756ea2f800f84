"""Starts training from the weights of another run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner import Callback
from runner.failures.checks import check_list, check_one_of
from runner.failures.errors import wrong_argument
from runner.files.values import LocalPath

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

EVENTS = ("before_load", "after_load")


class LoadCheckpoint(Callback):
    """Loads all or some weights of another run's checkpoint before training.

    It loads the weights that the other run evaluated (with an averaging algorithm, the average), and nothing else. A
    run that is resumed, evaluates or predicts has its own weights, and loads none. All ranks read the file.

    Args:
        checkpoint: folder of a run, whose newest complete checkpoint is used, folder of a checkpoint, or a file of
            weights, `.pt`, `.pth` or `.safetensors`, such as one from timm, torchvision or `runner export`.
        strict: whether differing names of weights are an error; if False, matching weights are loaded and the others
            are reported.
        ignore_keys: patterns of names of weights not to load, such as ['module.head.*']; a later pattern wins, and `!`
            excludes. None loads all.
        event: 'before_load' or 'after_load': whether to load before or after the Trainer's own `load_path`. The later
            one wins.

    Raises:
        ValueError: an argument is out of range, or, at the event, there is no checkpoint, weights are missing,
            unexpected or of another shape, no weight is left to load, or a pattern matches no weight.
    """

    only_in_training = True

    def __init__(
        self,
        checkpoint: LocalPath | Path,
        strict: bool = True,
        ignore_keys: Sequence[str] | None = None,
        event: str = "before_load",
    ) -> None:
        if not isinstance(checkpoint, str | Path):
            raise wrong_argument("checkpoint", checkpoint, "must be a run's folder, or a checkpoint's")
        check_list("ignore_keys", ignore_keys, "patterns")
        check_one_of("event", event, EVENTS)
        self.checkpoint = checkpoint
        self.strict = strict
        self.ignore_keys = list(ignore_keys or ())
        self.event = event

    def before_load(self, state: State, logger: Logger) -> None:
        if self.event == "before_load":
            self._load(state)

    def after_load(self, state: State, logger: Logger) -> None:
        if self.event == "after_load":
            self._load(state)

    def _load(self, state: State) -> None:
        if state.resumed_from is not None:
            return
        from runner.checkpoints.base import names_in_base
        from runner.checkpoints.files import find_checkpoint
        from runner.checkpoints.weights import (
            OTHER_SHAPE,
            describe_differences,
            differences,
            is_weights_file,
            load_into,
            read_weights,
        )
        from runner.optim.name_patterns import select_names

        model = state.unwrapped_model
        try:
            path = Path(self.checkpoint)
            path = path if is_weights_file(path) else find_checkpoint(path)
            weights = read_weights(path, model)
        except FileNotFoundError:
            raise wrong_argument(
                "checkpoint", str(self.checkpoint), "no complete checkpoint; give a run's folder or a checkpoint's"
            ) from None
        own = model.state_dict()
        ignored = select_names("ignore_keys", self.ignore_keys, [*dict.fromkeys([*weights, *own])])
        weights = {key: weight for key, weight in weights.items() if key not in ignored}
        wrong = differences(weights, model, ignored | names_in_base(model, weights, path))
        if OTHER_SHAPE in wrong or (self.strict and wrong) or not weights.keys() & own:
            raise wrong_argument(
                "checkpoint",
                str(self.checkpoint),
                f"its weights do not fit the model: {describe_differences(wrong) or 'no weight is left to load'}. "
                "to leave some out, set ignore_keys",
            )
        loaded = {key: weight for key, weight in weights.items() if key in own}
        load_into(model, loaded)
        if ignored:
            log.info("not loaded, because of ignore_keys: %s", ", ".join(sorted(ignored)))
        note = f"; {describe_differences(wrong)}" if wrong else ""
        log.info("%d of %d weights loaded from %s%s", len(loaded), len(own), self.checkpoint, note)
