"""Runs on data with planted faults, for tests and `benchmarks/guards.py`: batches of nonsense, and wrong labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, ClassificationModel, LanguageModel, Trainer
from runner.callbacks import InMemoryLogger, SampleLedger
from runner.data import TensorLoader, load_digits
from runner.models import GPT
from runner.optim.schedulers import cosine_annealing

NONSENSE = range(557, 565)
"""The batches, of 700, that are replaced by nonsense."""


def make_text(windows: int, seed: int) -> Tensor:
    """Return windows `(N, 33)` of a language of 32 tokens, in which only three tokens may follow the previous two."""
    grammar = torch.randint(32, (4, 32, 3), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(32, (windows, 33), generator=generator)
    for position in range(2, 33):
        choice = torch.randint(3, (windows,), generator=generator)
        text[:, position] = grammar[text[:, position - 2] % 4, text[:, position - 1], choice]
    return text


def train_language(batches: int, seed: int, bad: range, *algorithms: Algorithm) -> tuple[float, int]:
    """Train a small GPT, and return its final evaluation loss and the number of rollbacks by `SpikeGuard`.

    Args:
        batches: number of batches of text.
        seed: seed of the weights and of the order.
        bad: batches in which all samples are replaced by the same nonsense.
        *algorithms: algorithms of the Trainer.
    """
    text, held_out = make_text(8 * batches, 1), make_text(256, 2)
    inputs, targets = text[:, :-1].clone(), text[:, 1:].clone()
    loader = TensorLoader(inputs, targets, batch_size=8, shuffle=True, seed=seed)
    for batch in bad:
        samples = loader.order.indices(0, batch)
        inputs[samples] = 0
        targets[samples] = torch.arange(32).flip(0)
    torch.manual_seed(seed)
    memory = InMemoryLogger()
    with Trainer(
        model=LanguageModel(GPT(vocab_size=32, context=32, d_model=32, n_layers=1, n_heads=2)),
        train_dataloader=loader,
        eval_dataloader=TensorLoader(held_out[:, :-1], held_out[:, 1:], batch_size=256, shuffle=False),
        optimizers=lambda params: torch.optim.AdamW(params, lr=1e-2),
        schedulers=cosine_annealing(alpha_f=0.02),
        max_duration="1ep",
        seed=seed,
        algorithms=[*algorithms],
        loggers=[memory],
        device="cpu",
    ) as trainer:
        trainer.fit()
    return trainer.state.eval_metric_values["eval"]["loss"].item(), len(memory.data.get("spike_guard/rollbacks", []))


def flip_labels(seed: int) -> tuple[TensorLoader, Tensor]:
    """Return the digits with 5 % of their labels changed, and the indices of these samples."""
    train, *_ = load_digits(batch_size=64, eval_batch_size=64, seed=seed)
    images, labels = train.tensors
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(labels), generator=generator)[: len(labels) // 20]
    labels = labels.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, wrong.shape, generator=generator)) % 10
    train.tensors = (images, labels)
    return train, wrong


def keep_ledger(train: TensorLoader, seed: int, **arguments: Any) -> InMemoryLogger:
    """Train a small network for 8 epochs with a ledger that lists 8 % of the samples, and return what was logged."""
    torch.manual_seed(seed)
    memory = InMemoryLogger()
    with Trainer(
        model=ClassificationModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 10),
        train_dataloader=train,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
        max_duration="8ep",
        seed=seed,
        callbacks=[SampleLedger(0.08)],
        loggers=[memory],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return memory
