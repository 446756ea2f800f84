"""GPT, a pre-norm transformer decoder: plain, with GELU, learned positions and a tied head, or more modern."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.failures.checks import check_counts, check_number, check_one_of, refuse_if


class ReLUSquared(nn.Module):
    """`max(x, 0) ** 2`. Source: So et al. 2021, "Primer", https://arxiv.org/abs/2109.08668."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation, in the shape of x."""
        return F.relu(x).square()


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu_squared": ReLUSquared}


class CausalAttention(nn.Module):
    """Softmax attention of each position to itself and earlier positions; it has no weights.

    Args:
        dropout: probability with which an attention weight is dropped in training.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs of the heads, with the shape of the queries, keys and values: `(N, H, T, D / H)`.

        A mask comes from `document_mask`.
        """
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)


def document_mask(positions: Tensor) -> Tensor:
    """Return which positions (columns) each position (rows) attends to: itself and earlier ones of its document.

    Args:
        positions: position of each token in its document `(N, T)`, int64; a document begins at position 0.

    Returns:
        Truth values `(N, 1, T, T)`.
    """
    documents = (positions == 0).cumsum(dim=1)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


class Attention(nn.Module):
    """Causal self-attention over `(N, T, D)`.

    Args:
        d_model: D, a multiple of n_heads.
        n_heads: number of heads H.
        dropout: probability with which an attention weight is dropped in training.

    Attributes:
        qkv: maps inputs to queries, keys and values, `(N, T, D)` -> `(N, T, 3 D)`.
        q_norm: applied to the queries `(N, H, T, D / H)`; the identity until an algorithm replaces it.
        k_norm: the same for the keys.
        rotary: applied to both after their norms; the identity until an algorithm replaces it.
        value_embedding: maps tokens `(N, T)` to vectors `(N, T, D)` that are added to the values, or None.
        attend: maps queries, keys and values to the outputs of the heads.
        out: maps the joined heads back, `(N, T, D)` -> `(N, T, D)`.
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.rotary: nn.Module = nn.Identity()
        self.value_embedding: nn.Module | None = None
        self.attend: nn.Module = CausalAttention(dropout)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention's output at each position, `(N, T, D)`; a mask comes from `document_mask`."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.value_embedding is not None:
            v = v + self.value_embedding(tokens)
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for tensor in (q, k, v))
        q = self.rotary(self.q_norm(q))
        k = self.rotary(self.k_norm(k))
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(start_dim=2))


class FeedForward(nn.Module):
    """Two linear layers with an activation in between, over `(N, T, D)`.

    Args:
        d_model: D; the hidden layer is four times as wide.
        activation: a name of `ACTIVATIONS`.
    """

    def __init__(self, d_model: int, activation: str = "gelu") -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model)
        self.activation: nn.Module = ACTIVATIONS[activation]()
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return `down(activation(up(x)))`, `(N, T, D)`."""
        return self.down(self.activation(self.up(x)))


class TransformerBlock(nn.Module):
    """`x + attention(norm1(x))`, then `x + mlp(norm2(x))`, over `(N, T, D)`.

    Args:
        d_model: D, a multiple of n_heads.
        n_heads: number of attention heads.
        dropout: probability in training, for attention weights and for the output of each half.
        norm: a name of `NORMS`.
        activation: a name of `ACTIVATIONS`.
    """

    def __init__(
        self, d_model: int, n_heads: int, dropout: float = 0.0, norm: str = "layer_norm", activation: str = "gelu"
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](d_model)
        self.attention = Attention(d_model, n_heads, dropout)
        self.norm2 = NORMS[norm](d_model)
        self.mlp = FeedForward(d_model, activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the block's output `(N, T, D)`.

        Args:
            x: the block's input `(N, T, D)`.
            tokens: the tokens `(N, T)` that x came from.
            mask: mask from `document_mask`; None lets each position attend to all before it.
        """
        x = x + self.dropout(self.attention(self.norm1(x), tokens, mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder-only transformer language model.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), also for the initial
    weights: normal with standard deviation 0.02, and 0.02 / (2 n_layers) ** 0.5 for the two layers of a block that
    add to the residual stream.

    Args:
        vocab_size: V, number of different tokens.
        context: the longest sequence, in tokens.
        d_model: width D of the residual stream, a multiple of n_heads.
        n_layers: number of blocks.
        n_heads: attention heads in each block.
        dropout: probability in [0, 1) in training, for embeddings, attention weights and the output of each half-block.
        norm: `'layer_norm'`, or `'rms_norm'` (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).
        activation: activation of the feed-forward layers, `'gelu'`, or `'relu_squared'` (`ReLUSquared`).
        tied_head: whether the head shares the weight of the token embedding.
        zero_init: whether the last layer of each half-block, and an untied head, start at zero.

    Attributes:
        position_embedding: the learned positions, or None when something else (rotary, ALiBi) encodes positions.
        head: the linear layer to the logits.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 128,
        d_model: int = 64,
        n_layers: int = 2,
        n_heads: int = 4,
        dropout: float = 0.0,
        norm: str = "layer_norm",
        activation: str = "gelu",
        tied_head: bool = True,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        check_counts(vocab_size=vocab_size, context=context, d_model=d_model, n_layers=n_layers, n_heads=n_heads)
        refuse_if(d_model % n_heads, "d_model", d_model, f"must be a multiple of n_heads={n_heads!r}")
        check_number("dropout", dropout, "[0, 1)", "a probability")
        check_one_of("norm", norm, NORMS)
        check_one_of("activation", activation, ACTIVATIONS)
        self.context = context
        self.d_model = d_model
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding: nn.Embedding | None = nn.Embedding(context, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(d_model, n_heads, dropout, norm, activation) for _ in range(n_layers)
        )
        self.norm = NORMS[norm](d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self._initialize(zero_init)
        if tied_head:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of each position's next token, `(N, T, V)`.

        Args:
            tokens: int64 `(N, T)`, T at most `context`.
            positions: position of each token in its document, int64 `(N, T)`, if rows hold several documents: it
                restarts at 0 with each document, and documents do not attend to each other. None: each row is one
                document.

        Raises:
            ValueError: the sequence is longer than `context`.
        """
        length = tokens.shape[1]
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            if length > self.context:
                raise ValueError(f"a sequence of {length} tokens is longer than context={self.context!r}")
            indices = torch.arange(length, device=tokens.device) if positions is None else positions
            x = x + self.position_embedding(indices)
        x = self.dropout(x)
        mask = None if positions is None else document_mask(positions)
        for block in self.blocks:
            x = block(x, tokens, mask)
        return self.head(self.norm(x))

    def flops_per_token(self, context: int) -> float:
        """Return the floating-point operations of the forward and backward pass for one token of a sequence.

        A weight takes one multiplication and one addition in the forward pass, and twice that in the backward pass, for
        the gradients of the inputs and of the weight: 6 in all. In each layer, the products of queries with keys and of
        attention weights with values take 2 x D x context each in the forward pass, so 12 x D x context with the
        backward pass. The causal mask, which makes half of these unnecessary, is ignored.
        Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311.

        Args:
            context: length of the sequence, in tokens.
        """
        return 6.0 * self._num_multiplied + 12.0 * len(self.blocks) * self.d_model * context

    @cached_property
    def _num_multiplied(self) -> int:
        """The number of weights that multiply: all but embeddings, which are looked up, unless the head shares them."""
        looked_up = {id(embedding.weight) for embedding in self.modules() if isinstance(embedding, nn.Embedding)}
        looked_up.discard(id(self.head.weight))
        return sum(weight.numel() for weight in self.parameters() if id(weight) not in looked_up)

    def _initialize(self, zero_init: bool) -> None:
        for name, parameter in self.named_parameters():
            adds_to_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            if name.endswith("bias") or (zero_init and (adds_to_residual or name == "head.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.blocks)) ** 0.5 if adds_to_residual else 0.02)
