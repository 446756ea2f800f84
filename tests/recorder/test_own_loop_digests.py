"""A hand-written loop is compared with the same training by the Trainer: digests are equal, or name the difference.

Loop and Trainer use a model with batch norm, microbatches of unequal size, clipping, momentum and a schedule. Each
fault is a mistake that people make when they port a loop.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from runner import Recorder, Trainer, stream_seed
from runner.data import SampleOrder
from runner.models import ResNet8
from runner.verbs.compare import difference

EPOCHS, SIZE, MICROBATCH, LIMIT = 2, 250, 125, 0.65  # an epoch has batches of 250, 250, 250, 250 and 200
BATCHES = 5 * EPOCHS
COMMAND = (
    "model.module.width=4",
    f"data.batch_size={SIZE}",
    f"trainer.microbatch_size={MICROBATCH}",
    f"trainer.max_duration={EPOCHS}ep",
    "scheduler=linear",
    "algorithms=gradient_clipping",
    f"algorithms.gradient_clipping.clipping_threshold={LIMIT}",
    "callbacks=state_digest",
    "callbacks.state_digest.interval=1ba",
    "callbacks.state_digest.tensors=true",
)

# The first batch, part and tensor that differ because of a fault; "" if the part has no tensors.
FAULTS = {
    "a random number is drawn before the model": (1, "loss", ""),
    "labels are smoothed": (1, "loss", ""),
    "a layer is frozen": (1, "gradients", "head.weight"),
    "norms are not decayed": (1, "optimizer", "stem.1.weight/weight_decay"),
    "momentum is not Nesterov's": (1, "optimizer", "stem.0.weight/nesterov"),
    "the schedule is a step late": (2, "optimizer", "stem.0.weight/lr"),
    "gradients are not cleared": (2, "gradients", "stem.0.weight"),
    "gradients are not clipped": (1, "gradients", "stem.0.weight"),
    "microbatches of unequal size count the same": (5, "gradients", "stem.0.weight"),
    "the last batch is dropped": (5, "content", ""),
    "the order of the first epoch is repeated": (6, "content", ""),
    "the evaluation mode stays on": (6, "loss", ""),
    "momentum is lost after batch 7": (8, "optimizer", "stem.0.weight/momentum_buffer"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with the Trainer from a config, and return the run's folder."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("run"))
    try:
        with Trainer.from_config(*COMMAND) as trainer:
            trainer.fit()
            return trainer.state.run_dir.absolute()
    finally:
        os.chdir(before)


def train_by_hand(folder: Path, fault: str = "") -> None:
    """Train with a recorded hand-written loop, which may have one of the faults."""
    digits: Any = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = SampleOrder(1200, SIZE, seed=0, drop_last=fault == "the last batch is dropped")
    torch.manual_seed(stream_seed(0, "model"))
    if fault == "a random number is drawn before the model":
        torch.rand(1)
    model = ResNet8(width=4)
    names = dict(model.named_parameters())
    if fault == "a layer is frozen":
        names["head.weight"].requires_grad_(False)
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": fault != "momentum is not Nesterov's"}
    norms = [weight for weight in model.parameters() if weight.dim() == 1 and fault == "norms are not decayed"]
    decayed = [weight for weight in model.parameters() if all(weight is not norm for norm in norms)]
    groups = [{"params": decayed, "weight_decay": 5e-4}, *([{"params": norms, "weight_decay": 0.0}] if norms else [])]
    optimizer = torch.optim.SGD(groups, **settings)
    late = fault == "the schedule is a step late"
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - max(step - late, 0) / BATCHES)
    with Recorder({"seed": 0}, folder=folder, destinations=[]) as recorder:
        recorder.watch(model, optimizer)
        for epoch in range(EPOCHS):
            model.train(not (fault == "the evaluation mode stays on" and epoch))
            repeated = fault == "the order of the first epoch is repeated"
            for indices in order.permutation(0 if repeated else epoch).split(SIZE):
                if fault == "the last batch is dropped" and len(indices) < SIZE:
                    continue
                if fault != "gradients are not cleared":
                    optimizer.zero_grad()
                parts = [*zip(images[indices].split(MICROBATCH), labels[indices].split(MICROBATCH), strict=True)]
                loss = torch.zeros(())
                for inputs, targets in parts:
                    smoothing = 0.1 if fault == "labels are smoothed" else 0.0
                    mean = F.cross_entropy(model(inputs), targets, label_smoothing=smoothing)
                    is_even = fault == "microbatches of unequal size count the same"
                    weight = 1 / len(parts) if is_even else len(inputs) / len(indices)
                    (mean * weight).backward()
                    loss = loss + mean.detach() * (len(inputs) / len(indices))
                if fault != "gradients are not clipped":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
                if fault == "momentum is lost after batch 7" and schedule.last_epoch == 7:
                    optimizer.state.clear()
                optimizer.step()
                recorder.batch(loss, (images[indices], labels[indices]))
                schedule.step()


def test_a_hand_written_loop_has_the_digests_of_the_trainer(run: Path, tmp_path: Path):
    train_by_hand(tmp_path / "own")
    comparison = difference(run, tmp_path / "own")
    assert comparison.is_none and comparison.agreed == BATCHES, str(comparison)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_of_a_loop_names_batch_and_tensor(run: Path, tmp_path: Path, fault: str):
    train_by_hand(tmp_path / "own", fault)
    batch, part, tensor = FAULTS[fault]
    first = difference(run, tmp_path / "own")
    assert (first.batch, first.agreed) == (batch, batch - 1), str(first)
    assert part in first.parts and (not tensor or tensor in first.tensors.get(part, [])), str(first)
    assert part == first.parts[0] or part == "optimizer", str(first)
