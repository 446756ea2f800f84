"""Logs images as the model sees them, with their targets and the model's predictions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner import Callback, Interval, Time
from runner.failures.checks import check_one_of, check_whole
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

MODES = ("input", "segmentation")


class ImageVisualizer(Callback):
    """Logs images of a training batch at an interval, and of the first batch of each evaluation.

    Images are shown after augmentation, each stretched to the full range of brightness unless its values lie in [0,
    1]. In the mode 'input' the caption gives the target and the prediction if they are classes, by name if the
    model has their names. In the mode 'segmentation' there are three panels side by side: the image, the image with
    the target mask, and the image with the predicted mask. Rank 0 logs images from the last microbatch of its share
    of the batch; other ranks do nothing. If the data has no images, as for a language model, it warns once and logs
    nothing.

    Args:
        interval: how often to log in training, as a time string or a number of epochs; 0 means only in evaluations.
        mode: 'input' or 'segmentation'.
        num_images: number of images to log each time, at least 1.
        channels_last: whether images are (N, H, W, C) rather than (N, C, H, W); C is 1 or 3.
        input_key: position or key of the images in a batch.
        target_key: position or key of the targets: classes (N,), probabilities (N, C), or masks of classes (N, H, W).

    Raises:
        ValueError: an argument is out of range, or, in training, a batch has no entry under one of the keys.

    Logs:
        Images/Train: images of a training batch; no unit.
        Images/Eval: images of the first batch of an evaluation, Images/{label} for evaluators with a label other than
            'eval'; no unit.
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
        check_one_of("mode", mode, MODES)
        check_whole("num_images", num_images, 1, "a number of images")
        self.interval = Interval(interval)
        self.mode = mode
        self.num_images = num_images
        self.channels_last = channels_last
        self.input_key = input_key
        self.target_key = target_key
        self._is_enabled = False

    def init(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        self._is_enabled = get_global_rank() == 0

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._is_enabled and state.is_due(self.interval):
            self._log(state, logger, state.microbatch, "Images/Train")

    epoch_end = batch_end

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._is_enabled and state.eval_timestamp.batch == 1:
            label = state.dataloader_label
            self._log(state, logger, state.batch, "Images/Eval" if label == "eval" else f"Images/{label}")

    def _log(self, state: State, logger: Logger, batch: Any, name: str) -> None:
        from runner.callbacks._pictures import read_together, with_masks
        from runner.pictures.samples import are_images, make_captions, to_classes, to_pictures

        images = _pick(batch, self.input_key, "input_key")
        if not are_images(images, self.channels_last):
            layout = "(N, H, W, C)" if self.channels_last else "(N, C, H, W)"
            self._give_up(f"inputs of shape {tuple(images.shape)} are not images {layout} with 1 or 3 channels")
            return
        images = images[: self.num_images]
        targets = to_classes(_pick(batch, self.target_key, "target_key"), len(images))
        predictions = to_classes(getattr(state, "outputs", None), len(images))
        pixels, *classes = read_together([images, targets, predictions])  # the intended host-device sync
        pictures = to_pictures(pixels, self.channels_last)
        if self.mode == "input":
            names = getattr(state.unwrapped_model, "class_names", None)
            captions = make_captions(dict(zip(("target", "prediction"), classes, strict=True)), names=names)
            logger.log_images(pictures, name, captions=captions or None)
            return
        masks = [mask for mask in classes if mask is not None and mask.shape == pictures.shape[:3]]
        if masks:
            logger.log_images(with_masks(pictures, masks), name)
        else:
            self._give_up("for mode='segmentation', neither targets nor predictions are masks (N, H, W) of classes")

    def _give_up(self, reason: str) -> None:
        log.warning("image_visualizer logs no images: %s", reason)
        self._is_enabled = False


def _pick(batch: Any, key: int | str, name: str) -> Any:
    """Return an entry of a batch. A batch that is a tensor is its own input and has no target."""
    if hasattr(batch, "shape"):
        return batch if name == "input_key" else None
    try:
        return batch[key]
    except (LookupError, TypeError):
        keys = [*batch] if isinstance(batch, Mapping) else [*range(len(batch))]
        raise wrong_argument(name, key, f"a batch has the keys {', '.join(map(repr, keys))}") from None
