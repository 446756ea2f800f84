"""Pairs of answers, of which people preferred one: data for `runner.models.preference.PreferenceModel`.

Batches are `(inputs, targets)`, int64 `(N, 2, context)`: the chosen and the rejected conversation of each pair, with
targets of -100 outside of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.fake import data_function
from runner.data.hf.chat import ConversationSource, ConversationWindows, warn_of_lost
from runner.data.hf.conversations import ChatTokenizer
from runner.data.loaders import OrderedLoader
from runner.data.text.packing import loaders_of
from runner.failures.checks import refuse_if


@dataclass(frozen=True)
class Preferences(ConversationSource):
    """Return a training, an evaluation and perhaps a test loader of pairs of a chosen and a rejected answer.

    Batch sizes count pairs.

    Args:
        chosen, rejected: columns of texts or of lists of messages; lists may begin with the prompt.
        prompt: a column of texts or lists of messages that precede both; None: there is none.

    For the other arguments see `SplitArguments` and `WindowSizes`.

    Raises:
        OSError, ModuleNotFoundError, ValueError: data or a library is missing, or an argument does not fit the data.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    prompt: str | None = None

    def load(self) -> tuple[OrderedLoader, ...]:
        """Return the loaders."""
        tokenizer = ChatTokenizer(self.tokenizer, False, self.added_tokens)
        prompt = {"prompt": self.prompt} if self.prompt else {}
        parts = self.read_parts(self.chosen, self.rejected, *prompt.values())
        chosen, rejected = (
            self.make_windows(parts, {key: column, **prompt}, key, tokenizer, pack=False)
            for key, column in (("chosen", self.chosen), ("rejected", self.rejected))
        )
        warn_of_lost([*chosen, *rejected], self.context)
        pairs = [PreferencePairs(*windows) for windows in zip(chosen, rejected, strict=True)]
        reason = f"no pair has both answers within context={self.context} tokens; give a longer context"
        refuse_if(not all(map(len, pairs)), "context", self.context, reason)
        train, *held_out = loaders_of(pairs, self, self.seed)
        texts = (
            f"{name}: {tokenizer.show(side[0].first)}" for name, side in (("chosen", chosen), ("rejected", rejected))
        )
        vars(train)["sample"] = "\n".join(texts)
        return train, *held_out


class PreferencePairs(Dataset[tuple[Tensor, ...]]):
    """Pairs of windows of one conversation each; a row is left out if one of its windows was.

    Args:
        chosen, rejected: windows of the same rows.
    """

    def __init__(self, chosen: ConversationWindows, rejected: ConversationWindows) -> None:
        self._sides = chosen, rejected
        _, *numbers = numpy.intersect1d(chosen.rows, rejected.rows, assume_unique=True, return_indices=True)
        self._numbers = numpy.stack(numbers)

    def __len__(self) -> int:
        return self._numbers.shape[1]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.read_batch([index]))

    def keep(self, pairs: Sequence[int]) -> None:
        """Keep only the pairs with these numbers."""
        self._numbers = self._numbers[:, pairs]

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the pairs with these numbers as a batch."""
        numbers: Any = self._numbers[:, indices].tolist()
        sides = (side.read_batch(chosen) for side, chosen in zip(self._sides, numbers, strict=True))
        return tuple(torch.stack(tensors, dim=1) for tensors in zip(*sides, strict=True))


load_preferences = data_function("load_preferences", Preferences)
