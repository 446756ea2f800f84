"""Changes to a model at INIT, which are reproducible and logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from runner import Algorithm, Model, State, get_global_rank, replace_modules, stream_seed
from runner.failures.errors import wrong_argument
from runner.models.surgery import Policy, Selector

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
"""Algorithms that change layers inside blocks, and therefore run before those that wrap blocks or the whole model."""


def operate(
    algorithm: Algorithm,
    state: State,
    policies: Mapping[Selector, Policy],
    target: str,
    allow_no_match: bool = False,
    recurse_on_replaced: bool = False,
) -> dict[str, nn.Module]:
    """Replace modules of the run's model, and return the replacements by name.

    New weights depend only on the seed and on the algorithm's config key. The model and its optimizers, if they exist
    already, are changed in place; a `Model` that replaces the whole model is stored in the state. `target` names the
    modules that the policies select, for the error message.
    """
    # New weights are drawn on the CPU, so that they are the same on all devices.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream_seed(state.rank_zero_seed, algorithm.config_key))
        replaced = replace_modules(state.unwrapped_model, policies, state.optimizers, recurse_on_replaced)
    root = replaced.get("", state.unwrapped_model)
    if not isinstance(root, Model):
        raise TypeError(f"{type(root).__name__} cannot replace the whole model: it must be a runner.Model")
    state.unwrapped_model = root
    state.model = root
    report(algorithm, state, [*replaced], target, allow_no_match)
    return replaced


def report(algorithm: Algorithm, state: State, names: list[str], target: str, allow_no_match: bool = False) -> None:
    """Log on rank 0 the modules that an algorithm changed; without any, raise a ValueError unless that is allowed."""
    name = type(algorithm).__name__
    if not names and not allow_no_match:
        classes = ", ".join(sorted({type(module).__name__ for module in state.unwrapped_model.modules()}))
        raise ValueError(
            f"allow_no_match=False: {name} found no {target} in the model, which is made of {classes}; "
            f"remove {name} or set allow_no_match=True"
        )
    if get_global_rank() == 0:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        log.info("%s changed %d of the model's parts%s", name, len(names), f": {shown}" if names else "")


def resolve_width(name: str, value: float, whole: int) -> int:
    """Return a width, at least 1, from a number or from a fraction of another width."""
    if isinstance(value, bool) or not value > 0 or (value >= 1 and value != int(value)):
        raise wrong_argument(name, value, "must be a whole number, at least 1, or a fraction above 0 and below 1")
    return max(1, round(value * whole)) if value < 1 else int(value)
