"""What torch's losses average over: samples, or, for cross entropy and negative log-likelihood, targets that count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OVER_TARGETS: dict[Any, Callable[..., Tensor]] = {
    nn.CrossEntropyLoss.forward: F.cross_entropy,
    nn.NLLLoss.forward: F.nll_loss,
    F.cross_entropy: F.cross_entropy,
    F.nll_loss: F.nll_loss,
}
_OPTIONS = ("weight", "ignore_index", "label_smoothing")


class TargetMean:
    """A loss of torch that is a mean over targets, and the weight of a batch in a mean over batches.

    Torch divides by the sum of the class weights of all targets but those of `ignore_index`. The mean is the same here,
    but 0 if nothing counts: a NaN for such a microbatch or rank would spoil the whole batch.

    Args:
        loss_fn: the loss: a module or a function of torch, or a `functools.partial` of the function.
        function: the function that it calls, `cross_entropy` or `nll_loss`.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], function: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn
        self._function = function

    def __call__(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of outputs (N, C, ...) for targets (N, ...) or probabilities (N, C, ...)."""
        if target.is_floating_point():
            return self.loss_fn(input, target)
        weight = torch.as_tensor(self.weight_of(target))
        total = self._function(input, target, reduction="sum", **self._options())
        return total / torch.where(weight > 0, weight, 1)

    def weight_of(self, target: Tensor) -> int | Tensor:
        """Return what the loss of some targets is divided by; a tensor is 0-dim, on their device.

        This is the number of targets that count, or the sum of their class weights. Probabilities all count as 1.
        """
        if target.is_floating_point():
            return target.numel() // target.shape[1]
        options = self._options()
        counts = target != options.get("ignore_index", -100)
        weight = options.get("weight")
        if weight is None:
            return counts.sum()
        return (weight.to(target.device)[target.where(counts, 0).long()] * counts).sum()

    @property
    def weighs(self) -> bool:
        """Whether classes have weights, or one is left out under a number other than torch's default."""
        options = self._options()
        return options.get("weight") is not None or options.get("ignore_index", -100) != -100

    def smoothed(self, smoothing: float) -> TargetMean | None:
        """Return the same mean with torch's own label smoothing; None if torch cannot smooth it, or does already."""
        options = self._options()
        if self._function is not F.cross_entropy or options.get("label_smoothing"):
            return None
        options["label_smoothing"] = smoothing
        return TargetMean(partial(F.cross_entropy, **options), F.cross_entropy)

    def _options(self) -> dict[str, Any]:
        options = _options_of(self.loss_fn)  # read each time, as a module's class weights move with it
        return {name: options[name] for name in _OPTIONS if name in options}


def read_loss(loss_fn: Any) -> TargetMean | Literal["samples"] | None:
    """Return what a loss function averages over, or None if it is no mean of torch's.

    Torch's other losses are means over samples, or over as many numbers for each sample. Their `pos_weight` and
    `weight` change these numbers, but not what the sum is divided by.
    """
    is_partial = isinstance(loss_fn, partial) and not loss_fn.args
    computes = type(loss_fn).forward if isinstance(loss_fn, nn.Module) else loss_fn.func if is_partial else loss_fn
    options = _options_of(loss_fn)
    is_mean = options.get("reduction", "mean") in ("mean", "batchmean") and not {"reduce", "size_average"} & {*options}
    if not is_mean or getattr(computes, "__module__", "") not in ("torch.nn.functional", "torch.nn.modules.loss"):
        return None
    function = _OVER_TARGETS.get(computes)
    return "samples" if function is None else TargetMean(loss_fn, function)


def _options_of(loss_fn: Any) -> Mapping[str, Any]:
    if isinstance(loss_fn, nn.Module):
        return {name: getattr(loss_fn, name) for name in (*_OPTIONS, "reduction") if hasattr(loss_fn, name)}
    return loss_fn.keywords if isinstance(loss_fn, partial) else {}
