"""Causal language models of Hugging Face's transformers, which map windows of tokens to logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from runner.failures.checks import check_whole, refuse_if
from runner.files.values import HubName, Kernel, KernelOptions
from runner.models.hf.network import HFNetwork
from runner.models.hf.tasks import positions_of


class HFCausalLM(HFNetwork):
    """An `HFNetwork` for a `LanguageModel`: tokens `(N, T)` -> logits `(N, T, V)`.

    Training minimizes only the cross entropy; the loss that a mixture of experts adds for routing is left out.

    Args:
        context: the longest sequence, in tokens; None is the number of the model's positions.

    For the other arguments see `HFNetwork`.

    Raises:
        FileNotFoundError: there is no model of that name.
        ModuleNotFoundError: transformers, or for `lora` peft, is not installed.
        ValueError: an argument is out of range, or the model is not causal.
    """

    def __init__(
        self,
        name: HubName,
        pretrained: bool = True,
        overrides: KernelOptions | None = None,
        attention: Kernel | None = None,
        context: int | None = None,
        revision: HubName | None = None,
        lora: KernelOptions | None = None,
        quantization: str | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        check_whole("context", context, 1, "a number of tokens", none="all positions of the model")
        self._max_length = context
        options = (overrides, attention, revision, lora, quantization, added_tokens)
        super().__init__(name, "causal_lm", pretrained, None, *options)
        self.context = positions_of(self.config) if context is None else context

    def check_config(self, config: Any, name: str) -> None:
        positions = positions_of(config)
        is_longer = self._max_length is not None and positions is not None and self._max_length > positions
        reason = f"{name!r} has {positions} positions; give at most that many, or choose another model"
        refuse_if(is_longer, "context", self._max_length, reason)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Return the logits of each position's next token, `(N, T, V)`.

        Args:
            tokens: int64 `(N, T)` in [0, V), T at most `context`. No row holds padding on its left.
            positions: position of each token in its document, int64 `(N, T)`, if rows hold several documents:
                transformers itself finds the starts of documents, which waits for the device, and masks the attention.

        Raises:
            ValueError: the sequence is longer than `context`, or the model does not take positions.
        """
        if self.context is not None and tokens.shape[1] > self.context:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens is longer than context={self.context!r}")
        if positions is None:
            return super().forward(input_ids=tokens).logits
        if "position_ids" not in inspect.signature(self.base.forward).parameters:
            raise ValueError(f"{type(self.base).__name__} takes no positions, so documents cannot share a row")
        return self.network(input_ids=tokens, position_ids=positions, **self._options).logits

    def flops_per_token(self, context: int) -> float:
        """Return the floating-point operations of the forward and backward pass for one token of a sequence.

        Six for each weight that multiplies, and 12 x layers x heads x width of a head x context for the attention, as
        derived in `runner.models.gpt.GPT.flops_per_token`. The masked half is not subtracted, and models that attend to
        fewer positions, or use only some experts for a token, count in full. Source: Chowdhery et al. 2022, "PaLM",
        appendix B, https://arxiv.org/abs/2204.02311.

        Args:
            context: length of the sequence, in tokens.
        """
        config = self.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", None)
        width = getattr(config, "head_dim", None)
        # Without heads there is no attention; by default the heads share the width of the model.
        attended = heads * width if heads and width else config.hidden_size if heads else 0
        return 6.0 * self._num_multiplied + 12.0 * config.num_hidden_layers * attended * context

    @cached_property
    def _num_multiplied(self) -> int:
        """The number of weights that multiply: all but embeddings, which are looked up, unless the head shares them."""
        looked_up = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        looked_up.discard(id(getattr(self.base.get_output_embeddings(), "weight", None)))
        return sum(weight.numel() for weight in self.parameters() if id(weight) not in looked_up)
