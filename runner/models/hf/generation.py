"""Generate texts with transformers models: the prompts and references in a batch, and how tokens are chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from runner.core.randomness import stream_seed
from runner.data.text.tokenizer import load_pretrained_tokenizer
from runner.failures.checks import check_keys, check_number, check_whole, refuse_if
from runner.failures.errors import wrong_argument
from runner.libraries.hugging_face import import_hf
from runner.models.hf.loading import quiet_transformers
from runner.models.hf.network import HFNetwork
from runner.models.hf.reading import one_sequence_per_row
from runner.models.hf.tasks import positions_of
from runner.models.language import IGNORED_TARGET

OWN = {"prompt_tokens": None, "seed": 0, "do_sample": False, "temperature": 1.0, "top_k": None, "top_p": None}
"""Options that are handled here, with their defaults; the others are those of transformers' `GenerationConfig`."""
Tokens = list[int]


class Texts(NamedTuple):
    """The texts of a batch, one of each kind per sample; without labels, the references are empty."""

    inputs: list[str]
    references: list[str]
    generated: list[str]


class Generator:
    """Generates a text for each row of a batch with a transformers model.

    With `do_sample`, each row has a random stream of its own, seeded by `seed` and the tokens of the prompt. So a text
    depends neither on the batch size nor on the number of ranks, and equal prompts get equal texts.

    Args:
        network: the network, whose task is 'causal_lm' or 'seq2seq_lm'.
        options: `max_new_tokens`, at least 1; `num_beams`, `repetition_penalty` and other arguments of transformers'
            `GenerationConfig`; `do_sample`, `temperature`, `top_k` and `top_p`, whose defaults are False, 1, all tokens
            and 1; `seed` (0); `prompt_tokens`, the number of tokens at the start of a row that are its prompt, for data
            whose labels do not show it. Other settings, except for sampling, come from the model's generation config.
        tokenizer: a folder, or a name on the Hub.

    Raises:
        OSError: the tokenizer does not exist.
        ValueError: an option is unknown or out of range, the model cannot generate, or there is no tokenizer.
    """

    def __init__(self, network: HFNetwork, options: Mapping[str, Any], tokenizer: str | None) -> None:
        task = network.task
        allowed = "needs the task causal_lm or seq2seq_lm"
        refuse_if(task not in ("causal_lm", "seq2seq_lm"), "generation", dict(options), f"{allowed}, not {task}")
        reason = "generation needs the model's tokenizer, a folder or a name on the Hub"
        refuse_if(tokenizer is None, "tokenizer", None, reason)
        known = {*import_hf("transformers").GenerationConfig().to_dict(), *OWN} - {"max_length", "num_return_sequences"}
        check_keys("generation", options, sorted(known), "generation")
        own = {**OWN, **{name: value for name, value in options.items() if name in OWN}}
        check_whole("max_new_tokens", options.get("max_new_tokens"), 1, "a number of tokens")
        check_whole("num_beams", options.get("num_beams", 1), 1)
        check_whole("prompt_tokens", own["prompt_tokens"], 1, "a number of tokens", none="what the labels show")
        check_whole("top_k", own["top_k"], 1, none="all tokens")
        check_number("temperature", own["temperature"], "(0, inf)")
        check_number("top_p", own["top_p"], "(0, 1]", none="all tokens")
        is_wrong = own["do_sample"] and options.get("num_beams", 1) > 1
        refuse_if(is_wrong, "generation", dict(options), "beams are not sampled; leave out num_beams or do_sample")
        unused = [
            name for name in ("temperature", "top_k", "top_p", "seed") if name in options and not own["do_sample"]
        ]
        refuse_if(bool(unused), "generation", dict(options), f"{', '.join(unused)} needs do_sample: true")
        self._task = task
        self._own = own
        self._tokenizer = load_pretrained_tokenizer(str(tokenizer), network.added_tokens)
        self._config = self._make_config(network.base, {name: options[name] for name in options if name not in OWN})
        positions = getattr(network, "context", None) or positions_of(network.config) if task == "causal_lm" else None
        new = self._config.max_new_tokens
        self._longest = None if positions is None else positions - new
        reason = f"leaves no room for a prompt in the {positions} positions of the model"
        refuse_if(self._longest is not None and self._longest < 1, "max_new_tokens", new, reason)

    def _make_config(self, base: Any, options: Mapping[str, Any]) -> Any:
        """Return transformers' config, with the end and padding tokens of the model, or else of the tokenizer."""
        config = import_hf("transformers").GenerationConfig(do_sample=False)
        theirs = base.generation_config
        ends = theirs.eos_token_id if theirs.eos_token_id is not None else self._tokenizer.eos_token_id
        self._ends = {*(ends if isinstance(ends, Sequence) else [] if ends is None else [ends])}
        pads = (theirs.pad_token_id, self._tokenizer.pad_token_id, *self._ends, 0)
        config.update(eos_token_id=ends, pad_token_id=next(pad for pad in pads if pad is not None))
        try:
            config.update(**options)
            config.validate()
        except (ValueError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise wrong_argument("generation", dict(options), f"transformers refuses it: {reason}") from error
        return config

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that transformers' own `generate` needs for such texts; it samples with streams of its own."""
        names = ("do_sample", "temperature", "top_k", "top_p") if self._own["do_sample"] else ("do_sample",)
        sampling = {name: self._own[name] for name in names if self._own[name] is not None}
        return {**self._config.to_diff_dict(), **sampling}

    def __call__(self, network: HFNetwork, tokens: Tensor, mask: Tensor | None, labels: Tensor | None) -> Texts:
        """Return the texts of a batch; it waits for the device.

        Args:
            network: the network, in evaluation mode.
            tokens: the tokens `(N, T)` of the rows.
            mask: 1 at tokens and 0 at padding, `(N, T)`; None: there is no padding.
            labels: the labels, with -100 at other tokens: of a causal model `(N, T)`, each at its own token; otherwise
                the tokens of the reference.

        Raises:
            ValueError: a row has no prompt.
        """
        keeps = [None] * len(tokens) if mask is None else mask.bool().tolist()
        rows = [_kept(row, keep) for row, keep in zip(tokens.tolist(), keeps, strict=True)]
        marks = [None] * len(rows) if labels is None else labels.tolist()
        if self._task == "seq2seq_lm":
            pairs = [(row, _labeled(mark or [])) for row, mark in zip(rows, marks, strict=True)]
        else:
            kept = [mark and _kept(mark, keep) for mark, keep in zip(marks, keeps, strict=True)]
            pairs = [self._split(row, mark) for row, mark in zip(rows, kept, strict=True)]
        prompts, references = zip(*pairs, strict=True)
        return Texts(*map(self._decode, (prompts, references, self.generate(network, prompts))))

    def generate(self, network: HFNetwork, prompts: Sequence[Tokens]) -> list[Tokens]:
        """Return the new tokens for each prompt, without the end token. Causal models need padding on the left."""
        is_causal = self._task == "causal_lm"
        device = next(network.parameters()).device
        rows = [torch.tensor(prompt[-(self._longest or len(prompt)) :]) for prompt in prompts]
        side = "left" if is_causal else "right"
        padding: Any = {"batch_first": True, "padding_side": side}
        tokens = pad_sequence(rows, padding_value=self._config.pad_token_id, **padding)
        mask = pad_sequence([torch.ones_like(row) for row in rows], **padding)
        with quiet_transformers(), one_sequence_per_row(), torch.no_grad():
            sequences = network.base.generate(
                input_ids=tokens.to(device),
                attention_mask=mask.to(device),
                generation_config=self._config,
                logits_processor=self._choosing(rows, device),
            )
        new = sequences[:, tokens.shape[1] if is_causal else 1 :].tolist()  # the intended sync
        return [_until(row, self._ends) for row in new]

    def _choosing(self, prompts: Sequence[Tensor], device: torch.device) -> list[Any]:
        """Return processors of the scores, after which transformers takes the token with the highest one."""
        if not self._own["do_sample"]:
            return []
        processors = import_hf("transformers.generation.logits_process")
        scaled: list[Any] = [processors.TemperatureLogitsWarper(float(self._own["temperature"]))]
        if (k := self._own["top_k"]) is not None:
            scaled.append(processors.TopKLogitsWarper(k))
        if (p := self._own["top_p"]) is not None and p < 1:
            scaled.append(processors.TopPLogitsWarper(p))
        seeds = [stream_seed(self._own["seed"], "generation", *prompt.tolist()) for prompt in prompts]
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

        def add_noise(_: Tensor, scores: Tensor) -> Tensor:
            # The Gumbel trick: the largest of score - log(exponential noise) is a draw from the softmax of the scores.
            noise = [torch.empty_like(scores[0]).exponential_(generator=generator) for generator in generators]
            return scores - torch.stack(noise).log()

        return [*scaled, add_noise]

    def _split(self, tokens: Tokens, labels: Tokens | None) -> tuple[Tokens, Tokens]:
        """Return the prompt and the reference of a row: its last labeled span, or what follows `prompt_tokens`."""
        if (start := self._own["prompt_tokens"]) is not None:
            return tokens[:start], tokens[start : start + self._config.max_new_tokens]
        marks = [label != IGNORED_TARGET for label in labels or []]
        if True not in marks:
            return tokens, []
        end = len(marks) - marks[::-1].index(True)
        start = next((place + 1 for place in range(end - 1, -1, -1) if not marks[place]), 0)
        if start == 0:
            reason = "the labels of a row have no -100 before the answer; give the number of tokens that are its prompt"
            raise wrong_argument("prompt_tokens", None, reason)
        return tokens[:start], tokens[start:end]

    def _decode(self, rows: Sequence[Tokens]) -> list[str]:
        return [self._tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]


def _kept(tokens: Tokens, keep: Sequence[bool] | None) -> Tokens:
    return tokens if keep is None else [*compress(tokens, keep)]


def _labeled(labels: Tokens) -> Tokens:
    return [label for label in labels if label != IGNORED_TARGET]


def _until(tokens: Tokens, ends: Collection[int]) -> Tokens:
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
