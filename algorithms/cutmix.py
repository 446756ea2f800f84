"""CutMix: a box of each image comes from another of its batch, and so does that share of its target."""

from __future__ import annotations

import math
import random

from torch import Tensor

from runner import Logger, State
from runner.algorithms._batch import Key, get_item
from runner.algorithms._boxes import draw_boxes
from runner.algorithms._mixing import Mixing

Box = tuple[int, int, int, int]
"""Top, left, bottom and right of a box in pixels, ends excluded."""


def draw_box(size: tuple[int, int], alpha: float, uniform_sampling: bool, seed: int) -> Box:
    """Return a box at random, cut off at the edges of the image; before that it has the image's proportions.

    Args:
        size: height and width of the image.
        alpha: the box's share of the image's area is b ~ Beta(alpha, alpha), before it is cut off.
        uniform_sampling: see `draw_boxes`.
        seed: the draw depends on nothing else.
    """
    side = math.sqrt(random.Random(seed).betavariate(alpha, alpha))
    lengths = (int(side * size[0]), int(side * size[1]))
    top, left, bottom, right = draw_boxes(1, lengths, size, uniform_sampling, seed)[0].tolist()
    return top, left, bottom, right


def paste(images: Tensor, partners: Tensor, box: Box) -> Tensor:
    """Return images with a box taken from their partners, both (N, C, H, W)."""
    top, left, bottom, right = box
    pasted = images.clone()
    pasted[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
    return pasted


class CutMix(Mixing):
    """Trains on images with a box of another image in them, and on their targets blended by area; one box per batch.

    Partners, draws, microbatches and ranks are as with MixUp: partners come from the whole batch of this rank, and what
    is drawn is a function of (seed, config key, batch) alone. Neither the batch nor its targets are changed; metrics
    see the true targets.

    Args:
        alpha: of Beta(alpha, alpha), from which the box's share of the area is drawn. Above 0.
        uniform_sampling: choose the place of the box so that each pixel is as likely to be replaced; otherwise as in
            the paper, where those at the edges are less so.
        interpolate_loss: blend two losses instead of the targets, for a loss that accepts class numbers only; takes a
            second evaluation of the loss.
        input_key: where the images (N, C, H, W) stand in a batch.
        target_key: where the targets stand: class numbers (N,) or probabilities (N, C).

    Raises:
        ValueError: `alpha` is not above 0; `interpolate_loss` together with LabelSmoothing; together with MixUp; while
            training, inputs are no images, or targets are not one per image.
        TypeError: while training, outputs are no tensor.

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
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)
        self.uniform_sampling = uniform_sampling
        self._box: Box = (0, 0, 0, 0)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        targets = get_item(state.batch, self.target_key)
        if targets.ndim > 2 or (targets.ndim == 2 and not targets.is_floating_point()):
            raise ValueError(f"targets of shape {tuple(targets.shape)}: CutMix needs one target per image, by area")
        super().before_train_batch(state, logger)

    def draw(self, inputs: Tensor, seed: int) -> float:
        if inputs.ndim != 4:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}: CutMix needs images (N, C, H, W)")
        height, width = inputs.shape[2:]
        self._box = draw_box((height, width), self.alpha, self.uniform_sampling, seed)
        top, left, bottom, right = self._box
        return (bottom - top) * (right - left) / (height * width)

    def mix(self, inputs: Tensor, partners: Tensor) -> Tensor:
        return paste(inputs, partners, self._box)
