"""ALiBi: attention fades with distance, in place of position embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import Key, get_item
from runner.algorithms._first_batch import first_batch
from runner.algorithms._gpt import drop_positions
from runner.algorithms._sequences import cut_into_pieces
from runner.algorithms._surgery import operate
from runner.checks import check_whole
from runner.models import GPT
from runner.models.gpt import CausalAttention


def slopes(n_heads: int) -> list[float]:
    """Return how fast each head's attention fades: 2^(-8 h / H) for head h = 1 ... H, where H is a power of two.

    Otherwise they are those of the next power of two below, and then every second one of the power above.
    """
    power = 2 ** int(math.log2(n_heads))
    own = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return own + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (n_heads - power), 2)]


def alibi(n_heads: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores (H, T, T): slope times (key - query), and -inf for keys after the query."""
    positions = torch.arange(length, device=device)
    distances = positions - positions[:, None]
    # One by one, as tensors made on the host would have to be copied to the device.
    biases = torch.stack([distances * slope for slope in slopes(n_heads)])
    return biases.masked_fill(distances > 0, -math.inf).to(dtype)


def refuse_longer(length: int, max_length: int) -> None:
    """Raise a ValueError where a sequence is longer than the model takes, both in tokens."""
    if length > max_length:
        raise ValueError(f"a sequence of {length} tokens is longer than max_sequence_length={max_length!r}")


class _FadingAttention(nn.Module):
    """`CausalAttention` with `alibi` added to its scores.

    Args:
        max_length: the longest sequence, in tokens.
        dropout: probability with which an attention weight is dropped in training.
    """

    def __init__(self, max_length: int, dropout: float) -> None:
        super().__init__()
        self.max_length = max_length
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what the heads gather, (N, H, T, D / H) as queries, keys and values."""
        n_heads, length = q.shape[1:3]
        refuse_longer(length, self.max_length)
        dropout = self.dropout if self.training else 0.0
        bias = alibi(n_heads, length, q.device, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


class ALiBi(Algorithm):
    """Puts linear attention biases in place of a GPT's learned positions, and trains on shorter sequences.

    The model then works on longer sequences than it was trained on. In training each sequence (N, T) is cut into
    several, so that a batch has as many tokens as ever; samples are counted as they were read. For the GPT of this
    project. There is nothing random, and ranks and microbatches change nothing.

    Args:
        max_sequence_length: the longest sequence that the model takes, in evaluation too, in tokens; at least 1.
        train_sequence_length_scaling: length of the pieces that training sees, as a fraction of the sequences, above 0
            and at most 1, which leaves them whole. Pieces must come out even.
        input_key: where the tokens (N, T) stand in a batch; all its tensors are (N, T, ...) and are cut like them.
        allow_no_match: leave another model as it is, rather than refuse it.

    Raises:
        ValueError: an argument is out of range; at INIT, the model has no such attention; at FIT_START, or later where
            data do not lie in memory, sequences cannot be cut evenly, or are longer than `max_sequence_length`.

    Evidence:
        Strong for longer sequences in evaluation than in training (Press et al. 2022, "Train Short, Test Long",
        arXiv:2108.12409), which saves time where attention is costly; at equal length about as good as other positions.
    """

    conflicts_with = ("RotaryEmbedding",)

    def __init__(
        self,
        max_sequence_length: int,
        train_sequence_length_scaling: float = 0.25,
        input_key: Key = 0,
        allow_no_match: bool = False,
    ) -> None:
        check_whole("max_sequence_length", max_sequence_length, 1)
        check_range("train_sequence_length_scaling", train_sequence_length_scaling, 0, 1, above=True)
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self.input_key = input_key
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        def fade(attend: nn.Module, index: int) -> nn.Module:
            assert isinstance(attend, CausalAttention)
            return _FadingAttention(self.max_sequence_length, attend.dropout)

        def lengthen(gpt: nn.Module, index: int) -> None:
            assert isinstance(gpt, GPT)
            drop_positions(gpt, index)
            gpt.context = self.max_sequence_length

        policies = {GPT: lengthen, CausalAttention: fade}
        self._fades = bool(operate(self, state, policies, "attention of runner.models.GPT", self.allow_no_match))

    def fit_start(self, state: State, logger: Logger) -> None:
        batch = first_batch(state.train_dataloader)
        if batch is not None:
            self._cut(batch)
        for evaluator in state.evaluators:
            batch = first_batch(evaluator.dataloader)
            if self._fades and evaluator.is_owed(state) and batch is not None:
                refuse_longer(get_item(batch, self.input_key).shape[1], self.max_sequence_length)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        state.batch = self._cut(state.batch)

    def _cut(self, batch: Any) -> Any:
        if self.train_sequence_length_scaling == 1:
            return batch
        whole = get_item(batch, self.input_key).shape[1]
        asked = f"train_sequence_length_scaling={self.train_sequence_length_scaling!r}"
        length, remedy = round(whole * self.train_sequence_length_scaling), "set 1 to leave sequences whole"
        return cut_into_pieces(batch, whole, length, asked, remedy)
