"""Conversations to train a language model on, of which only the answers count.

Batches are those of `runner.data.text.packing.PackedWindows`, `(inputs, targets, positions)`, int64 `(N, context)`: the
targets are -100 outside of answers. Conversations in a window do not attend to each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.data.fake import data_function
from runner.data.hf.conversations import END, ChatTokenizer, encode_rows
from runner.data.hf.splits import Part, SplitArguments, load_parts
from runner.data.loaders import OrderedLoader
from runner.data.text.packing import IGNORED, PackedWindows, loaders_of
from runner.data.text.token_cache import TokenCache
from runner.data.text.windows import PARTS
from runner.distributed.ranks import get_global_rank
from runner.failures.checks import refuse_if
from runner.files.values import HubName
from runner.libraries.hugging_face import bars_on_terminals

log = logging.getLogger("runner")


@dataclass(frozen=True)
class ConversationSource(SplitArguments):
    """The arguments that say where conversations are, and how they become tokens.

    Args:
        context: tokens in a window; longer conversations are cut.

    For the other arguments see `SplitArguments`.
    """

    name: HubName = "json"
    context: int = 512

    def read_parts(self, *columns: str) -> list[Part]:
        """Check the arguments, and return the rows to train, to evaluate and perhaps to test on.

        Args:
            columns: columns that may hold messages.
        """
        source, splits = self.checked_source()
        with bars_on_terminals("datasets", "huggingface_hub"):
            parts = load_parts(source, splits, self.eval_share, self.seed)
        if get_global_rank() == 0:
            warn_of_ignored(parts[0].rows.features, columns)
        return parts

    def make_windows(
        self, parts: Sequence[Part], columns: Mapping[str, str], key: str, tokenizer: ChatTokenizer, pack: bool
    ) -> list[ConversationWindows]:
        """Return the windows of each part; for the arguments see `encode_rows` and `ConversationWindows`."""
        cache = TokenCache(self.cache)
        windows = []
        for part, use in zip(parts, PARTS, strict=False):
            tokens = encode_rows(part, columns, tokenizer, cache, key)
            identity = [tokenizer.identity, columns, part.identity]
            windows.append(ConversationWindows(tokens, self.context, pack, cache, identity))
            reason = f"no conversation to {use} on has an answer within context={self.context} tokens"
            refuse_if(not len(windows[-1]), key, columns[key], reason)
        return windows


@dataclass(frozen=True)
class Chat(ConversationSource):
    """Return a training, an evaluation and perhaps a test loader of conversations; only answers are trained on.

    Args:
        messages: a column of lists of messages, each with a role and a content.
        prompt, response: instead of messages: two columns of texts, of which only the response is trained on.
        pack: whether a window holds several conversations, packed by best fit; otherwise it holds one.

    For the other arguments see `SplitArguments` and `WindowSizes`.

    Raises:
        OSError, ModuleNotFoundError, ValueError: data or a library is missing, or an argument does not fit the data.
    """

    messages: str = "messages"
    prompt: str | None = None
    response: str | None = None
    pack: bool = True

    def load(self) -> tuple[OrderedLoader, ...]:
        """Return the loaders; the training loader has the first conversation as `sample`, a text."""
        if bool(self.prompt) != bool(self.response):
            raise ValueError(f"prompt={self.prompt!r}, response={self.response!r}: give both columns, or neither")
        columns = {"prompt": self.prompt, "response": self.response} if self.response else {"messages": self.messages}
        key = "response" if self.response else "messages"
        tokenizer = ChatTokenizer(self.tokenizer, not self.response, self.added_tokens)
        windows = self.make_windows(self.read_parts(*columns.values()), columns, key, tokenizer, self.pack)
        warn_of_lost(windows, self.context)
        train, *held_out = loaders_of(windows, self, self.seed)
        vars(train)["sample"] = tokenizer.show(windows[0].first)
        return train, *held_out


class ConversationWindows(PackedWindows):
    """Windows of conversations: one each, or packed by best fit.

    Batches are `(inputs, targets, positions)`, or `(inputs, targets)` if a window holds one conversation, with targets
    of -100 outside of answers.

    Args:
        tokens: marked tokens `(n,)`, int32, see `runner.data.hf.conversations`.
        context: length of a window, in tokens; longer conversations are cut at their end.
        pack: whether a window holds several conversations.
        cache: keeps the assignment of conversations to windows.
        key: everything that the tokens depend on, as JSON values.

    Attributes:
        counts: numbers of all conversations, of those cut, of those cut that have no answer left, and of those without
            an answer.
        rows: numbers of the rows whose conversations are used.
    """

    def __init__(self, tokens: Tensor, context: int, pack: bool, cache: TokenCache, key: Any) -> None:
        self._tokens = tokens
        self._context = context
        self._pack = pack
        values = tokens.numpy()
        ends = numpy.flatnonzero(values == END)
        starts = numpy.concatenate([[0], ends[:-1] + 1])[: len(ends)]
        lengths = numpy.clip(ends - starts - 1, 0, context)
        trained = numpy.concatenate([[0], numpy.cumsum(values >= 0)])
        firsts = numpy.minimum(starts + 1, ends)  # the first token of a conversation is never a target
        has_answer = trained[ends] > trained[firsts]
        is_used = trained[firsts + lengths] > trained[firsts]
        is_cut = ends - starts - 1 > context
        self.counts = tuple(int(rows.sum()) for rows in (ends >= 0, is_cut, has_answer & ~is_used, ~has_answer))
        self.rows = numpy.flatnonzero(is_used)
        self._starts = starts[is_used]
        self._lengths = lengths[is_used]
        self._windows = self._assign(cache, key) if pack else [*numpy.arange(len(self._starts))[:, None]]

    @property
    def first(self) -> Tensor:
        """The marked tokens of the first conversation."""
        return self._tokens[self._starts[0] : self._starts[0] + self._lengths[0] + 1]

    def read_batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the windows with these numbers as a batch."""
        batch = super().read_batch(indices)
        return batch if self._pack else batch[:2]

    def _pairs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens.long()
        return torch.where(tokens < 0, ~tokens, tokens)[:, :-1], tokens.where(tokens >= 0, IGNORED)[:, 1:]


def warn_of_ignored(features: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Warn of tools and of entries of messages that the chat template does not see."""
    ignored = ["tools"] if "tools" in features else []
    for column in columns:
        entries = getattr(features.get(column), "feature", None)
        names = sorted({*entries} - {"role", "content"}) if isinstance(entries, Mapping) else []
        ignored += [f"{column}.{name}" for name in names]
    if ignored:
        reason = "the chat template sees only the role and content of messages"
        log.warning("%s: ignored, because %s", ", ".join(ignored), reason)


def warn_of_lost(windows: Sequence[ConversationWindows], context: int) -> None:
    """Warn of conversations that were cut or left out. All ranks; rank 0 logs."""
    if get_global_rank() != 0:
        return
    total, cut, lost, silent = (f"{sum(counts):,}" for counts in zip(*(part.counts for part in windows), strict=True))
    if cut != "0":
        left_out = f"; {lost} of them left out, as no answer remains" if lost != "0" else ""
        log.warning("%s of %s conversations were cut at data.context=%d%s", cut, total, context, left_out)
    if silent != "0":
        log.warning("%s of %s conversations have no answer, and were left out", silent, total)


load_chat = data_function("load_chat", Chat)
