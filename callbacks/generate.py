"""Lets a language model write text during training, to see what it has learned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runner import Callback, Interval, Time
from runner.callbacks._texts import make_tokenizer
from runner.failures.checks import check_number, check_whole
from runner.failures.errors import wrong_argument
from runner.files.values import HubName

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from runner import Logger, State

log = logging.getLogger("runner")

COLUMNS = ("batch", "prompt", "text")
MAX_ROWS = 1000  # the whole table is logged each time


class Generate(Callback):
    """Lets a language model continue prompts at an interval and at the end, and logs the texts as a table.

    The model runs as in an evaluation: in evaluation mode, with averaged weights if an algorithm keeps an average. All
    ranks generate the same texts, so that sharded models work too, and rank 0 logs them. The texts depend only on the
    seed, the batch and the weights. For a model that is not a `LanguageModel` it warns once and does nothing.

    Args:
        prompts: texts to continue, at least one and none of them empty.
        interval: how often to generate, as a time string or a number of epochs; 0 means only at the end.
        max_new_tokens: number of tokens to generate for each prompt, at least 1.
        temperature: divisor of the logits, at least 0; 0 always takes the most likely token.
        top_k: number of most likely tokens to sample from, at least 1; None samples from all.
        tokenizer: a folder, or a name on the Hub, for transformers' AutoTokenizer; or an object with `encode(text) ->
            list of int` and `decode(list of int) -> text`; None takes bytes as tokens.

    Raises:
        OSError: the tokenizer does not exist.
        ValueError: an argument is out of range, or, at FIT_START, a prompt has a token outside the model's vocabulary.

    Logs:
        generate: a table of the last 1000 texts, with the batch and the prompt of each; named after the config key.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        interval: str | int | Time = "1ep",
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        tokenizer: HubName | Any = None,
    ) -> None:
        if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
            raise wrong_argument("prompts", prompts, "must be a list of texts, at least one and none of them empty")
        check_whole("max_new_tokens", max_new_tokens, 1)
        check_whole("top_k", top_k, 1, none="all tokens")
        check_number("temperature", temperature, "[0, inf]")
        self.prompts = list(prompts)
        self.interval = Interval(interval)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.tokenizer = make_tokenizer(tokenizer)
        self._rows: list[list[Any]] = []
        self._is_enabled = False

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner import LanguageModel, get_global_rank

        self._is_enabled = isinstance(state.unwrapped_model, LanguageModel)
        if not self._is_enabled:
            if get_global_rank() == 0:
                log.warning("generate does nothing: %s is not a LanguageModel", type(state.unwrapped_model).__name__)
            return
        import torch

        from runner.callbacks._inference import inference

        with inference(state):
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=state.device)
            vocabulary = _forward(state)(tokens).shape[-1]
        for prompt in self.prompts:
            if (largest := max(self.tokenizer.encode(prompt))) >= vocabulary:
                raise wrong_argument(
                    "prompts", prompt, f"has token {largest}, but the model has only {vocabulary} tokens"
                )

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._is_enabled:
            return
        if state.is_due(self.interval):
            self._generate(state, logger)

    epoch_end = batch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._is_enabled and not (self._rows and self._rows[-1][0] == state.timestamp.batch):
            self._generate(state, logger)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = state["rows"]

    def _generate(self, state: State, logger: Logger) -> None:
        import torch

        from runner import stream_seed
        from runner.callbacks._inference import inference

        batch = state.timestamp.batch
        context = getattr(getattr(state.unwrapped_model, "module", None), "context", None)
        generator = torch.Generator(state.device)
        generator.manual_seed(stream_seed(state.rank_zero_seed, self.config_key, batch))
        continuations = []
        with inference(state):
            for prompt in self.prompts:
                tokens = torch.tensor([self.tokenizer.encode(prompt)], device=state.device)
                for _ in range(self.max_new_tokens):
                    logits = _forward(state)(tokens if context is None else tokens[:, -context:])[:, -1].float()
                    tokens = torch.cat([tokens, draw(logits, self.temperature, self.top_k, generator)], dim=1)
                continuations.append(tokens[0, -self.max_new_tokens :])
        texts = torch.stack(continuations).tolist()  # the intended host-device sync, once per interval
        rows = [[batch, prompt, self.tokenizer.decode(text)] for prompt, text in zip(self.prompts, texts, strict=True)]
        self._rows = [*self._rows, *rows][-MAX_ROWS:]
        logger.log_table(COLUMNS, self._rows, self.config_key)


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: Generator) -> Tensor:
    """Return a token (N, 1), int64, for each row of logits (N, V), sampled from softmax(logits / temperature).

    It uses the Gumbel trick, which returns some token even for NaN; torch.multinomial would raise, or abort on a GPU.

    Args:
        logits: logits (N, V) of the next token.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: number of most likely tokens to sample from; None samples from all.
        generator: source of randomness, on the device of the logits.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    if temperature > 0:
        noise = logits.new_empty(logits.shape).exponential_(generator=generator).log()
        logits = logits / temperature - noise
    return logits.argmax(dim=-1, keepdim=True)


def _forward(state: State) -> Callable[[Tensor], Tensor]:
    """Return a function from tokens (N, T) to logits (N, T, V), not compiled, because each length would recompile."""
    from runner.distributed.sharding import is_sharded

    model = state.unwrapped_model
    # Only a call of the model gathers its shards, and of a sharded model the run compiles only the blocks.
    forward = state.precision.autocast(state.device)(model if is_sharded(model) else model.forward)
    return lambda tokens: forward((tokens, tokens))
