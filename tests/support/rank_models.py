"""Models and data that are the same on each rank and in a single process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import ClassificationModel, LanguageModel, Model

VOCABULARY = 7


def seeded(make: Any) -> nn.Module:
    """Return a network in float64, with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def class_data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(2, (num_samples,), generator=generator)


def token_data(num_samples: int) -> tuple[Tensor, Tensor]:
    """Return sequences with 0 to 6 targets that are not ignored; of each eight, three of the last four have none."""
    generator = torch.Generator().manual_seed(num_samples)
    tokens = torch.randint(VOCABULARY, (num_samples, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(num_samples):
        targets[row, row * 5 % 7 if row % 8 < 4 else row % 8 // 7 :] = -100
    return tokens[:, :-1].contiguous(), targets


def window_data(num_samples: int) -> tuple[Tensor, Tensor]:
    """Return sequences without ignored targets."""
    tokens = torch.randint(VOCABULARY, (num_samples, 7), generator=torch.Generator().manual_seed(num_samples))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Classifier(ClassificationModel):
    """A small classifier with optional modules between its layers."""

    def __init__(self, *between: nn.Module):
        super().__init__(seeded(lambda: nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 2))), 2)


def weighted_classifier() -> Model:
    """Return a classifier whose loss weighs its classes differently."""
    return ClassificationModel(Classifier().module, 2, nn.CrossEntropyLoss(torch.tensor([0.2, 3.0]).double()))


def leaving_out() -> Model:
    """Return a classifier whose loss ignores the samples of class 1."""
    return ClassificationModel(Classifier().module, 2, nn.CrossEntropyLoss(ignore_index=1))


def language_model() -> Model:
    return LanguageModel(seeded(lambda: nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))))


class SmallMemory(Classifier):
    """Runs out of memory in training if a batch has more than `most` samples."""

    def __init__(self, most: int, *between: nn.Module):
        super().__init__(*between)
        self.most = most

    def forward(self, batch):
        outputs = super().forward(batch)
        if self.training and len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return outputs


class OwnStep(Classifier):
    """Computes its gradients in two backward passes without DDP's forward, as a GAN does for its two networks."""

    def metrics(self, train):
        return {} if train else super().metrics(train)

    def training_step(self, state):
        loss = self.loss(self.module(state.microbatch[0]), state.microbatch)
        parameters = list(self.parameters())
        (loss * state.loss_scale).backward(inputs=parameters[:2], retain_graph=True)
        (loss * state.loss_scale).backward(inputs=parameters[2:])
        return loss


class StepsItself(OwnStep):
    """Steps its optimizer twice a batch."""

    manual_optimization = True

    def training_step(self, state):
        loss = None
        for _ in range(2):
            state.optimizers[0].zero_grad()
            loss = super().training_step(state)
            state.optimizers[0].step()
        return loss
