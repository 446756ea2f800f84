"""Direct preference optimization (DPO) of a language model.

With the log probabilities of the chosen answer c and the rejected answer r under the model and under a reference, the
loss of a pair is -log sigmoid(beta ((log p(c) - log p_ref(c)) - (log p(r) - log p_ref(r)))). Tokens that both answers
begin with have the same log probabilities in both, so they do not count. Source: Rafailov et al. 2023, "Direct
Preference Optimization", https://arxiv.org/abs/2305.18290, equation 7.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument
from runner.models.by_name import is_making_by_name
from runner.models.language import IGNORED_TARGET
from runner.models.model import Model, in_eval_mode

if TYPE_CHECKING:
    from torchmetrics import Metric


class PreferenceModel(Model):
    """A language model that learns to prefer the chosen of two answers; batches are those of `data=preferences`.

    The reference is the model that training starts from: with adapters, the model without them; otherwise a frozen
    copy, which is saved in checkpoints. It computes in evaluation mode.

    Args:
        module: maps tokens `(N, T)` to logits `(N, T, V)`, such as `runner.models.hf.causal_lm.HFCausalLM`.
        beta: how much a deviation from the reference costs, above 0.

    Raises:
        ValueError: beta is out of range, or weights that have no values yet cannot be copied.
    """

    def __init__(self, module: nn.Module, beta: float = 0.1) -> None:
        super().__init__()
        check_number("beta", beta, "(0, inf)")
        self.module = module
        self.beta = beta
        has_adapters = hasattr(getattr(module, "network", None), "disable_adapter")
        if not has_adapters and is_making_by_name():
            reason = (
                "the reference is a copy of weights that have no values yet; set in_order, or give model.module.lora"
            )
            raise wrong_argument("init_weights", "by_name", reason)
        self.reference = None if has_adapters else copy.deepcopy(module).requires_grad_(False)

    def forward(self, batch: Any) -> Tensor:
        """Return the rewards of both answers `(N, 2)`: beta times the log of their probability over the reference's."""
        network: Any = getattr(self.module, "network", None)
        without_adapters = network.disable_adapter() if self.reference is None else nullcontext()
        reference = self.module if self.reference is None else self.reference
        with torch.no_grad(), in_eval_mode(reference), without_adapters:
            expected = self._log_probabilities(reference, batch)
        return self.beta * (self._log_probabilities(self.module, batch) - expected)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the loss, averaged over pairs."""
        return -F.logsigmoid(outputs[:, 0] - outputs[:, 1]).mean()

    def metrics(self, train: bool) -> dict[str, Metric]:
        """Return `PreferenceAccuracy` for an evaluation: the share of pairs whose chosen answer has a higher reward."""
        if train:
            return {}
        from runner.libraries.torchmetrics import import_torchmetrics

        return {"PreferenceAccuracy": import_torchmetrics().MeanMetric(nan_strategy="disable")}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        """Update the accuracy with the rewards of a batch."""
        metric.update((outputs[:, 0] > outputs[:, 1]).float())

    def predictions(self, batch: Any, outputs: Tensor) -> dict[str, Any]:
        """Return the rewards `chosen` and `rejected` of each pair, `(N,)`."""
        return {"chosen": outputs[:, 0], "rejected": outputs[:, 1]}

    def num_tokens(self, batch: Any) -> int:
        """Return the number of input tokens of both answers."""
        return batch[0].numel()

    @property
    def loss_averages(self) -> Literal["samples", "weights", "unknown"]:
        """The loss is a mean over pairs."""
        return "samples"

    @staticmethod
    def _log_probabilities(module: nn.Module, batch: Any) -> Tensor:
        """Return the log probabilities of the answers, `(N, 2)`."""
        inputs, targets = batch
        logits = module(inputs.flatten(0, 1))
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="none")
        return -losses.view(targets.shape).sum(-1)
