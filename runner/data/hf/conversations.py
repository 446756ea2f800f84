"""Turn conversations into tokens, and mark the tokens of the answers, which are the only ones to train on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from runner.data.hf.splits import Part
from runner.data.text.token_cache import TokenCache
from runner.data.text.tokenizer import HFTokenizer
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument

MARKED = numpy.dtype(numpy.int32)
END = -(1 << 31)
"""Marks the end of a conversation. In marked tokens, ~token stands for a token that is not trained on."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROWS = 1000  # rows to read at a time
SHOWN = 160  # characters to show at the start and the end of a part of a conversation


class ChatTokenizer(HFTokenizer):
    """Tokenizes conversations with a tokenizer's chat template, and marks the tokens of the answers.

    Answers are what the template puts between `{% generation %}` and `{% endgeneration %}`. Without these, an answer is
    what follows the messages before it and the template's generation prompt. An end-of-text token right after an answer
    belongs to it, and the last answer always ends with one; what the template adds after that is left out.

    Args:
        name: a folder, or a name on the Hub.
        needs_template: whether there are messages, which need a chat template.

    Raises:
        ValueError: the tokenizer has no end-of-text token, or lacks a chat template.
    """

    def __init__(self, name: str | None, needs_template: bool, added_tokens: Sequence[str] = ()) -> None:
        refuse_if(not name, "tokenizer", name, "give a folder, or a name on the Hub: that of the model")
        super().__init__(str(name), added_tokens)
        if self.end is None:
            reason = "has no end-of-text token to end answers with; choose another tokenizer"
            raise wrong_argument("tokenizer", name, reason)
        self._end: int = self.end
        try:
            self._template = self._tokenizer.get_chat_template()
        except ValueError as error:
            reason = "has no chat template, which messages need; take the tokenizer of a chat model, or give "
            refuse_if(needs_template, "tokenizer", name, f"{reason}columns of texts, prompt and response", type(error))
            self._template = None
        self._marks_answers = self._template is not None and bool(GENERATION.search(self._template))
        self._marks_answers &= self._tokenizer.is_fast  # only these map characters to tokens
        self.identity += ["answers", self._template]

    def encode_answers(self, prompt: Any, answer: Any) -> NDArray[Any]:
        """Return marked tokens `(n,)`, int32: those of answers, and ~token for each other token.

        Args:
            prompt: a text or messages; None: the answer is a whole conversation.
            answer: a text or messages. Two texts, without a chat template, are joined as they are.

        Raises:
            ValueError: messages are malformed, the template refuses them, or answers cannot be located.
        """
        if self._template is None and isinstance(answer, str) and isinstance(prompt, str | None):
            before = self._tokenizer(prompt or "", verbose=False)["input_ids"]
            before = before[:-1] if before[-1:] == [self._end] else before
            tokens = before + self._tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
            trained = [number >= len(before) for number in range(len(tokens) + 1)]
            return _marked([*tokens, self._end], trained)
        if self._template is None:
            raise ValueError("messages need a tokenizer with a chat template; give texts, or another tokenizer")
        messages = [*_messages(prompt, "user"), *_messages(answer, "assistant")]
        tokens, trained = self._by_mask(messages) if self._marks_answers else self._by_prefix(messages)
        for position in range(1, len(tokens)):
            trained[position] |= trained[position - 1] and tokens[position] == self._end != tokens[position - 1]
        if not any(trained):
            return _marked(tokens, trained)
        last = len(trained) - 1 - trained[::-1].index(True)
        end = [] if tokens[last] == self._end else [self._end]
        return _marked(tokens[: last + 1] + end, trained[: last + 1] + [True] * len(end))

    def show(self, marked: Tensor) -> str:
        """Return marked tokens as text, with the trained parts in double brackets; long parts are shortened."""
        parts = []
        for trained, run in groupby(marked.tolist(), key=lambda token: token >= 0):
            text = self._tokenizer.decode([token if trained else ~token for token in run])
            text = text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}"
            parts.append(f"[[{text}]]" if trained else text)
        return "".join(parts)

    def _by_mask(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        encoding = self._render(messages, return_assistant_tokens_mask=True)
        return encoding["input_ids"], [bool(trained) for trained in encoding["assistant_masks"]]

    def _by_prefix(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        tokens = self._render(messages)["input_ids"]
        trained = [False] * len(tokens)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._length_of(messages[:number], tokens, add_generation_prompt=True)
                stop = self._length_of(messages[: number + 1], tokens)
                if self._end in tokens[start:stop]:  # what follows is between two messages
                    stop -= tokens[start:stop][::-1].index(self._end)
                trained[start:stop] = [True] * (stop - start)
        return tokens, trained

    def _length_of(self, messages: list[dict[str, str]], tokens: list[int], **options: Any) -> int:
        """Return the number of tokens of the first messages of a conversation."""
        prefix = self._render(messages, **options)["input_ids"]
        if tokens[: len(prefix)] != prefix:
            reason = f"its tokens before message {len(messages)} depend on what follows, so no answer can be located"
            raise ValueError(f"{reason}; take a chat template that marks answers with {{% generation %}}")
        return len(prefix)

    def _render(self, messages: list[dict[str, str]], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
            )
        except Exception as error:  # of many kinds: a template raises its own
            raise ValueError(f"the chat template refuses it: {' '.join(str(error).split())}") from error


def encode_rows(
    part: Part, columns: Mapping[str, str], tokenizer: ChatTokenizer, cache: TokenCache, key: str
) -> Tensor:
    """Return the marked tokens of all rows, each followed by `END`.

    Args:
        part: the rows.
        columns: maps `key` to the column of answers, and 'prompt' to that of prompts if there is one.
        tokenizer: makes the tokens.
        cache: keeps them.
        key: the argument that names the column of answers.

    Raises:
        ValueError: a column does not exist, or a row is malformed.
    """
    features = part.rows.features
    for name, column in columns.items():
        refuse_if(column not in features, name, column, f"no such column; the columns are {', '.join(features)}")

    def make() -> Iterator[NDArray[Any]]:
        row = 0
        for batch in part.rows.select_columns([*dict.fromkeys(columns.values())]).iter(batch_size=ROWS):
            answers = batch[columns[key]]
            prompts = batch[columns["prompt"]] if "prompt" in columns else [None] * len(answers)
            conversations = []
            for prompt, answer in zip(prompts, answers, strict=True):
                try:
                    if answer is None or (prompt is None and "prompt" in columns):
                        raise ValueError("a value is missing; fill it in, or leave the row out")
                    if key == "messages" and isinstance(answer, str):
                        raise ValueError("must be a list of messages, not a text; for texts give prompt and response")
                    conversations += [tokenizer.encode_answers(prompt, answer), numpy.array([END], MARKED)]
                except ValueError as error:
                    number = row if part.numbers is None else part.numbers[row]
                    raise wrong_argument(key, columns[key], f"row {number}: {error}") from error
                row += 1
            yield numpy.concatenate(conversations)

    identity = ["conversations", tokenizer.identity, part.identity, dict(columns)]
    return cache.tokens(identity, MARKED, make)


def _marked(tokens: Sequence[int], trained: Sequence[bool]) -> NDArray[Any]:
    values = numpy.array(tokens, MARKED)
    return numpy.where(numpy.array(trained, bool), values, ~values)


def _messages(content: Any, role: str) -> list[dict[str, str]]:
    """Return messages that the template understands; a text is one message of `role`.

    Raises:
        ValueError: a message has no role or no content.
    """
    if content is None or isinstance(content, str):
        return [] if content is None else [{"role": role, "content": content}]
    messages = []
    for number, message in enumerate(content):
        entries = {name: message.get(name) if isinstance(message, Mapping) else None for name in ("role", "content")}
        if not all(isinstance(entry, str) for entry in entries.values()):
            raise ValueError(f"message {number} must have a role and a content, both texts; it is {str(message)[:80]}")
        messages.append(entries)
    return messages
