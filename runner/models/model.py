"""The interface between the trainer and a model.

A batch is a tensor, or an arbitrarily nested tuple, list or mapping of tensors, or any object with a method
`to(device)`: see `runner.device.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from runner.device.batch import count_samples

if TYPE_CHECKING:
    from torchmetrics import Metric


class Model(nn.Module):
    """A network together with its loss and its metrics: what the trainer trains and evaluates.

    A subclass defines `forward(batch) -> outputs` and `loss(outputs, batch)`; everything else has a default. A model
    with several optimizers, or with a step other than forward, loss and backward, defines `training_step` instead of
    `loss`.

    Attributes:
        training_step: None, or a method `training_step(state)` of the subclass, which the training loop then calls
            instead of its own forward, loss and backward. The method leaves the gradients of its losses, multiplied by
            `state.loss_scale`, in `.grad` and returns the loss. The loop then steps every optimizer once, so a GAN
            computes the gradients of both losses first, each for its own network only. Gradients are averaged over the
            ranks afterwards, so all ranks must leave gradients for the same parameters.
        manual_optimization: whether `training_step` steps the optimizers in `state.optimizers` itself, with
            `optimizer.step()`, as often and in whatever order it needs. Each such call first averages that
            optimizer's gradients over the ranks, and unscales them with amp_fp16, which allows each optimizer one
            step per batch. All ranks must make the same steps. A run on one rank may pass a closure, as LBFGS needs.
            `training_step` also zeroes gradients between its steps; gradients do not carry over from one batch to the
            next. A batch advances time by one batch, whatever the number of optimizer steps.
        slice_batch: None, or a method `slice_batch(batch, start, end)` of the subclass, which returns samples `start`
            to `end - 1` of a batch: a microbatch of `grad_accum` or `microbatch_size`. Without it these are views of
            its tensors, parts of its lists, and `x[start:end]` of an object x with a method `to(device)`.
        validate: None, or a method `validate(batch) -> (outputs, targets)` of the subclass, the earlier form of
            `eval_forward`. In evaluation the metrics then see the targets that it returns.

    Raises:
        TypeError: the subclass has no `forward`, or neither `loss` nor `training_step`, or `manual_optimization`
            without `training_step`.
    """

    training_step: Callable[..., Any] | None = None
    manual_optimization: ClassVar[bool] = False
    slice_batch: Callable[..., Any] | None = None
    validate: Callable[..., Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        cls = type(self)
        if cls.forward is nn.Module.forward:
            raise TypeError(f"{cls.__name__} has no forward: define forward(self, batch), which returns the outputs")
        if cls.loss is Model.loss and cls.training_step is None:
            raise TypeError(f"{cls.__name__} has no loss: define loss(self, outputs, batch), or training_step")
        if cls.manual_optimization and cls.training_step is None:
            raise TypeError(f"{cls.__name__} has manual_optimization=True: define training_step(self, state)")
        self._validated: tuple[Any, Any] | None = None

    def loss(self, outputs: Any, batch: Any) -> Tensor | dict[str, Tensor]:
        """Return the loss of a batch: a zero-dimensional tensor, or a dict of zero-dimensional tensors.

        Training minimizes the entry `'total'` of a dict, or the sum of all entries if it has no 'total'. The loss is a
        mean over `loss_weight(batch)` items, by which microbatches and ranks are weighted.

        Args:
            outputs: the outputs that `forward(batch)` returned.
            batch: this rank's batch or microbatch.

        Raises:
            TypeError: the loss is needed, but the subclass defines only `training_step`.
        """
        raise TypeError(f"{type(self).__name__} has no loss: define loss(self, outputs, batch) to evaluate it")

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs for a batch in evaluation and prediction.

        Args:
            batch: this rank's batch.
            outputs: the outputs of `forward` for this batch, if it has already run (for training metrics).
        """
        if outputs is not None:
            return outputs
        if self.validate is None:
            return self(batch)
        outputs, targets = self.validate(batch)
        self._validated = (batch, targets)
        return outputs

    def metrics(self, train: bool) -> Mapping[str, Metric]:
        """Return new metrics by name, as a dict or a `MetricCollection`; by default an empty dict.

        In an evaluation the name `'loss'` is reserved for the model's own loss, which is always measured.

        Args:
            train: whether the metrics are for training batches rather than for an evaluation.
        """
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Update one metric with a batch, by default with `metric.update(outputs, batch[1])`.

        Args:
            batch: this rank's batch.
            outputs: the outputs of `forward` or `eval_forward` for the batch.
            metric: one of the metrics that `metrics` returned.
        """
        metric.update(outputs, self._targets(batch))

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in this rank's batch.

        By default this is the size of dimension 0 of the first tensor, or, if samples are in lists, the length of
        those lists: `([image, image], [boxes, boxes])` holds two. For an object with a method `to(device)` it is
        `len()`. An ambiguous first batch is refused.

        Raises:
            TypeError: the batch contains no tensor with a dimension, and no such object with a length.
        """
        return count_samples(batch)

    def num_tokens(self, batch: Any) -> int:
        """Return the number of tokens in this rank's batch; 0 by default, for data without tokens.

        Each rank assumes that samples on the other ranks have the same number of tokens as its own. With several ranks,
        count tokens from the shape that all batches share, including padding.
        """
        return 0

    def loss_weight(self, batch: Any) -> int | Tensor:
        """Return the number of items that the loss of this batch averages over: by default its number of samples.

        A tensor must be zero-dimensional and on the batch's device. These weights are used to average gradients over
        microbatches and ranks, and losses over the batches of an evaluation.
        """
        return self.num_samples(batch)

    @property
    def loss_averages(self) -> Literal["samples", "weights", "unknown"]:
        """The items that the loss averages over: 'samples', or those that `loss_weight` counts ('weights').

        By default it is 'unknown' for a model that does not override `loss_weight`. Such a loss is treated as a mean
        over samples, and checked on the first batch.
        """
        return "unknown" if type(self).loss_weight is Model.loss_weight else "weights"

    def flops_per_batch(self, batch: Any) -> float | None:
        """Return the floating-point operations of one training step on this batch, or None if unknown."""
        return None

    def predictions(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Return the tensors that prediction records for a batch, by column name, with one row per sample.

        By default these are the outputs, under their own names or as `output`, and `batch[1]` as `target` if it is a
        tensor.

        Args:
            batch: this rank's batch.
            outputs: the outputs of `eval_forward` for the batch.
        """
        has_target = isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[1], Tensor)
        targets = {"target": self._targets(batch)} if has_target else {}
        return {**targets, **(outputs if isinstance(outputs, Mapping) else {"output": outputs})}

    def _targets(self, batch: Any) -> Any:
        validated = self._validated
        if isinstance(batch, Mapping) and validated is None:
            raise TypeError(f"{type(self).__name__}: a batch that is a mapping has no batch[1]; override update_metric")
        return validated[1] if validated is not None and validated[0] is batch else batch[1]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within the `with` block, then restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def own_forward_methods(model: nn.Module) -> list[str]:
    """Return the names of the methods other than `forward` that a model's class overrides to call its layers."""
    names = ("eval_forward", "validate")
    return [name for name in names if getattr(type(model), name, None) is not getattr(Model, name, None)]
