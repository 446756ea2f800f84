"""How sequences are cut, so that training sees shorter ones and no token is lost."""

from __future__ import annotations

from typing import Any

from runner.batch import map_tensors, tensors


def cut_into_pieces(batch: Any, whole: int, length: int, asked: str, remedy: str) -> Any:
    """Return a batch whose tensors (N, whole, ...) are cut into pieces (N whole / length, length, ...), in order.

    Args:
        batch: any nesting of tensors.
        whole: length of its sequences, in tokens.
        length: of the pieces.
        asked: the argument that asks for them, as the user typed it.
        remedy: what else to do.

    Raises:
        ValueError: pieces do not come out even, or a tensor would no longer belong to the others.
    """
    shapes = [tuple(one.shape) for one in tensors(batch)]
    if not length or whole % length or any(shape[1:2] != (whole,) for shape in shapes):
        listed = ", ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{asked}: cannot cut tensors of shapes {listed} into pieces of {length} tokens; {remedy}")
    return map_tensors(batch, lambda one: one.reshape(-1, length, *one.shape[2:]))
