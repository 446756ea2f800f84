"""Distillation from a frozen teacher that stays in evaluation mode, compared with a hand-written loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, softmax
from torch.optim import SGD

from runner import Model, Trainer
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader

BATCH_SIZE = 4


def make_data() -> Tensor:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(0))


def make_teacher() -> nn.Module:
    """Return a frozen network; its batch norm and dropout would change the targets in training mode."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    return teacher.eval().requires_grad_(False)


def make_student() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(5, 3)


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    return kl_div(log_softmax(student, dim=1), softmax(teacher, dim=1), reduction="batchmean")


class Distillation(Model):
    def __init__(self) -> None:
        super().__init__()
        self.student = make_student()
        self.teacher = make_teacher()

    def train(self, mode: bool = True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch):
        return self.student(batch[0])

    def loss(self, outputs, batch):
        with torch.no_grad():
            targets = self.teacher(batch[0])
        return distance(outputs, targets)


def fit(duration: str, **arguments) -> Distillation:
    model = Distillation()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(make_data(), make_data(), batch_size=BATCH_SIZE, shuffle=False),
        eval_dataloader=TensorLoader(make_data(), make_data(), batch_size=BATCH_SIZE, shuffle=False),
        optimizers=lambda parameters: SGD(parameters, lr=0.5, momentum=0.9, weight_decay=0.1),
        max_duration=duration,
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return model


@pytest.mark.parametrize("arguments", [{}, {"grad_accum": 2}])
def test_distillation_equals_a_hand_written_loop_and_leaves_the_teacher_unchanged(arguments: dict[str, int]):
    model = fit("3ep", **arguments)
    student, teacher = make_student(), make_teacher()
    optimizer = SGD(student.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        for inputs in make_data().split(BATCH_SIZE):
            optimizer.zero_grad()
            distance(student(inputs), teacher(inputs)).backward()
            optimizer.step()
    torch.testing.assert_close(model.student.state_dict(), student.state_dict())
    unchanged = teacher.state_dict()
    assert all(torch.equal(value, unchanged[name]) for name, value in model.teacher.state_dict().items())
    assert not any(module.training for module in model.teacher.modules())


def test_distillation_resumes_bit_for_bit(tmp_path: Path):
    fit("6ba", run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba")])
    resumed, whole = fit("3ep", resume_path=tmp_path), fit("3ep")
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
