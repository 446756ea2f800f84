"""Images of a batch as the model sees them, with what they are and what the model takes them for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner import Callback, Interval, Time
from runner.checks import check_whole

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

MODES = ("input", "segmentation")


class ImageVisualizer(Callback):
    """Logs images of a training batch at an interval, and of the first batch of each evaluation.

    They are shown as the model sees them, after augmentation, each stretched to the full range of brightness unless
    its values lie in [0, 1]. With 'input' the target and the prediction, where they are classes, are the caption; with
    'segmentation' three panels lie side by side: the image, the target over it, the prediction over it. Rank 0 logs
    images of its own share of the batch, of the last microbatch; the others do nothing. Data that has no images, such
    as a language model's, is said once and nothing is logged.

    Args:
        interval: how often in training, a time; 0: evaluations only.
        mode: 'input' or 'segmentation'.
        num_images: images each time, at least 1.
        channels_last: whether images are (N, H, W, C) rather than (N, C, H, W); C is 1 or 3.
        input_key: where the images are in a batch: a position, or a key.
        target_key: where the targets are: classes (N,), probabilities (N, C), or masks of classes (N, H, W).

    Raises:
        ValueError: an argument is out of range; in training, a batch has no such key.

    Logs:
        Images/Train, Images/Eval: images; of an evaluator with another label than 'eval', Images/{label}.
    """

    def __init__(
        self,
        interval: str | int | Time = "100ba",
        mode: str = "input",
        num_images: int = 8,
        channels_last: bool = False,
        input_key: int | str = 0,
        target_key: int | str = 1,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(map(repr, MODES))}")
        check_whole("num_images", num_images, 1, "a number of images")
        self.interval = Interval(interval)
        self.mode = mode
        self.num_images = num_images
        self.channels_last = channels_last
        self.input_key = input_key
        self.target_key = target_key
        self._works = False

    def init(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        self._works = get_global_rank() == 0

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._works and state.is_due(self.interval):
            self._log(state, logger, state.microbatch, "Images/Train")

    epoch_end = batch_end

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._works and state.eval_timestamp.batch == 1:
            label = state.dataloader_label
            self._log(state, logger, state.batch, "Images/Eval" if label == "eval" else f"Images/{label}")

    def _log(self, state: State, logger: Logger, batch: Any, name: str) -> None:
        from runner.callbacks._pictures import read_together, to_classes, to_pictures, with_masks

        images = _pick(batch, self.input_key, "input_key")
        channels = images.shape[-1 if self.channels_last else 1] if images.ndim == 4 else 0
        if channels not in (1, 3):
            layout = "(N, H, W, C)" if self.channels_last else "(N, C, H, W)"
            self._give_up(f"a batch of shape {tuple(images.shape)} is not {layout} with C 1 or 3")
            return
        images = images[: self.num_images]
        images = images if self.channels_last else images.permute(0, 2, 3, 1)
        targets = to_classes(_pick(batch, self.target_key, "target_key"), images)
        predictions = to_classes(getattr(state, "outputs", None), images)
        pixels, *classes = read_together([images, targets, predictions])  # the intended host-device sync
        pictures = to_pictures(pixels)
        if self.mode == "input":
            logger.log_images(pictures, name, captions=_captions(*classes))
            return
        masks = [one for one in classes if one is not None and one.shape == pixels.shape[:3]]
        if masks:
            logger.log_images(with_masks(pictures, masks), name)
        else:
            self._give_up("for mode='segmentation', neither targets nor predictions are masks (N, H, W) of classes")

    def _give_up(self, reason: str) -> None:
        log.warning("image_visualizer logs nothing: %s", reason)
        self._works = False


def _captions(targets: Any, predictions: Any) -> list[str] | None:
    """Return a line for each image, None where neither targets nor predictions are one number for each."""
    named = {"target": targets, "prediction": predictions}
    found = {name: values for name, values in named.items() if values is not None and values.ndim == 1}
    columns = [[f"{name} {_short(value)}" for value in values.tolist()] for name, values in found.items()]
    return [", ".join(parts) for parts in zip(*columns, strict=True)] or None


def _short(value: float) -> str:
    """Return a score with four digits, a class with all."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:d}"


def _pick(batch: Any, key: int | str, name: str) -> Any:
    """Return an entry of a batch; of one that is a tensor, the tensor as its input, and no target."""
    if hasattr(batch, "shape"):
        return batch if name == "input_key" else None
    try:
        return batch[key]
    except (LookupError, TypeError):
        keys = [*batch] if isinstance(batch, Mapping) else [*range(len(batch))]
        raise ValueError(f"{name}={key!r}: a batch has {', '.join(map(repr, keys))}") from None
