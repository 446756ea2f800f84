"""What the trainer asks of a model.

A batch is a tensor, or a tuple, list or mapping of tensors, nested as one likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from runner.batch import count_samples

if TYPE_CHECKING:
    from torchmetrics import Metric


class Model(nn.Module):
    """A network together with its loss and its metrics: what the trainer trains and evaluates.

    A subclass defines ``forward(batch) -> outputs`` and ``loss(outputs, batch)``; everything else has a default. With
    several optimizers, or any other step than forward, loss and backward, it defines ``training_step`` instead of
    ``loss``. A subclass may also define ``validate(batch) -> (outputs, targets)``, the earlier name of
    :meth:`eval_forward`; its targets are then the ones that the metrics see in evaluation.

    Attributes:
        training_step: None, or a method ``training_step(state)`` of the subclass, which the training loop then calls in
            place of its own forward, loss and backward. It leaves gradients, of losses times ``state.loss_scale``, and
            returns the loss; the loop then steps all optimizers, once: a GAN takes the gradients of both losses first,
            those of each for its own network only. Gradients are averaged over the ranks afterwards: all ranks leave
            those of the same parameters.
        manual_optimization: whether ``training_step`` steps those of ``state.optimizers`` itself, as often and in the
            order that it likes, with ``optimizer.step()``. That averages their gradients over the ranks first, and
            unscales them with amp_fp16, where each may step once a batch: all ranks make the same steps. It also sets
            gradients to zero between its steps; those of one batch are gone in the next. A batch is one step of time.

    Raises:
        TypeError: the subclass lacks ``forward``, or both ``loss`` and ``training_step``; it has
            ``manual_optimization`` and no ``training_step``.
    """

    training_step: ClassVar[Callable[..., Any] | None] = None
    manual_optimization: ClassVar[bool] = False

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
        """Returns new metrics by name, as a dict or a `MetricCollection`; none by default.

        In an evaluation the name ``'loss'`` is that of the model's own loss, which is measured anyway.

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
        """Returns the number of samples in this rank's batch.

        By default the size of dimension 0 of its first tensor, or the length of the lists that its samples stand in:
        ``([image, image], [boxes, boxes])`` holds two. A first batch that can be read in two ways is refused.

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
        if isinstance(batch, Mapping) and validated is None:
            raise TypeError(f"{type(self).__name__}: a batch that is a mapping has no batch[1]; override update_metric")
        return validated[1] if validated is not None and validated[0] is batch else batch[1]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; afterwards each of its modules is in the mode of before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
