"""Use torch's fused optimizer kernels, which step many parameters at once, unless the user has decided otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.distributed.sharding import like_parameters
from runner.optim.muon import Muon
from runner.optim.param_groups import check_groups

FUSED = (SGD, Adam, AdamW, Muon)  # without subclasses, which may step in another way
DEVICES = ("cuda",)


def fuse(optimizer: Optimizer, model: nn.Module, devices: Collection[str] = DEVICES) -> None:
    """Make an optimizer that has not stepped yet use torch's fused kernels, in each group that supports them.

    The formula of the step is the same, but a fused kernel reads and writes each parameter once; with `fused=None`,
    torch launches kernels for each operation. A group supports them if all its parameters are plain floating-point
    tensors on a GPU and no module of the model has sparse gradients. A user's `fused` or `foreach` is kept.
    """
    has_sparse_gradients = any(getattr(module, "sparse", False) for module in model.modules())
    if type(optimizer) not in FUSED or optimizer.state or has_sparse_gradients:
        return
    for group in optimizer.param_groups:
        is_unset = "fused" in group and group["fused"] is None and group["foreach"] is None
        are_plain = all(_is_plain(parameter, devices) for parameter in group["params"])
        if is_unset and are_plain and not group["differentiable"]:
            group["fused"] = True


def _is_plain(parameter: Tensor, devices: Collection[str]) -> bool:
    is_dense = parameter.layout is torch.strided and type(parameter) in (Tensor, nn.Parameter)
    return is_dense and parameter.is_floating_point() and parameter.device.type in devices


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a saved state into an optimizer; its sharding and the kernels chosen for its device stay as they are.

    Raises:
        ValueError: the parameter groups differ.
    """
    check_groups(optimizer, saved)
    saved = like_parameters(optimizer, saved)
    groups: list[Mapping[str, Any]] = [
        {**saved_group, "fused": group["fused"]} if "fused" in group else saved_group
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": groups})
