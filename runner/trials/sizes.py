"""Measures the memory of a run and the size of its checkpoints. The model may be on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from runner.checkpoints.snapshot import capture
from runner.core.state import State
from runner.device.batch import tensors


class Peak(NamedTuple):
    """Memory of a process that trains a model with batches of some size; in bytes.

    Attributes:
        total: the largest sum of everything that is held at once.
        activations: memory of a microbatch until its backward pass begins: results of the forward pass, and itself.
        gathered: the most weights that a rank of a sharded model gathers at once.
        microbatches: their number in a batch.
    """

    total: int
    activations: int
    gathered: int
    microbatches: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a rank's tensors and of checkpoints. All but the first two are in bytes."""

    parameters: int = 0
    """Number of elements of all parameters."""
    trainable: int = 0
    """Number of elements of the trained parameters."""
    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    optimizer: int = 0
    """State of the optimizers, such as momentum."""
    algorithms: int = 0
    """State of the algorithms, such as an average of the weights."""
    activations: int = 0
    """Memory of a microbatch until its backward pass begins, itself included; 0 if unknown."""
    gathered: int = 0
    """The most weights that a rank of a sharded model gathers at once."""
    peak: int = 0
    """The largest sum in a training step, in which activations are freed as gradients arrive; 0 if unknown."""
    checkpoint: int = 0
    """All files of a checkpoint."""
    checkpoint_weights: int = 0
    """The file of weights in a checkpoint."""


def measure(state: State, shards: int = 1, tensor_parallel: int = 1) -> Sizes:
    """Return the sizes of a run that has trained a batch.

    `shards` ranks will share one copy of the weights, and `tensor_parallel` ranks will split each layer.
    """
    model = state.unwrapped_model
    split: set[torch.Size] = set()
    if tensor_parallel > 1:
        from runner.distributed.tensor_parallel import split_parameters

        split = {parameter.shape for parameter in split_parameters(model, tensor_parallel)}

    def held_elsewhere(content: Any) -> int:
        """Return the bytes of tensors on other ranks; a tensor with a parameter's shape is split like it."""
        held = 0
        for tensor in tensors(content):
            if tensor.ndim and (rows := len(tensor)):
                parts = shards * (tensor_parallel if tensor.shape in split else 1)
                held += (rows - -(-rows // parts)) * (tensor.nbytes // rows)
        return held

    def share(content: Any) -> int:
        return size_of(content) - held_elsewhere(content)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    snapshot = capture(state) or {}
    files = {name: saved_size(content) for name, content in snapshot.items() if name.endswith(".pt")}
    return Sizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(parameter.numel() for parameter in trained),
        weights=size_of(dict(model.state_dict())) - held_elsewhere([*model.parameters()]),
        gradients=sum(parameter.nbytes for parameter in trained) - held_elsewhere(trained),
        optimizer=sum(share(optimizer.state_dict()) for optimizer in state.optimizers),
        algorithms=sum(share(algorithm.state_dict()) for algorithm in state.algorithms),
        checkpoint=sum(files.values()),
        checkpoint_weights=files["model.pt"],
    )


def at_peak(sizes: Sizes, peak: Peak, replicas: bool) -> Sizes:
    """Return sizes with the peak memory of training.

    `replicas` tells whether other ranks hold the whole model too.
    """
    # DDP keeps averaged gradients in addition to the sums.
    total = peak.total + (sizes.gradients if replicas and peak.microbatches > 1 else 0)
    return replace(sizes, activations=peak.activations, gathered=peak.gathered, peak=total)


def describe_groups(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return a line for each parameter group: name, size, base rate, decay, and other special settings."""
    lines = []
    for optimizer in optimizers:
        groups = optimizer.param_groups
        shared = [key for key in groups[0] if all(key in group for group in groups)]
        special = [key for key in shared if len({repr(group[key]) for group in groups}) > 1]
        for index, group in enumerate(groups):
            count = sum(parameter.requires_grad for parameter in group["params"])
            frozen = sum(parameter.numel() for parameter in group["params"] if not parameter.requires_grad)
            numbers = sum(parameter.numel() for parameter in group["params"]) - frozen
            settings = {"lr": group.get("initial_lr", group.get("lr")), "weight_decay": group.get("weight_decay")}
            settings |= {
                key: group[key] for key in special if key not in ("params", "name", "initial_lr", "lr_scale", "lr")
            }
            shown = [
                f"{key} {item:.3g}" if isinstance(item, float) else f"{key} {item}" for key, item in settings.items()
            ]
            size = f"{numbers:,} parameters in {count} tensor{'s' * (count != 1)}"
            size += f" and {frozen:,} frozen" * (frozen > 0)
            lines.append(", ".join([f"{type(optimizer).__name__} {group.get('name', index)}: {size}", *shown]))
    return lines


def size_of(content: Any) -> int:
    """Return the bytes of all tensors in nested containers; tensors that share memory are counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors(content)}
    return sum(storages.values())


def saved_size(content: Any) -> int:
    """Return the size in bytes of the file that `torch.save` would write."""
    file = _ByteCounter()
    torch.save(content, file)  # type: ignore[arg-type]
    return file.size + size_of([tensor for tensor in tensors(content) if tensor.is_meta])


class _ByteCounter:
    """A file that counts the bytes written to it, and drops them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing."""
