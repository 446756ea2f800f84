"""Find out what torch's losses average over.

Most of torch's losses average over samples. Cross entropy and negative log-likelihood average over targets: with losses
l_i, targets y_i and class weights w, they are sum_i w[y_i] l_i / sum_i w[y_i], without the targets of `ignore_index`.
The loss of a batch is the sum of its parts' numerators over the sum of their divisors: a mean over the parts' losses,
weighted by their divisors. Source: torch's documentation of `nn.CrossEntropyLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.class_losses import FocalLoss, focal_loss

_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    nn.CrossEntropyLoss.forward: F.cross_entropy,
    nn.NLLLoss.forward: F.nll_loss,
    F.cross_entropy: F.cross_entropy,
    F.nll_loss: F.nll_loss,
    FocalLoss.forward: focal_loss,
}
_OPTIONS = ("weight", "ignore_index", "label_smoothing", "gamma")


class TargetMean:
    """One of torch's losses that are means over targets, and the weight of a batch in a mean over batches.

    The mean equals torch's, except that it is 0 if no target counts: torch's NaN for such a microbatch or rank would
    spoil the whole batch.

    Args:
        loss_fn: the loss: torch's module or function, or a `functools.partial` of the function.
        function: the function that the loss calls: `cross_entropy`, `nll_loss` or `focal_loss`.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], function: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn
        self._function = function

    def __call__(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of outputs `(N, C, ...)` for targets `(N, ...)` or probabilities `(N, C, ...)`."""
        if target.is_floating_point():
            return self.loss_fn(input, target)
        weight = torch.as_tensor(self.weight_of(target))
        # On CUDA, torch's own sum over targets (N, ...) depends on the order in which thread blocks finish.
        if target.ndim > 1:
            total = self._function(input, target, reduction="none", **self._options()).sum()
        else:
            total = self._function(input, target, reduction="sum", **self._options())
        return total / torch.where(weight > 0, weight, 1)

    def weight_of(self, target: Tensor) -> int | Tensor:
        """Return the divisor of the loss of some targets, as an int or as a 0-dim tensor on their device.

        This is the number of targets that count, or the sum of their class weights. Targets that are probabilities
        count as 1 each.
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
    def has_weights(self) -> bool:
        """Whether classes have weights, or `ignore_index` differs from torch's default, -100."""
        options = self._options()
        return options.get("weight") is not None or options.get("ignore_index", -100) != -100

    def with_smoothing(self, smoothing: float) -> TargetMean | None:
        """Return the same mean with torch's own label smoothing; None if torch cannot smooth it or already does."""
        options = self._options()
        if self._function is not F.cross_entropy or options.get("label_smoothing"):
            return None
        options["label_smoothing"] = smoothing
        return TargetMean(partial(F.cross_entropy, **options), F.cross_entropy)

    def _options(self) -> dict[str, Any]:
        options = _options_of(self.loss_fn)  # read at each call, because class weights move with the module
        return {name: options[name] for name in _OPTIONS if name in options}


def read_loss(loss_fn: Any) -> TargetMean | Literal["samples"] | None:
    """Return what a loss function averages over, or None if it is neither one of torch's means nor `FocalLoss`.

    Torch's other losses are means over samples, or over a fixed number of elements per sample. Their `pos_weight` and
    `weight` change the elements, but not the divisor.
    """
    is_partial = isinstance(loss_fn, partial) and not loss_fn.args
    origin = type(loss_fn).forward if isinstance(loss_fn, nn.Module) else loss_fn.func if is_partial else loss_fn
    options = _options_of(loss_fn)
    is_mean = options.get("reduction", "mean") in ("mean", "batchmean") and not {"reduce", "size_average"} & {*options}
    function = _FUNCTIONS.get(origin)
    is_known = function or getattr(origin, "__module__", "") in ("torch.nn.functional", "torch.nn.modules.loss")
    if not is_mean or not is_known:
        return None
    return "samples" if function is None else TargetMean(loss_fn, function)


def smoothing_of(loss_fn: Any) -> float:
    """Return the label smoothing of a loss; 0 if it does not smooth, or is a custom function."""
    return float(_options_of(loss_fn).get("label_smoothing") or 0)


def _options_of(loss_fn: Any) -> Mapping[str, Any]:
    if isinstance(loss_fn, nn.Module):
        return {name: getattr(loss_fn, name) for name in (*_OPTIONS, "reduction") if hasattr(loss_fn, name)}
    return loss_fn.keywords if isinstance(loss_fn, partial) else {}
