"""CutMix: each image gets a box from another image of the batch, and the same share of that image's target."""

from __future__ import annotations

import math
import random

from torch import Tensor

from runner import Logger, State, stream_seed
from runner.algorithms._batch import Key, get_item
from runner.algorithms._boxes import draw_boxes
from runner.algorithms._mixing import Mixing, draw_weight, interpolate
from runner.failures.checks import check_number

Box = tuple[int, int, int, int]
"""Top, left, bottom and right of a box, in pixels, ends excluded."""


def draw_box(size: tuple[int, int], alpha: float, uniform_sampling: bool, seed: int) -> Box:
    """Return a random box with the proportions of the image, clipped at the image's edges.

    A box with the share b ~ Beta(alpha, alpha) of the area has sides of sqrt(b) times those of the image.

    Args:
        size: height and width of the image.
        alpha: parameter of Beta(alpha, alpha), from which the box's share of the area before clipping is drawn.
        uniform_sampling: whether each pixel is equally likely to be covered, see `draw_boxes`.
        seed: seed of the draw; equal arguments give equal boxes.
    """
    side = math.sqrt(random.Random(seed).betavariate(alpha, alpha))
    lengths = (int(side * size[0]), int(side * size[1]))
    top, left, bottom, right = draw_boxes(1, lengths, size, uniform_sampling, seed)[0].tolist()
    return top, left, bottom, right


def paste(images: Tensor, partners: Tensor, box: Box) -> Tensor:
    """Return images with a box copied from their partners, both (N, C, H, W)."""
    top, left, bottom, right = box
    pasted = images.clone()
    pasted[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return pasted


class CutMix(Mixing):
    """Trains on images that contain a box of another image, with targets blended by area; one box per batch.

    The weight of the partner's target is the share of the image that its box covers after clipping, because that is
    how much of the partner the model sees (Yun et al. 2019).

    Partners come from this rank's whole batch, before it is split into microbatches, and the draws depend only on
    (seed, config key, batch), as with MixUp. The batch and its targets are not changed, and metrics see the true
    targets.

    Args:
        alpha: parameter of Beta(alpha, alpha), from which the box's share of the area is drawn; above 0.
        uniform_sampling: whether to place the box so that each pixel is equally likely to be replaced; otherwise pixels
            near the edges are replaced less often, as in the paper.
        interpolate_loss: whether to blend two losses instead of the targets, for a loss that accepts only class
            indices; this computes the loss twice.
        input_key: index or name of the images (N, C, H, W) in a batch.
        target_key: index or name of the targets in a batch: class indices (N,) or probabilities (N, C).
        mixup_share: share of batches, in [0, 1], that are blended as in MixUp instead, as is usual with both; each rank
            draws for each batch.
        mixup_alpha: `alpha` of MixUp on these batches, above 0.

    Raises:
        ValueError: an argument is out of range; the algorithm is combined with MixUp, or `interpolate_loss` with
            LabelSmoothing; or, during training, the inputs are not images, or there is not one target per image.
        TypeError: during training, the outputs are not a tensor; or, with `mixup_share`, the images are not floating
            point.

    Evidence:
        Strong for image classification with many epochs (Yun et al. 2019, arXiv:1905.04899); none for a few epochs.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        uniform_sampling: bool = False,
        interpolate_loss: bool = False,
        input_key: Key = 0,
        target_key: Key = 1,
        mixup_share: float = 0.0,
        mixup_alpha: float = 0.2,
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)
        check_number("mixup_share", mixup_share, "[0, 1]")
        check_number("mixup_alpha", mixup_alpha, "(0, inf]")
        self.mixup_share = mixup_share
        self.mixup_alpha = mixup_alpha
        self._is_mixup = False
        self.uniform_sampling = uniform_sampling
        self._box: Box = (0, 0, 0, 0)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        targets = get_item(state.batch, self.target_key)
        if targets.ndim > 2 or (targets.ndim == 2 and not targets.is_floating_point()):
            raise ValueError(
                f"targets of shape {tuple(targets.shape)}: CutMix needs one target per image, because it blends "
                "targets by area"
            )
        super().before_train_batch(state, logger)

    def draw(self, inputs: Tensor, seed: int) -> float:
        if inputs.ndim != 4:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}: CutMix needs images (N, C, H, W)")
        if self.mixup_share and not inputs.is_floating_point():
            raise TypeError(f"inputs of {inputs.dtype}: with mixup_share above 0, CutMix needs floating-point images")
        # A stream of its own, so that the choice does not depend on the box or the weight.
        self._is_mixup = random.Random(stream_seed(seed, "mixup")).random() < self.mixup_share
        if self._is_mixup:
            return draw_weight(self.mixup_alpha, seed)
        height, width = inputs.shape[2:]
        self._box = draw_box((height, width), self.alpha, self.uniform_sampling, seed)
        top, left, bottom, right = self._box
        return (bottom - top) * (right - left) / (height * width)

    def mix(self, inputs: Tensor, partners: Tensor) -> Tensor:
        if self._is_mixup:
            return interpolate(inputs, partners, self._weight)
        return paste(inputs, partners, self._box)
