"""Cutting sequences, so that training sees shorter ones without losing tokens."""

from __future__ import annotations

from typing import Any

from runner.device.batch import map_tensors, tensors


def cut_into_pieces(batch: Any, whole: int, length: int, argument: str, remedy: str) -> Any:
    """Return a batch with its tensors (N, whole, ...) cut, in order, into pieces (N * whole / length, length, ...).

    Lengths are in tokens. Error messages begin with `argument`, in the form 'name=value', and end with `remedy`.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors(batch)]
    if not length or whole % length or any(shape[1:2] != (whole,) for shape in shapes):
        listed = ", ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{argument}: cannot cut tensors of shapes {listed} into pieces of {length} tokens; {remedy}")
    return map_tensors(batch, lambda tensor: tensor.reshape(-1, length, *tensor.shape[2:]))
