"""A model made of a plain `nn.Module` and a loss function, for regression, multi-label, segmentation and the like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.models.entries import Entries, Key, check_entries, pick, pick_entry, pick_value
from runner.models.model import Model
from runner.models.target_mean import TargetMean, read_loss

if TYPE_CHECKING:
    from torchmetrics import Metric


class SupervisedModel(Model):
    """A plain module with a loss function and metrics that compare its outputs with the batch's targets.

    `inputs` and `targets` select entries of the batch: one position or key, such as 0 or 'image'; several, which become
    positional arguments; or a mapping from argument names to entries, which become keyword arguments.

    Outputs `(N, ..., 1)` for targets `(N, ...)` are treated as `(N, ...)`, so that a network with one output unit fits
    a column of numbers. Integer and boolean targets of the outputs' shape are cast to floating point for the loss
    function, as binary cross entropy requires; the metrics see them unchanged.

    Args:
        module: called with the inputs, returns the outputs. If it has a method `flops_per_sample(shape)`, the model
            reports its floating-point operations.
        loss_fn: `loss_fn(outputs, targets)` returns a zero-dimensional tensor, or a dict of such tensors: a mean over
            samples. Torch's own losses may average over something else: their `weight`, `ignore_index` and `reduction`
            are read, and microbatches, ranks and batches are weighted accordingly; see `loss_weight`.
        metrics: torchmetrics by name, or a `MetricCollection`; training and each evaluation get separate copies. For
            torchmetrics' own classes, `validate_args=False` saves one device sync per batch.
        inputs: entries of the batch for `module`.
        targets: entries of the batch for `loss_fn` and the metrics, after the outputs.

    Raises:
        TypeError: `module`, `loss_fn` or an entry of `metrics` has the wrong type.
        ValueError: `inputs` or `targets` names no entry.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Any],
        metrics: Mapping[str, Any] | None = None,
        inputs: Entries = 0,
        targets: Entries = 1,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise wrong_argument("module", module, "must be an nn.Module, such as nn.Linear(4, 1)", TypeError)
        allowed = "must be a function of (outputs, targets), such as nn.MSELoss() or nn.functional.mse_loss"
        refuse_if(not callable(loss_fn) or isinstance(loss_fn, type), "loss_fn", loss_fn, allowed, TypeError)
        self.module = module
        self.loss_fn = loss_fn
        mean = read_loss(loss_fn)
        self._mean = mean if isinstance(mean, TargetMean) else None
        self._averages: Literal["samples", "weights", "unknown"]
        self._averages = "unknown" if mean is None else "weights" if self._mean is not None else "samples"
        self.inputs = check_entries("inputs", inputs)
        self.targets = check_entries("targets", targets)
        self._templates = check_metrics(metrics)
        self._sample_flops: tuple[Any, float] = None, 0.0  # shape and FLOPs of a sample

    def forward(self, batch: Any) -> Any:
        """Return the outputs of the module for the inputs of a batch."""
        module: Any = self._modules["module"]  # self.module takes 0.5 us longer per batch
        if isinstance(self.inputs, Key):
            return module(pick_entry(batch, self.inputs, "inputs"))
        positional, named = pick(batch, self.inputs, "inputs")
        return module(*positional, **named)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return `loss_fn(outputs, targets)`."""
        positional, named = pick(batch, self.targets, "targets")
        if len(positional) == 1 and isinstance(positional[0], Tensor) and isinstance(outputs, Tensor):
            target = positional[0]
            outputs = squeeze_column(outputs, target)
            has_same_shape = target.ndim == outputs.ndim and target.shape == outputs.shape
            if has_same_shape and not (target.is_floating_point() or target.is_complex()):
                positional = [target.to(outputs.dtype)]
        mean = self._mean
        loss_fn = self.loss_fn
        if mean is not None and mean.loss_fn is loss_fn:  # no algorithm has replaced it
            return mean(outputs, *positional, **named)
        return loss_fn(outputs, *positional, **named)

    def loss_weight(self, batch: Any) -> int | Tensor:
        """Return the number of items that the loss averages over.

        For torch's cross entropy and negative log-likelihood it is the number of targets that count, or the sum of
        their class weights; for every other loss, the number of samples.
        """
        mean = self._mean
        if mean is None or type(self).loss is not SupervisedModel.loss:
            return self.num_samples(batch)
        positional, named = pick(batch, self.targets, "targets")
        return mean.weight_of(*positional, **named)

    @property
    def loss_averages(self) -> Literal["samples", "weights", "unknown"]:
        """The items that the loss averages over; 'unknown' if neither torch nor a `loss_weight` defines them."""
        if type(self).loss_weight is not SupervisedModel.loss_weight:
            return "weights"
        return self._averages if type(self).loss is SupervisedModel.loss else "unknown"

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return new copies of the metrics."""
        return {name: copy.deepcopy(metric) for name, metric in self._templates.items()}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Update one metric with the outputs and the targets of a batch.

        Raises:
            ValueError: the metric does not fit the outputs and targets.
        """
        positional, named = self._metric_targets(batch, outputs)
        if len(positional) == 1 and isinstance(outputs, Tensor):
            outputs = squeeze_column(outputs, positional[0])
        update_checked(metric, outputs, positional, named)

    def flops_per_batch(self, batch: Any) -> float | None:
        """Return the floating-point operations of the forward and backward pass, or None if unknown.

        They are known if the module has `flops_per_sample(shape)` and takes a single tensor.
        """
        flops_per_sample = getattr(self.module, "flops_per_sample", None)
        if flops_per_sample is None or not isinstance(self.inputs, Key):
            return None
        inputs = pick_value(batch, self.inputs, "inputs")
        shape = inputs.shape[1:]
        if shape != self._sample_flops[0]:
            self._sample_flops = shape, flops_per_sample(shape)
        return len(inputs) * self._sample_flops[1]

    def predictions(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Return the outputs, under their own names or as `output`, and the targets if the batch has them."""
        columns = {**outputs} if isinstance(outputs, Mapping) else {"output": outputs}
        try:
            target = pick_value(batch, self.targets, "targets")
        except ValueError:  # data to predict need not have targets
            return columns
        targets = target if isinstance(target, Mapping) else {"target": target}
        return {**{name: value for name, value in targets.items() if isinstance(value, Tensor)}, **columns}

    def without_targets(self, batch: Any) -> Any:
        """Return a batch as inference sees it: only the inputs of a mapping, any other batch unchanged."""
        if not isinstance(batch, Mapping):
            return batch
        keys = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        return {key: batch[key] for key in ([keys] if isinstance(keys, int | str) else keys)}

    def _metric_targets(self, batch: Any, outputs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the targets for a metric, as positional and keyword arguments."""
        if self._validated is not None and self._validated[0] is batch:
            return [self._validated[1]], {}
        return pick(batch, self.targets, "targets")


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metrics in a plain dict by name, so that they do not become submodules of the model.

    Raises:
        TypeError: an entry is not a torchmetrics metric.
    """
    named = {} if metrics is None else dict(metrics.items()) if hasattr(metrics, "items") else None
    allowed = "must be torchmetrics by name, such as {'f1': torchmetrics.F1Score(task='multiclass', num_classes=10)}"
    if named is None:
        raise wrong_argument("metrics", metrics, allowed, TypeError)
    for name, metric in named.items():
        if not isinstance(metric, nn.Module) or not hasattr(metric, "sync"):
            missing = "; it lacks _target_" if isinstance(metric, Mapping) and "_target_" not in metric else ""
            raise wrong_argument("metrics", {name: metric}, allowed + missing, TypeError)
    return named


def update_checked(metric: Any, outputs: Any, targets: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Update a metric with outputs and targets.

    Raises:
        ValueError: the metric rejects them; the message describes both and quotes the metric's error.
    """
    try:
        metric.update(outputs, *targets, **named)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        target_shapes = ", ".join(_describe(target) for target in (*targets, *named.values()))
        raise ValueError(
            f"metrics: {type(metric).__name__} does not fit outputs of {_describe(outputs)} and targets of "
            f"{target_shapes}: {reason}. Choose another metric, or other arguments for it"
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    return f"type {type(value).__name__}"


def squeeze_column(outputs: Tensor, target: Any) -> Tensor:
    """Return outputs `(N, ..., 1)` as `(N, ...)` if that is the shape of the target, and otherwise unchanged."""
    is_column = isinstance(target, Tensor) and outputs.ndim == target.ndim + 1 and outputs.shape[-1] == 1
    return outputs.squeeze(-1) if is_column and outputs.shape[:-1] == target.shape else outputs
