"""How much memory a run takes, and how large its checkpoints are. The model may be on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runner.batch import tensors
from runner.checkpoints.snapshot import capture
from runner.state import State


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run in one process, without activations. All but the first two are in bytes."""

    parameters: int = 0
    """Number of elements of all parameters."""
    trainable: int = 0
    """Number of elements of the parameters that are trained."""
    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    optimizer: int = 0
    """State of the optimizers, such as momentum."""
    algorithms: int = 0
    """State of the algorithms, such as an average of the weights."""
    checkpoint: int = 0
    """All files of a checkpoint."""
    checkpoint_weights: int = 0
    """The file of weights in it."""


def measure(state: State) -> Sizes:
    """Return the sizes of a run that has trained a batch."""
    model = state.unwrapped_model
    trained = [one for one in model.parameters() if one.requires_grad]
    snapshot = capture(state, copy=False) or {}
    files = {name: saved_size(content) for name, content in snapshot.items() if name.endswith(".pt")}
    return Sizes(
        parameters=sum(one.numel() for one in model.parameters()),
        trainable=sum(one.numel() for one in trained),
        weights=size_of(dict(model.state_dict())),
        gradients=sum(one.nbytes for one in trained),
        optimizer=sum(size_of(one.state_dict()) for one in state.optimizers),
        algorithms=sum(size_of(one.state_dict()) for one in state.algorithms),
        checkpoint=sum(files.values()),
        checkpoint_weights=files["model.pt"],
    )


def size_of(content: Any) -> int:
    """Return the bytes of all tensors in nested containers; tensors that share memory are counted once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors(content)}
    return sum(storages.values())


def saved_size(content: Any) -> int:
    """Return the size in bytes of the file that `torch.save` would write."""
    file = _ByteCounter()
    torch.save(content, file)  # type: ignore[arg-type]
    return file.size + size_of([one for one in tensors(content) if one.is_meta])


class _ByteCounter:
    """A file that counts the bytes that are written to it, and drops them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""
