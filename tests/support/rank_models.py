"""Models and data that are the same on each rank and in a single process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner import ClassificationModel, LanguageModel, Model

VOCABULARY = 7


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def class_data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(2, (num_samples,), generator=generator)


def token_data(num_samples: int) -> tuple[Tensor, Tensor]:
    """Sequences of which 0 to 6 targets count; most of the second half of them has none."""
    generator = torch.Generator().manual_seed(num_samples)
    tokens = torch.randint(VOCABULARY, (num_samples, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(num_samples):
        targets[row, row * 5 % 7 if row % 8 < 4 else row % 8 // 7 :] = -100
    return tokens[:, :-1].contiguous(), targets


def window_data(num_samples: int) -> tuple[Tensor, Tensor]:
    """Sequences of which all targets count."""
    tokens = torch.randint(VOCABULARY, (num_samples, 7), generator=torch.Generator().manual_seed(num_samples))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Classifier(ClassificationModel):
    def __init__(self, *between: nn.Module):
        super().__init__(seeded(lambda: nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 2))), 2)


def weighted_classifier() -> Model:
    """A classifier whose classes weigh differently."""
    return ClassificationModel(Classifier().module, 2, nn.CrossEntropyLoss(torch.tensor([0.2, 3.0]).double()))


def leaving_out() -> Model:
    """A classifier whose loss leaves out the samples of class 1."""
    return ClassificationModel(Classifier().module, 2, nn.CrossEntropyLoss(ignore_index=1))


def language_model() -> Model:
    return LanguageModel(seeded(lambda: nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))))


class SmallMemory(Classifier):
    """Has room for `most` samples."""

    def __init__(self, most: int, *between: nn.Module):
        super().__init__(*between)
        self.most = most

    def forward(self, batch):
        outputs = super().forward(batch)
        if self.training and len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return outputs


class OwnStep(Classifier):
    """Leaves its gradients past DDP's forward, as a GAN does that takes those of its two networks one by one."""

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
