"""The metrics that the trainer computes and logs itself, in ordinary callbacks that run before the user's.

Logs:
    loss/train/total, loss/train/{name}: mean loss of this rank's batch, in the loss's unit.
    metrics/train/{name}: a training metric over the epoch and all ranks.
    loss/{evaluator}/total, metrics/{evaluator}/{name}: loss and metrics over the evaluator's data and all ranks.
    time/epoch, time/batch, time/sample, time/token: counts so far, over all ranks.
    time/{evaluator}/sample: training samples so far, at each evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.hooks import Callback
from runner.core.logger import Logger
from runner.core.state import State
from runner.distributed.collectives import all_reduce_sum
from runner.distributed.ranks import get_data_parallel_group
from runner.libraries.torchmetrics import empty
from runner.libraries.typed import is_mapping, is_sequence
from runner.models.model import Model
from runner.training.metric_direction import sounds_like_loss

MOST_TERMS = 128  # zero-dimensional tensors that a mean collects before it sums them in one operation


class TrainMetrics(Callback):
    """Updates the model's training metrics with each microbatch, and computes and resets them at each EPOCH_END."""

    def after_loss(self, state: State, logger: Logger) -> None:
        counts = not state.batch_is_padding
        state.is_consistent = False
        update_metrics(state.unwrapped_model, state.microbatch, state.outputs, state.train_metrics, counts)

    def epoch_end(self, state: State, logger: Logger) -> None:
        state.train_metric_values = {name: metric.compute() for name, metric in state.train_metrics.items()}
        for metric in state.train_metrics.values():
            metric.reset()
        logger.log_metrics(scalars("metrics/train", state.train_metric_values))


class TrainerLog(Callback):
    """Logs the loss of each batch, the training progress, and the results of evaluators."""

    def batch_end(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        metrics: dict[str, Any] = {
            "loss/train/total": state.total_loss,
            "time/epoch": float(now.epoch),
            "time/batch": float(now.batch),
            "time/sample": float(now.sample),
        }
        if now.token:
            metrics["time/token"] = float(now.token)
        for name, value in state.loss_parts.items():
            metrics[f"loss/train/{name}"] = value
        logger.log_uncopied(metrics)

    def eval_end(self, state: State, logger: Logger) -> None:
        label = state.dataloader_label or ""
        # Charts downsample per-batch metrics, so evaluations need an x-axis that is logged at exactly their steps.
        metrics = {f"time/{label}/sample": float(state.timestamp.sample)}
        for name, value in state.eval_metric_values[label].items():
            metrics |= scalars(f"loss/{label}/total" if name == "loss" else f"metrics/{label}/{name}", value)
        logger.log_metrics(metrics)


def make_metrics(model: Model, train: bool, device: torch.device) -> dict[str, Any]:
    """Return new metrics of a model by name, on a device. Their `state_dict()` includes their accumulators.

    Raises:
        TypeError: the model returned something other than metrics by name.
        ValueError: an evaluation metric is called 'loss', the name of the model's own loss.
    """
    returned: Any = model.metrics(train)
    metrics: dict[str, Any] | None = dict(returned.items()) if hasattr(returned, "items") else None
    source = f"{type(model).__name__}.metrics(train={train})"
    if metrics is None or not all(isinstance(item, nn.Module) and hasattr(item, "sync") for item in metrics.values()):
        allowed = "a dict of torchmetrics by name, such as {'accuracy': MulticlassAccuracy(10)}, or a MetricCollection"
        raise TypeError(f"{source} returned {returned!r}: must be {allowed}")
    for metric in metrics.values():
        metric.to(device).persistent(True)
        for part in metric.modules():
            if hasattr(part, "process_group"):
                part.process_group = get_data_parallel_group()
    if "loss" in metrics and not train and type(model).loss is not Model.loss:
        raise ValueError(f"{source} has a metric 'loss': the model's loss is logged under that name; rename the metric")
    return metrics


def scalars(key: str, value: Any) -> dict[str, Any]:
    """Return a metric's value as scalars: a single one as `key`, several (one per class, say) as `key/{part}`.

    Elements of a sequence or tensor are numbered from 0; those of a mapping keep their names.
    """
    if is_mapping(value):
        parts = value.items()
    elif is_sequence(value) or (isinstance(value, Tensor) and value.numel() != 1):
        parts = enumerate(value)
    else:
        return {key: value}
    return {name: scalar for part, item in parts for name, scalar in scalars(f"{key}/{part}", item).items()}


def update_metrics(model: Model, batch: Any, outputs: Any, metrics: Mapping[str, Any], counts: bool) -> None:
    """Update metrics with a batch.

    Without `counts`, the batch is padding on a rank without samples: a metric without updates learns its shapes from
    it, and stays empty.
    """
    for metric in metrics.values():
        if counts:
            model.update_metric(batch, outputs, metric)
        elif not any(getattr(part, "update_called", False) for part in metric.modules()):
            model.update_metric(batch, outputs, metric)
            empty(metric)


def lower_is_better(name: str, metric: Any) -> bool:
    """Return whether smaller values of a metric are better, judging by its name or its `higher_is_better`."""
    return sounds_like_loss(name) or getattr(metric, "higher_is_better", None) is False


class WeightedMean:
    """A weighted mean over batches and ranks, accumulated on the device."""

    def __init__(self, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._terms: list[Tensor] = []  # weighted values that are not in the total yet
        self._total = torch.zeros((), dtype=dtype, device=device)
        self._weight = torch.zeros_like(self._total)
        self._host_weight: float = 0  # sum of the weights given as numbers

    def add(self, value: Tensor, weight: float | Tensor) -> None:
        """Add a zero-dimensional value with its weight."""
        self._terms.append(value * weight)
        if len(self._terms) == MOST_TERMS:
            self._add_up()
        if isinstance(weight, Tensor):
            self._weight += weight
        else:
            self._host_weight += weight

    def compute(self) -> Tensor:
        """Return the mean over all ranks. Call it on all ranks."""
        self._add_up()
        sums = all_reduce_sum(torch.stack((self._total, self._weight + self._host_weight)))
        return sums[0] / sums[1]

    def _add_up(self) -> None:
        if self._terms:  # a rank may have no samples
            self._total += torch.stack(self._terms).sum(dtype=self._total.dtype)
            self._terms.clear()
