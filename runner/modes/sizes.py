"""How much memory a run takes, and how large its checkpoints are: of a model on the meta device too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runner.batch import tensors
from runner.checkpoints.snapshot import capture
from runner.state import State


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, in bytes but for the first two; of one process, without activations."""

    parameters: int = 0
    """Numbers in the model's parameters."""
    trainable: int = 0
    """Of these, the ones that are trained."""
    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    optimizer: int = 0
    """Moments and the like."""
    algorithms: int = 0
    """What algorithms keep, such as an average of the weights."""
    checkpoint: int = 0
    """On the disk."""
    checkpoint_weights: int = 0
    """Of it, the file of weights."""


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
    """Return the bytes of all tensors in a nesting; those that share memory count once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors(content)}
    return sum(storages.values())


def saved_size(content: Any) -> int:
    """Return how long the file is that `torch.save` would write."""
    file = _Counting()
    torch.save(content, file)  # type: ignore[arg-type]
    return file.size + size_of([one for one in tensors(content) if one.is_meta])


class _Counting:
    """A file that forgets what is written to it, but not how much."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""
