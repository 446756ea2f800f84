"""Channels last: stores images pixel by pixel in memory, for faster convolutions on GPUs with tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from runner import Algorithm, Logger, State
from runner.algorithms._batch import AUGMENTATIONS
from runner.algorithms._surgery import LAYER_SURGERY, report
from runner.device.batch import map_tensors


def to_channels_last(tensor: Tensor) -> Tensor:
    """Return a tensor `(N, C, H, W)` laid out in memory as `(N, H, W, C)`; its shape and values stay the same.

    A tensor that is not four-dimensional is returned unchanged.
    """
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


class ChannelsLast(Algorithm):
    """Keeps four-dimensional weights, and four-dimensional tensors of a batch, in the channels-last layout.

    Results differ from those without it only by rounding. Nothing is random or depends on ranks or microbatches.

    Args:
        allow_no_match: whether to leave a model without four-dimensional weights unchanged instead of raising an error.

    Raises:
        ValueError: at INIT, the model has no four-dimensional weight.

    Evidence:
        Strong for the speed of 16-bit convolutions on GPUs (NVIDIA, "Convolutional Layers User's Guide"); none on
        other devices, which it may slow down. The trained model is the same.
    """

    runs_after = (*LAYER_SURGERY, "StochasticDepth", "SelectiveBackprop", *AUGMENTATIONS)

    def __init__(self, allow_no_match: bool = False) -> None:
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        model = state.unwrapped_model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        names = [name for name, weight in model.named_parameters() if weight.ndim == 4]
        report(self, state, names, "four-dimensional weight", self.allow_no_match)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        state.batch = map_tensors(state.batch, to_channels_last)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        state.batch = map_tensors(state.batch, to_channels_last)

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        state.batch = map_tensors(state.batch, to_channels_last)
