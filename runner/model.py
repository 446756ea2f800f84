"""What the trainer asks of a model, and wrappers that make one of a plain ``nn.Module``.

A batch is a tensor, or a tuple, list or mapping of tensors, nested as one likes. The wrappers here take tuples
``(inputs, targets)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from runner.batch import count_samples

if TYPE_CHECKING:
    from torchmetrics import Metric

IGNORED_TARGET = -100  # the value at which torch's own cross entropy leaves a target out


class Model(nn.Module):
    """A network together with its loss and its metrics: what the trainer trains and evaluates.

    A subclass defines ``forward(batch) -> outputs`` and ``loss(outputs, batch)``; everything else has a default. With
    several optimizers, or any other step than forward, loss and backward, it defines ``training_step`` instead of
    ``loss``. A subclass may also define ``validate(batch) -> (outputs, targets)``, the earlier name of
    :meth:`eval_forward`; its targets are then the ones that the metrics see in evaluation.

    Attributes:
        training_step: None, or a method ``training_step(state)`` of the subclass, which the training loop then calls in
            place of its own forward, loss and backward.

    Raises:
        TypeError: the subclass lacks ``forward``, or both ``loss`` and ``training_step``.
    """

    training_step: ClassVar[Callable[..., Any] | None] = None

    def __init__(self) -> None:
        super().__init__()
        cls = type(self)
        if cls.forward is nn.Module.forward:
            raise TypeError(f"{cls.__name__} has no forward: define forward(self, batch), which returns the outputs")
        if cls.loss is Model.loss and cls.training_step is None:
            raise TypeError(
                f"{cls.__name__} has no loss: define loss(self, outputs, batch), or training_step(self, state)"
            )
        self._validated: tuple[Any, Any] | None = None

    def loss(self, outputs: Any, batch: Any) -> Tensor | dict[str, Tensor]:
        """Returns the loss of a batch: a 0-dim tensor, or a dict of them.

        Of a dict, ``'total'`` is what is minimized; without that key it is the sum. The loss is a mean over
        :meth:`loss_weight` things, so that microbatches and ranks can be weighed.

        Args:
            outputs: what ``forward(batch)`` returned.
            batch: this rank's batch or microbatch.

        Raises:
            TypeError: the subclass defines only ``training_step``, and something asks for its loss.
        """
        raise TypeError(f"{type(self).__name__} has no loss: define loss(self, outputs, batch) to evaluate it")

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Returns the outputs for a batch in evaluation and prediction.

        Args:
            batch: this rank's batch.
            outputs: what ``forward`` returned for this very batch, when it ran already (training metrics).
        """
        if outputs is not None:
            return outputs
        validate = getattr(self, "validate", None)
        if validate is None:
            return self(batch)
        outputs, targets = validate(batch)
        self._validated = (batch, targets)
        return outputs

    def metrics(self, train: bool) -> dict[str, Metric]:
        """Returns new metrics by name; none by default.

        Args:
            train: whether they are to measure the training batches or an evaluation.
        """
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        """Adds a batch to one metric, by default as ``metric.update(outputs, batch[1])``.

        Args:
            batch: this rank's batch.
            outputs: what ``forward`` or :meth:`eval_forward` returned for it.
            metric: one of those that :meth:`metrics` made.
        """
        metric.update(outputs, self._targets(batch))

    def num_samples(self, batch: Any) -> int:
        """Returns the number of samples in this rank's batch: the size of dimension 0 of its first tensor.

        Raises:
            TypeError: there is no tensor in the batch.
        """
        return count_samples(batch)

    def num_tokens(self, batch: Any) -> int:
        """Returns the number of tokens in this rank's batch; 0 by default, for data without tokens.

        Every rank takes the others' samples to have as many tokens as its own: with many ranks, let it depend on the
        shape that all batches share, not on what is padding.
        """
        return 0

    def loss_weight(self, batch: Any) -> int | Tensor:
        """Returns how many things the loss of this batch is a mean over: by default its samples.

        A tensor is 0-dim and on the batch's device. Accumulated gradients and those of several ranks are averaged with
        these weights.
        """
        return self.num_samples(batch)

    def flops_per_batch(self, batch: Any) -> float | None:
        """Returns the floating-point operations of one training step on this batch, or None where that is unknown."""
        return None

    def predictions(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Returns what prediction writes down of a batch: tensors by name of their column, a row for each sample.

        By default the outputs, under their own names or as ``output``; ``target`` as well, where ``batch[1]`` is one.

        Args:
            batch: this rank's batch.
            outputs: what :meth:`eval_forward` returned for it.
        """
        pair = isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[1], Tensor)
        targets = {"target": self._targets(batch)} if pair else {}
        return {**targets, **(outputs if isinstance(outputs, Mapping) else {"output": outputs})}

    def _targets(self, batch: Any) -> Any:
        validated = self._validated
        return validated[1] if validated is not None and validated[0] is batch else batch[1]


class ClassificationModel(Model):
    """A classifier made of a plain module: cross entropy as its loss, top-1 accuracy as its metric.

    Batches are ``(inputs, targets)``; the targets are class numbers ``(N,)`` int64 or probabilities ``(N, C)``.

    Args:
        module: maps inputs ``(N, ...)`` to logits ``(N, C)``.
        num_classes: C, at least 2.
        loss_fn: ``loss_fn(logits, targets)`` -> 0-dim tensor, a mean over samples; None is torch's ``cross_entropy``.

    Raises:
        ValueError: fewer than two classes.
    """

    def __init__(
        self, module: nn.Module, num_classes: int, loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes!r}: a classifier needs at least 2 classes")
        self.module = module
        self.num_classes = num_classes
        self.loss_fn = F.cross_entropy if loss_fn is None else loss_fn

    def forward(self, batch: Any) -> Tensor:
        """Returns the logits ``(N, C)``."""
        return self.module(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns ``loss_fn(outputs, targets)``."""
        return self.loss_fn(outputs, batch[1])

    def metrics(self, train: bool) -> dict[str, Metric]:
        """Returns ``MulticlassAccuracy``: the share of samples whose largest logit is their class."""
        from runner.torchmetrics_import import import_torchmetrics

        accuracy = import_torchmetrics().classification.MulticlassAccuracy
        # Validating the arguments would read the targets back from the device at every batch.
        return {"MulticlassAccuracy": accuracy(self.num_classes, average="micro", validate_args=False)}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        """Adds a batch to one metric; targets that are probabilities count as their most probable class."""
        targets = self._targets(batch)
        metric.update(outputs, targets.argmax(dim=1) if targets.is_floating_point() else targets)

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Returns ``target``, the most probable class as ``prediction`` ``(N,)``, and ``probabilities`` ``(N, C)``."""
        found = {"prediction": outputs.argmax(dim=1), "probabilities": outputs.float().softmax(dim=1)}
        return super().predictions(batch, found)


class LanguageModel(Model):
    """A language model made of a plain module: the mean cross entropy of the next token.

    Batches are ``(inputs, targets)``, both ``(N, T)`` int64; targets of -100 are left out. The loss also takes targets
    that are probabilities ``(N, T, V)``, which algorithms put in their place.

    Args:
        module: maps inputs ``(N, T)`` to logits ``(N, T, V)``. Where it has a method ``flops_per_token(context)``, the
            model knows its floating-point operations.
        metric_name: what the evaluation metric is called; ``'BitsPerByte'`` where the tokens are bytes.
    """

    def __init__(self, module: nn.Module, metric_name: str = "BitsPerToken") -> None:
        super().__init__()
        self.module = module
        self.metric_name = metric_name

    def forward(self, batch: Any) -> Tensor:
        """Returns the logits ``(N, T, V)``."""
        return self.module(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Returns the cross entropy in nats, averaged over the valid targets; 0 when none is valid."""
        logits = outputs.reshape(-1, outputs.shape[-1])
        if batch[1].is_floating_point():
            return F.cross_entropy(logits, batch[1].reshape(logits.shape))
        targets = batch[1].reshape(-1)
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
        # The built-in mean is NaN when no target is valid, and one such microbatch would spoil the whole batch.
        return total / self.loss_weight(batch).clamp(min=1)

    def metrics(self, train: bool) -> dict[str, Metric]:
        """Returns the bits per target token under ``metric_name`` for an evaluation, and nothing for training."""
        if train:
            return {}  # the training loss is the same figure in nats
        from runner.bits_per_token import BitsPerToken

        return {self.metric_name: BitsPerToken(ignore_index=IGNORED_TARGET)}

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Returns ``target``, the most probable token as ``prediction``, and ``loss`` in nats, each ``(N, T)``."""
        loss = F.cross_entropy(outputs.mT.float(), batch[1], ignore_index=IGNORED_TARGET, reduction="none")
        return super().predictions(batch, {"prediction": outputs.argmax(dim=-1), "loss": loss})

    def num_tokens(self, batch: Any) -> int:
        """Returns the number of input tokens, N times T."""
        return batch[0].numel()

    def loss_weight(self, batch: Any) -> Tensor:
        """Returns the number of valid targets, a 0-dim int64 tensor on the batch's device."""
        return (batch[1] != IGNORED_TARGET).sum()

    def flops_per_batch(self, batch: Any) -> float | None:
        """Returns the floating-point operations of forward and backward, or None where the module cannot tell."""
        flops_per_token = getattr(self.module, "flops_per_token", None)
        return None if flops_per_token is None else flops_per_token(batch[0].shape[1]) * batch[0].numel()
