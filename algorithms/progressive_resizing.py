"""Progressive resizing: training starts on small images, which then grow to full size."""

from __future__ import annotations

import random

from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, get_images, get_item, resize, with_item
from runner.failures.checks import check_number, check_numbers, check_one_of, check_whole, refuse_if

MODES = ("resize", "crop")


def scheduled_scale(progress: float, initial: float, delay: float, finetune: float) -> float:
    """Return the scale of images at a point of training: first `initial`, then rising linearly to 1, then 1.

    Args:
        progress: fraction of training that has passed, in [0, 1].
        initial: scale at the start, in (0, 1].
        delay: fraction of training that is spent at the initial scale.
        finetune: fraction of training that is spent at scale 1, at its end.
    """
    if progress >= 1 - finetune:
        return 1.0
    if progress <= delay:
        return initial
    return initial + (1 - initial) * (progress - delay) / (1 - delay - finetune)


def scaled_size(length: int, scale: float, increment: int) -> int:
    """Return round(length * scale / increment) * increment, but at least one increment and at most the length."""
    return length if scale == 1 else min(length, max(1, round(length * scale / increment)) * increment)


def crop(images: Tensor, size: tuple[int, int], corner: tuple[int, int]) -> Tensor:
    """Return a view of a part of images (N, C, H, W), by its size and its upper left corner (row, column)."""
    row, column = corner
    height, width = size
    return images[:, :, row : row + height, column : column + width]


class ProgressiveResizing(Algorithm):
    """Trains on smaller images first, which are cheaper, and on images of full size at the end.

    The model must accept images of any size. The size depends only on the timestamp and is the same on all ranks. The
    position of a crop depends only on (seed, config key, batch), with one crop per batch and rank. Nothing has to be
    saved.

    Args:
        mode: how to make images smaller: 'resize' scales the whole image, 'crop' takes a random part of it.
        initial_scale: scale of height and width at the start, above 0 and at most 1.
        finetune_fraction: fraction of training at full size, at its end.
        delay_fraction: fraction of training at the initial scale; at most 1 together with `finetune_fraction`.
        size_increment: sizes are rounded to a multiple of this number of pixels, at least 1; the full size is exempt.
        resize_targets: whether the targets are images too, (N, H, W) or (N, C, H, W), to resize or crop like inputs.
        input_key: index or name of the images (N, C, H, W) in a batch.
        target_key: index or name of the targets in a batch; used only with `resize_targets`.

    Logs:
        progressive_resizing/height: height of the images of this batch, in pixels.
        progressive_resizing/width: width of the images of this batch, in pixels.
        progressive_resizing/scale_factor: scale before sizes are rounded, in (0, 1].

    Raises:
        ValueError: an argument is out of range; or, during training, the inputs or targets are not images.

    Evidence:
        Strong for time on large natural images (Howard 2018, fast.ai's DAWNBench entry; Touvron et al. 2019,
        arXiv:1906.06423, on why to end at full size); none for small images, whose size does not determine the time.
    """

    def __init__(
        self,
        mode: str = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: Key = 0,
        target_key: Key = 1,
    ) -> None:
        check_one_of("mode", mode, MODES)
        check_number("initial_scale", initial_scale, "(0, 1]")
        check_numbers("[0, 1]", finetune_fraction=finetune_fraction, delay_fraction=delay_fraction)
        both = f"must be at most 1 together with finetune_fraction={finetune_fraction!r}"
        refuse_if(finetune_fraction + delay_fraction > 1, "delay_fraction", delay_fraction, both)
        check_whole("size_increment", size_increment, 1)
        self.mode = mode
        self.initial_scale = initial_scale
        self.finetune_fraction = finetune_fraction
        self.delay_fraction = delay_fraction
        self.size_increment = size_increment
        self.resize_targets = resize_targets
        self.input_key = input_key
        self.target_key = target_key

    def _scale_at(self, state: State) -> float:
        progress = state.get_elapsed_duration().value
        return scheduled_scale(progress, self.initial_scale, self.delay_fraction, self.finetune_fraction)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_images(state.batch, self.input_key, "ProgressiveResizing")
        scale = self._scale_at(state)
        height, width = (scaled_size(length, scale, self.size_increment) for length in images.shape[2:])
        if (height, width) != images.shape[2:]:
            self._shrink(state, images, (height, width))
        sizes = {"height": height, "width": width, "scale_factor": scale}
        step = state.timestamp.batch + 1  # this batch's step, so that a run resumed before it does not log it twice
        logger.log_metrics({f"progressive_resizing/{name}": value for name, value in sizes.items()}, step=step)

    def _shrink(self, state: State, images: Tensor, size: tuple[int, int]) -> None:
        whole = images.shape[2:]
        generator = random.Random(stream_seed(state.seed, self.config_key, state.timestamp.batch))
        row, column = (generator.randint(0, old - new) for old, new in zip(whole, size, strict=True))

        def shrink(part: Tensor) -> Tensor:
            return resize(part, size) if self.mode == "resize" else crop(part, size, (row, column))

        batch = with_item(state.batch, self.input_key, shrink(images))
        if self.resize_targets:
            targets = get_item(state.batch, self.target_key)
            if targets.ndim not in (3, 4) or targets.shape[-2:] != whole:
                raise ValueError(
                    f"resize_targets=True: targets of shape {tuple(targets.shape)} are not images of the same size as "
                    f"the inputs, {tuple(whole)}; set resize_targets=False"
                )
            shrunk = shrink(targets[:, None])[:, 0] if targets.ndim == 3 else shrink(targets)
            batch = with_item(batch, self.target_key, shrunk)
        state.batch = batch
