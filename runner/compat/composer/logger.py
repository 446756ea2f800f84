"""Composer's logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from runner.compat.composer import absent
from runner.core import logger as ours


class Logger:
    """Composer's methods for logging, on this library's logger."""

    __slots__ = ("_logger",)

    def __init__(self, logger: ours.Logger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._logger, name):
            raise absent.missing("logger", name, absent.LOGGER)
        return getattr(self._logger, name)

    def log_hyperparameters(self, parameters: Mapping[str, Any]) -> None:
        """Log hyperparameters: a nested mapping of plain values."""
        self._logger.log_hyperparameters(parameters)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers, `Time` objects or tensors of one element, without waiting for the device."""
        self._logger.log_metrics(metrics, None if step is None else int(step))

    def log_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Log a table of plain values; a later table of the same name replaces it."""
        self._logger.log_table(columns, rows, name, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Any = None,
        mask_class_labels: Any = None,
        use_table: bool = True,
    ) -> None:
        """Log one or several images: arrays or tensors on any device, uint8 or floats from 0 to 1.

        The shape is `(N, C, H, W)`, `(C, H, W)` or `(H, W)`, or the images are a list; C is 1 or 3, and comes last with
        `channels_last`. Masks are not supported, and `use_table` has no effect.

        Raises:
            ValueError: the images have another type or shape, or there are masks, which no destination here can show.
        """
        if masks is not None or mask_class_labels is not None:
            raise ValueError("masks=...: log_images shows images only; runner.callbacks.ImageVisualizer shows masks")
        self._logger.log_images(_to_uint8(images, channels_last), name, step)

    def upload_file(self, remote_file_name: str, file_path: str | Path, *, overwrite: bool = False) -> None:
        """Log the complete file at `file_path` under its own name, in the folder part of `remote_file_name`."""
        folder = str(PurePosixPath(remote_file_name).parent)
        self._logger.log_artifact(file_path, None if folder == "." else folder)


def _to_uint8(images: Any, channels_last: bool) -> Any:
    """Return images as a uint8 array `(N, H, W, C)` on the CPU; this waits for the device."""
    is_list = isinstance(images, list | tuple)
    stacked = torch.stack([torch.as_tensor(image) for image in images]) if is_list else torch.as_tensor(images)
    if stacked.ndim == 2 or (is_list and stacked.ndim == 3):
        stacked = stacked.unsqueeze(-1 if channels_last else -3)
    if stacked.ndim == 3:
        stacked = stacked.unsqueeze(0)
    if stacked.ndim != 4 or not (stacked.dtype == torch.uint8 or stacked.is_floating_point()):
        shape = f"{stacked.dtype} of shape {tuple(stacked.shape)}"
        raise ValueError(
            f"images={shape}: must be uint8, or floats from 0 to 1, of shape (N, C, H, W), (C, H, W) or (H, W)"
        )
    if not channels_last:
        stacked = stacked.permute(0, 2, 3, 1)
    if stacked.is_floating_point():
        stacked = (stacked.detach().float().clamp(0, 1) * 255).round()
    return stacked.to("cpu", torch.uint8).numpy()
