"""Check the first loss of a run: that it has a gradient and is a mean over samples, and that the outputs fit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.core.state import State
from runner.device.batch import slice_samples, split, tensors
from runner.distributed.collectives import any_rank
from runner.distributed.ranks import get_data_parallel_size, get_global_rank
from runner.failures.errors import wrong_argument
from runner.models.classification import ClassificationModel
from runner.models.entries import pick_value
from runner.models.loss import total_of
from runner.models.model import Model, in_eval_mode
from runner.models.supervised import SupervisedModel, squeeze_column

log = logging.getLogger("runner")

_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss, nn.KLDivLoss),
)
_ELEMENTWISE_FUNCTIONS = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.kl_div),
)
"""Losses of torch that compare each output with its target, and broadcast those of different shapes."""

MOST_SAMPLES = 8  # samples to compare when a microbatch holds a single one


def check_loss(state: State, loss: Any, name: str, trains: bool) -> None:
    """Check that a loss can be logged, averaged and, if needed, minimized, and that the outputs behind it fit.

    Args:
        state: the run, with the model that the loss belongs to.
        loss: the loss to check.
        name: the method that returned it: 'loss' or 'training_step'.
        trains: whether training needs its gradient.

    Raises:
        TypeError: the loss is neither a zero-dimensional tensor nor a dict of such tensors.
        ValueError: the loss has no gradient, a classifier has outputs for another number of classes, or outputs and
            targets of a loss that compares them one by one have different shapes.
    """
    model = state.unwrapped_model
    source = f"{type(model).__name__}.{name}"
    named = {repr(entry): part for entry, part in loss.items()} if isinstance(loss, dict) else {}
    for entry, part in (named or {"a loss": loss}).items():
        if not isinstance(part, Tensor) or part.ndim:
            kind = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"type {type(part).__name__}"
            allowed = "a zero-dimensional tensor, such as losses.mean(), or a dict of such tensors"
            raise TypeError(f"{source} returned {entry} of {kind}: it must be {allowed}")
    if trains and name == "loss" and not total_of(loss).requires_grad:
        remedy = "without no_grad(), detach(), item() or argmax(), and leave parameters that require a gradient"
        raise ValueError(f"{source} returned a loss without a gradient: compute it from the outputs {remedy}")
    if name == "loss":
        _check_outputs(model, state.outputs)
        _check_targets(model, state.outputs, state.microbatch if trains else state.batch)


def _check_outputs(model: Model, outputs: Any) -> None:
    """Check that a classifier returns a logit for each of its classes; warn if it returns probabilities instead.

    Args:
        model: the model; only a `ClassificationModel` is checked.
        outputs: its outputs, of which only the shape `(N, C)` and the operation that made them are read.

    Raises:
        ValueError: C is not `num_classes`.
    """
    if not (isinstance(model, ClassificationModel) and isinstance(outputs, Tensor) and outputs.ndim == 2):
        return
    if outputs.shape[1] != model.num_classes:
        source = f"{type(model.module).__name__} returned as {tuple(outputs.shape)}"
        reason = f"must equal the second size of the outputs, which {source}"
        raise wrong_argument("num_classes", model.num_classes, reason)
    loss_fn = getattr(model.loss_fn, "func", model.loss_fn)  # `func` of a partial
    takes_logits = loss_fn is F.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss)
    is_softmax = outputs.grad_fn is not None and outputs.grad_fn.name() == "SoftmaxBackward0"
    if takes_logits and is_softmax and get_global_rank() == 0:
        log.warning("the outputs are probabilities, but the loss takes logits: leave out the model's softmax")


def _check_targets(model: Model, outputs: Any, batch: Any) -> None:
    """Check that outputs have the shape of the targets if torch's loss would compare each output with all targets.

    Raises:
        ValueError: the shapes differ.
    """
    if not isinstance(model, SupervisedModel) or type(model).loss is not SupervisedModel.loss:
        return
    function = getattr(model.loss_fn, "func", model.loss_fn)  # `func` of a partial
    is_elementwise = isinstance(function, _ELEMENTWISE) or function in _ELEMENTWISE_FUNCTIONS
    targets = pick_value(batch, model.targets, "targets")
    if not (is_elementwise and isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return
    outputs = squeeze_column(outputs, targets)
    if outputs.shape != targets.shape:
        shapes = f"{tuple(targets.shape)}, but the outputs of {type(model.module).__name__} {tuple(outputs.shape)}"
        name = getattr(function, "__name__", type(function).__name__)
        reason = f"have the shape {shapes}, which {name} would broadcast; return outputs in the shape of the targets"
        raise wrong_argument("targets", model.targets, reason)


def warn_of_split_means(state: State, lengths: Iterable[int | None], loss: Callable[..., Any], part: Any) -> bool:
    """Warn if the loss of a batch is not the mean of the losses of its halves, weighted by their samples. All ranks.

    A mean over n samples, split into halves of n1 and n2, equals (n1 * loss1 + n2 * loss2) / n; a relative difference
    above the square root of the machine epsilon counts. The check skips losses that draw random numbers and batches
    that cannot be split. It waits for the device, and leaves the model, its modes, its buffers and the generators
    unchanged.

    Args:
        state: the run, with the outputs of `part`.
        lengths: the number of batches of each evaluation.
        loss: returns the loss of outputs and a batch.
        part: the batch or microbatch to compare with its halves; if it is a single sample, up to `MOST_SAMPLES` of the
            batch are compared.

    Returns:
        False if the run splits nothing, so that the check is not needed; otherwise True.
    """
    splits = get_data_parallel_size() > 1 or state.grad_accum > 1 or state.microbatch_size is not None
    if not splits and all(length == 1 for length in lengths):
        return False
    model = state.unwrapped_model
    outputs = state.outputs
    samples = model.num_samples(part)
    if samples < 2:
        outputs = None
        part = split(state.batch, model.num_samples(state.batch), model.slice_batch, size=MOST_SAMPLES)[0][1]
        samples = model.num_samples(part)
    if any_rank(samples < 2):  # the loss may use a collective
        return True
    forward = state.precision.autocast(state.device)(model.forward)
    difference: tuple[float, float] | None = None
    with suppress(Exception), _preserve(model):  # whatever fails here fails in training as well, or does not matter
        difference = _compare(model, forward, loss, outputs, part, samples)
    if difference is not None and get_global_rank() == 0:
        log.warning(
            "%s: the loss of a batch is %.5g, but that of its halves, weighted by their samples, is %.5g: "
            "splitting into microbatches, ranks or batches of an evaluation changes the result. If the loss is a "
            "mean over something else, such as the targets that count, define loss_weight(batch), which returns their "
            "number. Replace a sum by a mean. A loss that compares samples with each other depends on the batch size",
            type(model).__name__,
            *difference,
        )
    return True


def _compare(
    model: Model, forward: Callable[..., Any], loss: Callable[..., Any], outputs: Any, batch: Any, samples: int
) -> tuple[float, float] | None:
    """Return the loss of a batch and the mean of the losses of its halves, if they differ.

    `forward` is called only if there are no outputs, or if they cannot be split, for example because they contain the
    loss.
    """
    halves = [part for _, part in split(batch, samples, model.slice_batch, parts=2)]
    sizes = [model.num_samples(half) for half in halves]
    if outputs is not None and all(tensor.ndim and tensor.size(0) == samples for tensor in tensors(outputs)):
        bounds = [(0, sizes[0]), (sizes[0], samples)]
        parts = [(slice_samples(outputs, *ends, samples), half) for ends, half in zip(bounds, halves, strict=True)]
    else:
        outputs = forward(batch)
        parts = [(forward(half), half) for half in halves]
    totals: list[Tensor] = [total_of(loss(*pair)) for pair in ((outputs, batch), (outputs, batch), *parts)]
    tolerance = torch.finfo(totals[0].dtype).eps ** 0.5
    whole, repeated, *half_losses = [float(total) for total in totals]
    mean = sum(size * half_loss for size, half_loss in zip(sizes, half_losses, strict=True)) / samples
    is_close = abs(whole - mean) <= tolerance * max(abs(whole), *map(abs, half_losses))
    return None if whole != repeated or is_close or not math.isfinite(whole) else (whole, mean)


@contextmanager
def _preserve(model: Model) -> Iterator[None]:
    """Replace the model's buffers by copies within the `with` block, then restore attributes, modes and generators.

    Writing to the buffers themselves would break the backward pass of this batch, which comes later.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    device = next(model.parameters()).device
    try:
        for module, values in attributes:
            buffers = values["_buffers"].items()
            vars(module)["_buffers"] = {name: None if tensor is None else tensor.clone() for name, tensor in buffers}
        with torch.no_grad(), in_eval_mode(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)
