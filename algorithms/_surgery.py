"""How algorithms change a model at INIT: reproducibly, and never without saying so."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from runner import Algorithm, Model, State, get_global_rank, replace_modules, stream_seed
from runner.surgery import Policy, Selector

log = logging.getLogger("runner")

LAYER_SURGERY = (
    "ALiBi",
    "BlurPool",
    "Factorize",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GyroDropout",
    "LogitSoftcap",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "NGramEmbedding",
    "QKNorm",
    "RotaryEmbedding",
    "SqueezeExcite",
    "ValueEmbedding",
    "WeightStandardization",
)
"""Algorithms that change what is inside of blocks, and so run before those that wrap blocks or the whole model."""


def operate(
    algorithm: Algorithm,
    state: State,
    policies: Mapping[Selector, Policy],
    wanted: str,
    allow_no_match: bool = False,
    recurse_on_replaced: bool = False,
) -> dict[str, nn.Module]:
    """Return what `replace_modules` put into the run's model, by name; what is drawn is a function of (seed, key).

    Args:
        algorithm: whose change it is.
        state: at INIT. The model, and what optimizers exist, are changed in place; a `Model` that stands in for the
            whole is put into the state.
        policies: see `replace_modules`.
        wanted: what the policies look for, to tell the user.
        allow_no_match: whether a model without any is left as it is.
        recurse_on_replaced: see `replace_modules`.

    Raises:
        ValueError: there is none, and `allow_no_match` is False.
        TypeError: what stands in for the whole model is no `Model`.
    """
    # On the CPU, whatever the device, so that all devices start from the same weights.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(state.rank_zero_seed, algorithm.config_key))
        replaced = replace_modules(state.unwrapped_model, policies, state.optimizers, recurse_on_replaced)
    root = replaced.get("", state.unwrapped_model)
    if not isinstance(root, Model):
        raise TypeError(f"{type(root).__name__} cannot stand in for the whole model: it must be a runner.Model")
    state.unwrapped_model, state.model = root, root
    report(algorithm, state, [*replaced], wanted, allow_no_match)
    return replaced


def report(algorithm: Algorithm, state: State, names: list[str], wanted: str, allow_no_match: bool = False) -> None:
    """Say which modules an algorithm changed, on rank 0.

    Raises:
        ValueError: there is none, and `allow_no_match` is False.
    """
    name = type(algorithm).__name__
    if not names and not allow_no_match:
        classes = ", ".join(sorted({type(one).__name__ for one in state.unwrapped_model.modules()}))
        raise ValueError(
            f"allow_no_match=False: {name} found no {wanted} in the model, which is made of {classes}; "
            f"remove {name} or set allow_no_match=True"
        )
    if get_global_rank() == 0:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        log.info("%s changed %d of the model's parts%s", name, len(names), f": {shown}" if names else "")


def resolve_width(name: str, value: float, whole: int) -> int:
    """Return a width that is given as a number, or as a fraction of another; at least 1.

    Args:
        name: the argument's, to tell the user.
        value: a whole number from 1 on, or a fraction above 0 and below 1.
        whole: what a fraction is of.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, bool) or not value > 0 or (value >= 1 and value != int(value)):
        raise ValueError(f"{name}={value!r}: must be a whole number, at least 1, or a fraction above 0 and below 1")
    return max(1, round(value * whole)) if value < 1 else int(value)
