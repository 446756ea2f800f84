"""Step all parameters in one kernel, if the optimizer supports it and the user has not decided otherwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.distributed.sharding import like_parameters
from runner.optim.muon import Muon
from runner.optim.param_groups import check_groups

FUSED = (SGD, Adam, AdamW, Muon)  # and no subclasses, which may step in another way
DEVICES = ("cuda",)


def fuse(optimizer: Optimizer, model: nn.Module, devices: Collection[str] = DEVICES) -> None:
    """Make an optimizer that has not stepped yet use torch's fused kernels, in each group that supports them.

    Torch itself never chooses them: with `fused=None` it takes a few kernels for each operation. They serve where all
    parameters are plain and floating-point on a GPU, and no module gives sparse gradients. What a user sets, `fused`
    or `foreach`, stays.
    """
    if type(optimizer) not in FUSED or optimizer.state or any(getattr(one, "sparse", False) for one in model.modules()):
        return
    for group in optimizer.param_groups:
        is_open = "fused" in group and group["fused"] is None and group["foreach"] is None
        if is_open and not group["differentiable"] and all(_is_plain(one, devices) for one in group["params"]):
            group["fused"] = True


def _is_plain(parameter: Tensor, devices: Collection[str]) -> bool:
    is_dense = parameter.layout is torch.strided and type(parameter) in (Tensor, nn.Parameter)
    return is_dense and parameter.is_floating_point() and parameter.device.type in devices


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a saved state into an optimizer, which keeps its shards and the kernels chosen for its own device.

    Raises:
        ValueError: the parameter groups differ.
    """
    check_groups(optimizer, saved)
    saved = like_parameters(optimizer, saved)
    groups: list[Mapping[str, Any]] = [
        {**its, "fused": group["fused"]} if "fused" in group else its
        for group, its in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": groups})
