"""Checks of values when they are logged; otherwise a destination would fail on them later, on another thread."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.libraries.typed import is_mapping, is_sequence


def as_step(step: Any) -> int:
    """Return the step of a logged value (a number of batches) as an int."""
    try:
        return operator.index(step)
    except TypeError:
        raise wrong_argument("step", step, "must be a whole number of batches", TypeError) from None


def check_images(images: Any, name: str, captions: Sequence[str] | None) -> np.ndarray:
    """Return logged images as an array of uint8 of shape (N, H, W, C)."""
    _check_text(name)
    shape = getattr(images, "shape", None)
    dtype = getattr(images, "dtype", None)
    value = repr(images) if shape is None or dtype is None else f"{dtype} of shape {tuple(shape)}"
    try:
        array = np.asarray(images)
    except (TypeError, ValueError) as error:  # not on the CPU, or a list of images of different sizes
        raise ValueError(f"images={value}: must be one array on the CPU ({error})") from None
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] not in (1, 3) or not array.size:
        allowed = "must be uint8 of shape (N, H, W, C), with C 1 or 3"
        example = "floats from 0 to 1 of shape (N, C, H, W) become (images * 255).round().byte().permute(0, 2, 3, 1)"
        raise ValueError(f"images={value}: {allowed}; {example}")
    if captions is not None and (isinstance(captions, str) or len(captions) != len(array)):
        raise wrong_argument("captions", captions, f"must be a list with a caption for each of {len(array)} images")
    return array


def check_table(columns: Any, rows: Any, name: str) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a logged table; tensors and arrays of one element become plain numbers."""
    _check_text(name)
    if not is_sequence(columns) or not all(isinstance(name, str) for name in columns):
        raise wrong_argument("columns", columns, "must be a list of names, such as ['image', 'score']")
    if not is_sequence(rows) or not all(is_sequence(row) for row in rows):
        raise wrong_argument("rows", rows, "must be a list with a list of values for each row; arrays have tolist()")
    for row in rows:
        if len(row) != len(columns) or any(getattr(value, "shape", ()) for value in row):
            raise ValueError(f"rows=[..., {row!r}, ...]: a row must have a plain value for each of {list(columns)}")
    return [*columns], [[value.item() if hasattr(value, "item") else value for value in row] for row in rows]


def _check_text(name: Any) -> None:
    refuse_if(not isinstance(name, str) or not name, "name", name, "must be a name to log this under, as text")


def check_named(name: str, values: Any) -> None:
    """Check that a logged value is a dict with names as keys."""
    if not is_mapping(values) or not all(isinstance(key, str) for key in values):
        raise wrong_argument(name, values, "must be a dict of values by name, such as {'width': 64}", TypeError)


def check_file(path: Any, folder: str | None) -> Path:
    """Return the path of a file that is logged; `folder` is its folder in the destination."""
    if not isinstance(path, str | PurePath) or not Path(path).is_file():
        raise wrong_argument("path", str(path), "must be a complete file; a folder is logged file by file")
    if folder is not None and (PurePath(folder).is_absolute() or ".." in PurePath(folder).parts):
        raise wrong_argument("name", folder, "must be a folder in the destination, without '..'")
    return Path(path)
