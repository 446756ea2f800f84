"""Token sequences generated from a seed, of any length and number: for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.core.randomness import stream_seed
from runner.data.fake import FakeLoader, data_function
from runner.data.loaders import TensorLoader
from runner.failures.checks import check_counts, check_whole


@dataclass(frozen=True)
class SyntheticTokens:
    """Return loaders of sequences that can be learned: samples of one random Markov chain.

    There is a training loader, an evaluation loader and, with `test_samples`, a test loader.

    Batches are `(inputs, targets)`, both int64 `(N, context)` in [0, vocab_size); the targets are the inputs shifted by
    one token. The lowest possible loss is the entropy of the chain, the `entropy_rate` of its `transition_matrix`.

    Args:
        num_samples: number of training sequences.
        context: length of a sequence, in tokens.
        vocab_size: number of different tokens.
        batch_size: sequences in a training batch, all ranks together.
        eval_samples: number of evaluation sequences, of the same chain.
        eval_batch_size: sequences in an evaluation or test batch, all ranks together.
        test_samples: number of test sequences, of the same chain, drawn after all others; 0: no test loader.
        seed: seed of the chain, of the sequences and of the order of the training samples.

    Raises:
        ValueError: a number is below 1, or vocab_size is below 2.
    """

    num_samples: int = 1024
    context: int = 128
    vocab_size: int = 64
    batch_size: int = 8
    eval_samples: int = 128
    eval_batch_size: int = 64
    test_samples: int = 0
    seed: int = 0

    def load(self) -> tuple[TensorLoader, ...]:
        """Return the loaders."""
        self._check()
        transitions = transition_matrix(self.vocab_size, self.seed)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "sequences"))
        tokens = _run_chain(transitions, self.num_samples + self.eval_samples, self.context, generator)
        held_out = [tokens[self.num_samples :]]
        if self.test_samples:
            held_out.append(_run_chain(transitions, self.test_samples, self.context, generator))
        tokens = tokens[: self.num_samples]
        train = TensorLoader(tokens[:, :-1], tokens[:, 1:], batch_size=self.batch_size, shuffle=True, seed=self.seed)
        train.equal_targets = True
        size = self.eval_batch_size
        return train, *(TensorLoader(part[:, :-1], part[:, 1:], batch_size=size, shuffle=False) for part in held_out)

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return loaders of made-up batches."""
        self._check()

        def make(samples: int) -> tuple[Tensor, Tensor]:
            # The largest token, so that a model with too small a vocabulary fails.
            tokens = torch.full((samples, self.context), self.vocab_size - 1)
            return tokens, tokens

        held_out = [size for size in (self.eval_samples, self.test_samples) if size]
        train = FakeLoader(make, self.num_samples, self.batch_size)
        return train, *(FakeLoader(make, size, self.eval_batch_size) for size in held_out)

    def _check(self) -> None:
        check_counts(num_samples=self.num_samples, context=self.context, eval_samples=self.eval_samples)
        check_whole("test_samples", self.test_samples, 0)
        check_whole("vocab_size", self.vocab_size, 2)


load_synthetic_tokens = data_function("load_synthetic_tokens", SyntheticTokens)


def _run_chain(transitions: Tensor, sequences: int, context: int, generator: torch.Generator) -> Tensor:
    """Draw sequences of a chain, int64 `(sequences, context + 1)`."""
    tokens = torch.empty(sequences, context + 1, dtype=torch.int64)
    tokens[:, 0] = torch.randint(len(transitions), (sequences,), generator=generator)
    for position in range(context):
        probabilities = transitions[tokens[:, position]]
        tokens[:, position + 1] = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    return tokens


def transition_matrix(vocab_size: int, seed: int) -> Tensor:
    """Return the probabilities `(V, V)` of the next token (columns) after each token (rows).

    Raises:
        ValueError: vocab_size is below 2.
    """
    check_whole("vocab_size", vocab_size, 2)
    generator = torch.Generator().manual_seed(stream_seed(seed, "chain"))
    # The factor makes a few successors of each token likely, so that there is a lot to learn.
    return torch.softmax(3.0 * torch.randn(vocab_size, vocab_size, generator=generator), dim=1)


def entropy_rate(transitions: Tensor) -> float:
    """Return the entropy rate of a chain in bits per token, given its transition matrix `(V, V)`."""
    # In single precision the rows do not quite sum to 1, which a high power would amplify.
    transitions = transitions.double() / transitions.double().sum(dim=1, keepdim=True)
    stationary = torch.linalg.matrix_power(transitions, 1024)[0]
    return float((stationary @ torch.special.entr(transitions).sum(dim=1)) / torch.log(torch.tensor(2.0)))
