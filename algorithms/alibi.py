"""ALiBi: attention that fades with distance, instead of position embeddings.

The score of a key that is d tokens before the query gets a bias of -s d. This multiplies its attention weight, before
normalization, by exp(-s d). The slope s differs between heads: some heads see far, and others only nearby tokens. The
bias is defined for every distance, even beyond the length of the training sequences. Source: Press et al. 2022,
arXiv:2108.12409.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._batch import Key, get_item
from runner.algorithms._first_batch import first_batch
from runner.algorithms._gpt import ShapeCache, drop_positions
from runner.algorithms._sequences import cut_into_pieces
from runner.algorithms._surgery import operate
from runner.failures.checks import check_number, check_whole
from runner.models import GPT
from runner.models.gpt import CausalAttention


def slopes(n_heads: int) -> list[float]:
    """Return the slope of each head, 2^(-8 h / H) for head h = 1 ... H if H is a power of two.

    For any other H, return the slopes for the next lower power of two, followed by every second slope for the next
    higher one.
    """
    power = 2 ** int(math.log2(n_heads))
    lower = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return lower + [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (n_heads - power), 2)]


def alibi(n_heads: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the bias (H, T, T) of the attention scores: slope * (key - query position), and -inf for later keys."""
    positions = torch.arange(length, device=device)
    distances = positions - positions[:, None]
    # Head by head, because a tensor of slopes would have to be copied to the device.
    biases = torch.stack([distances * slope for slope in slopes(n_heads)])
    return biases.masked_fill(distances > 0, -math.inf).to(dtype)


def refuse_longer(length: int, max_length: int) -> None:
    """Raise a ValueError if a sequence is longer than the model allows. Both lengths are in tokens."""
    if length > max_length:
        raise ValueError(f"a sequence of {length} tokens is longer than max_sequence_length={max_length!r}")


class _FadingAttention(nn.Module):
    """`CausalAttention` with the bias of `alibi` added to its scores.

    Args:
        max_length: length of the longest sequence, in tokens.
        dropout: probability of dropping an attention weight in training.
        biases: the results of `alibi`, cached by the shape of the queries.
    """

    def __init__(self, max_length: int, dropout: float, biases: ShapeCache[Tensor]) -> None:
        super().__init__()
        self.max_length = max_length
        self.dropout = dropout
        self.biases = biases

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the heads' outputs (N, H, T, D / H) for queries, keys and values of that shape.

        The mask, if any, comes from `document_mask`.
        """
        refuse_longer(q.shape[2], self.max_length)
        dropout = self.dropout if self.training else 0.0
        bias = self.biases.get(q)[None]  # torch has no fused attention for masks of three dimensions
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


class ALiBi(Algorithm):
    """Replaces a GPT's learned positions with linear attention biases, and trains on shorter sequences.

    The model can then be used on longer sequences than it was trained on. In training, each sequence of a batch (N, T)
    is cut into several shorter ones, so the batch keeps all its tokens; the sample count still counts the original
    sequences. Works only with this project's GPT. Nothing is random or depends on the number of ranks or microbatches.

    Args:
        max_sequence_length: length of the longest sequence that the model accepts, in evaluation too, in tokens; at
            least 1.
        train_sequence_length_scaling: length of the pieces to train on, as a fraction of the sequence length, above 0
            and at most 1. It must divide the sequences evenly; 1 leaves them whole.
        input_key: index or name of the tokens (N, T) in a batch; all tensors of the batch must be (N, T, ...) and are
            cut in the same way.
        allow_no_match: whether to leave any other model unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range; at INIT, the model does not have this project's GPT attention; or, at
            FIT_START (during training if the data is not held in memory), sequences cannot be cut evenly or are longer
            than `max_sequence_length`.

    Evidence:
        Strong for evaluation on longer sequences than in training (Press et al. 2022, "Train Short, Test Long",
        arXiv:2108.12409), which saves time if attention is costly. At equal length it is about as good as other
        position encodings.
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
        check_number("train_sequence_length_scaling", train_sequence_length_scaling, "(0, 1]")
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self.input_key = input_key
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        biases = ShapeCache(lambda q: alibi(q.shape[1], q.shape[2], q.device, q.dtype))

        def fade(attend: nn.Module, index: int) -> nn.Module:
            assert isinstance(attend, CausalAttention)
            return _FadingAttention(self.max_sequence_length, attend.dropout, biases)

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
        argument = f"train_sequence_length_scaling={self.train_sequence_length_scaling!r}"
        length = round(whole * self.train_sequence_length_scaling)
        return cut_into_pieces(batch, whole, length, argument, "set it to 1 to keep sequences whole")
