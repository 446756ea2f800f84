"""Progressive resizing: training starts on small images."""

from __future__ import annotations

import random

from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import Key, get_images, get_item, resize, with_item
from runner.checks import check_whole

MODES = ("resize", "crop")


def scheduled_scale(progress: float, initial: float, delay: float, finetune: float) -> float:
    """Return the scale of images at a point of training: `initial`, then evenly up to 1, then 1.

    Args:
        progress: share of training that is over, in [0, 1].
        initial: scale at the start, in (0, 1].
        delay: share of training at the initial scale.
        finetune: share of training at scale 1, at its end.
    """
    if progress >= 1 - finetune:
        return 1.0
    if progress <= delay:
        return initial
    return initial + (1 - initial) * (progress - delay) / (1 - delay - finetune)


def scaled_size(length: int, scale: float, increment: int) -> int:
    """Return round(length * scale / increment) * increment, at least one increment and at most the length."""
    return length if scale == 1 else min(length, max(1, round(length * scale / increment)) * increment)


def crop(images: Tensor, size: tuple[int, int], corner: tuple[int, int]) -> Tensor:
    """Return the part of images (N, C, H, W) that has its upper left corner at (row, column), as a view."""
    (row, column), (height, width) = corner, size
    return images[:, :, row : row + height, column : column + width]


class ProgressiveResizing(Algorithm):
    """Trains on smaller images first, which cost less, and on those of full size at the end.

    The model must accept images of any size. The size depends on the timestamp alone and is the same on all ranks; the
    place of a crop is a function of (seed, config key, batch), one per batch and rank. Nothing has to be saved.

    Args:
        mode: 'resize': the whole image made smaller; 'crop': a random part of it.
        initial_scale: of height and width at the start, above 0 and at most 1.
        finetune_fraction: share of training at full size, at its end.
        delay_fraction: share of training at the initial scale; both together at most 1.
        size_increment: sizes are multiples of it, in pixels; at least 1. The full size need not be one.
        resize_targets: whether the targets are images too, (N, H, W) or (N, C, H, W), and are treated alike.
        input_key: where the images (N, C, H, W) stand in a batch.
        target_key: where the targets stand; only `resize_targets` needs it.

    Logs:
        progressive_resizing/height, progressive_resizing/width: of the images of this batch, in pixels.
        progressive_resizing/scale_factor: before sizes are rounded, in (0, 1].

    Raises:
        ValueError: an argument is out of range; while training, inputs or targets are no images.

    Evidence:
        Strong for time on large natural images (Howard 2018, fast.ai's DAWNBench entry; Touvron et al. 2019,
        arXiv:1906.06423, on why to end at full size); none for small ones, where time does not depend on size.
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
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be 'resize' or 'crop'")
        check_range("initial_scale", initial_scale, 0, 1, above=True)
        check_range("finetune_fraction", finetune_fraction, 0, 1)
        check_range("delay_fraction", delay_fraction, 0, 1)
        if finetune_fraction + delay_fraction > 1:
            raise ValueError(
                f"delay_fraction={delay_fraction!r}: must be at most 1 - finetune_fraction={finetune_fraction!r}"
            )
        check_whole("size_increment", size_increment, 1)
        self.mode = mode
        self.initial_scale = initial_scale
        self.finetune_fraction = finetune_fraction
        self.delay_fraction = delay_fraction
        self.size_increment = size_increment
        self.resize_targets = resize_targets
        self.input_key = input_key
        self.target_key = target_key

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_images(state.batch, self.input_key, "ProgressiveResizing")
        progress = state.get_elapsed_duration().value
        scale = scheduled_scale(progress, self.initial_scale, self.delay_fraction, self.finetune_fraction)
        height, width = (scaled_size(length, scale, self.size_increment) for length in images.shape[2:])
        if (height, width) != images.shape[2:]:
            self._shrink(state, images, (height, width))
        sizes = {"height": height, "width": width, "scale_factor": scale}
        step = state.timestamp.batch + 1  # this batch's, so that a run resumed before it logs it once
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
                    f"resize_targets=True: targets of shape {tuple(targets.shape)} are no images of the inputs' size"
                )
            shrunk = shrink(targets[:, None])[:, 0] if targets.ndim == 3 else shrink(targets)
            batch = with_item(batch, self.target_key, shrunk)
        state.batch = batch
