"""N-gram embeddings: the embedding at each position depends on the last few tokens, not only on the last one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.checks import check_whole
from runner.models import GPT

MULTIPLIER = 1_000_003  # a prime, small enough that its product with a row number stays far below 2^63


def hash_ngrams(tokens: Tensor, n: int, vocab_size: int, table_size: int) -> Tensor:
    """Return a table row for the last n tokens at each position.

    The row is t_1 m^(n-1) + ... + t_(n-1) m + t_n modulo the table size. With V^n rows or more, m = V makes it a number
    in base V, so that each n-gram has a row of its own. In smaller tables, m is a large prime, which spreads n-grams
    evenly, and some share a row.

    Args:
        tokens: tokens (N, T), int64, in [0, vocab_size); positions before the first count as zeros.
        n: length of the n-grams in tokens, at least 1.
        vocab_size: size of the vocabulary, V.
        table_size: number of rows, at most 2^31.

    Returns:
        Rows (N, T), int64, in [0, table_size).
    """
    multiplier = vocab_size if vocab_size**n <= table_size else MULTIPLIER
    padded = F.pad(tokens, (n - 1, 0))
    rows = torch.zeros_like(tokens)
    for start in range(n):
        rows = (rows * multiplier + padded[:, start : start + tokens.shape[1]]) % table_size
    return rows


class _NGramTokens(nn.Embedding):
    """A token embedding that adds embeddings of n-grams, and takes over another one's weight and its name.

    Args:
        tokens: token embedding, (V, D).
        max_n: length of the longest n-grams; there are tables for 2 to max_n tokens.
        table_size: number of rows of each table.
    """

    def __init__(self, tokens: nn.Embedding, max_n: int, table_size: int) -> None:
        super().__init__(tokens.num_embeddings, tokens.embedding_dim, _weight=tokens.weight)
        self.weight = tokens.weight
        empty = torch.zeros(table_size, tokens.embedding_dim)
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(empty.clone(), freeze=False) for _ in range(max_n - 1))

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings (N, T, D) of tokens (N, T)."""
        total = super().forward(input)
        positions = torch.arange(input.shape[1], device=input.device)
        for n, table in enumerate(self.tables, start=2):
            rows = hash_ngrams(input, n, self.num_embeddings, len(table.weight))  # type: ignore[arg-type]
            total = total + table(rows) * (positions >= n - 1)[:, None].to(total.dtype)
        return total


class NGramEmbedding(Algorithm):
    """Adds to a GPT's token embeddings a learned vector for each of the last two, three, ... tokens together.

    There is one table for each n, in which n-grams that hash to the same row share a vector. The vectors start at zero,
    so that the model's outputs are unchanged at first. The first n - 1 positions of a sequence get none. Works with the
    GPT of this project. Nothing is random or depends on ranks or microbatches.

    Args:
        max_n: length of the longest n-grams in tokens, at least 2.
        table_size: number of rows of each table, from 1 to 2^31; each row is as wide as the model.
        allow_no_match: whether to leave any other model unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range; or, at INIT, the model is not such a GPT.

    Evidence:
        Some, but only for small models and early training: a larger model learns the contents of a table on its own,
        with fewer weights and for rare n-grams too. Each step costs time for all rows of the tables. (Hashed n-grams:
        Roy et al. 2022, "N-Grammer", arXiv:2207.06366.)
    """

    def __init__(self, max_n: int = 3, table_size: int = 16384, allow_no_match: bool = False) -> None:
        check_whole("max_n", max_n, 2)
        check_whole("table_size", table_size, 1, most=2**31)
        self.max_n = max_n
        self.table_size = table_size
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        modules = state.unwrapped_model.modules()
        embeddings = {module.token_embedding for module in modules if isinstance(module, GPT)}

        def extend(embedding: nn.Module, index: int) -> nn.Module:
            assert isinstance(embedding, nn.Embedding)
            return _NGramTokens(embedding, self.max_n, self.table_size)

        operate(self, state, {embeddings.__contains__: extend}, "runner.models.GPT", self.allow_no_match)
