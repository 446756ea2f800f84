"""Fixtures for the tests of algorithms: tiny runs in float64, their gradients, and a comparison with a resumed run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import Algorithm, ClassificationModel, LanguageModel, Trainer, replace_modules, save_checkpoint
from runner.data import TensorLoader
from runner.models import GPT, ResNet8

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # for imports of `observers`, `tasks` and `low_precision`

from observers import BatchRecord, StopAt  # noqa: E402

NUM_SAMPLES, BATCH_SIZE, NUM_CLASSES = 24, 8, 3


def make_data() -> tuple[Tensor, Tensor]:
    """Return images (24, 2, 4, 4), float64, and their classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 2, 4, 4, generator=generator, dtype=torch.float64)
    return images, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)


def make_model(batch_norm: bool = False) -> ClassificationModel:
    """Return a small classifier in float64 with fixed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norm = [nn.BatchNorm1d(6)] if batch_norm else []
        net = nn.Sequential(nn.Flatten(), nn.Linear(32, 6), *norm, nn.Tanh(), nn.Linear(6, NUM_CLASSES))
    return ClassificationModel(net.double(), NUM_CLASSES)


def make_resnet(norms: bool = True) -> ClassificationModel:
    """Return a residual network in float64 with fixed weights; without its norms it treats samples independently."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = ResNet8(in_channels=2, num_classes=NUM_CLASSES, width=4).double()
    if not norms:
        replace_modules(net, {nn.BatchNorm2d: lambda norm, index: nn.Identity()})
    return ClassificationModel(net, NUM_CLASSES)


MakeModel = Callable[[], ClassificationModel]


@pytest.fixture
def resnet() -> MakeModel:
    """Return a function that makes a residual network of three blocks in float64."""
    return make_resnet


@pytest.fixture
def resnet_without_norms() -> MakeModel:
    """Return a function that makes the network of `resnet` without norms, which would depend on microbatches."""
    return lambda: make_resnet(norms=False)


def make_gpt() -> LanguageModel:
    """Return a GPT of two blocks in float64; its fixed weights are large, because small weights hide errors."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = GPT(vocab_size=11, context=12, d_model=16, n_layers=2, n_heads=4).double()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.3)
    return LanguageModel(net)


@pytest.fixture
def language() -> dict[str, Any]:
    """Return arguments of `make_trainer` for a GPT: 24 sequences of 12 tokens, three batches per epoch."""
    windows = torch.randint(11, (NUM_SAMPLES, 13), generator=torch.Generator().manual_seed(0))
    data = windows[:, :-1], windows[:, 1:]
    return {
        "build": make_gpt,
        "train_dataloader": TensorLoader(*data, batch_size=BATCH_SIZE, shuffle=True),
        "eval_dataloader": TensorLoader(*data, batch_size=BATCH_SIZE, shuffle=False),
    }


@pytest.fixture
def without_compiling() -> Iterator[None]:
    """Run compiled code eagerly, because compiling takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """Return a function that makes a Trainer of a new model, three batches per epoch; arguments go to the Trainer."""

    def make(
        *algorithms: Algorithm,
        batch_norm: bool = False,
        shuffle: bool = True,
        build: MakeModel | None = None,
        **arguments: Any,
    ) -> Trainer:
        data = make_data()
        defaults: dict[str, Any] = {
            "model": make_model(batch_norm) if build is None else build(),
            "train_dataloader": TensorLoader(*data, batch_size=BATCH_SIZE, shuffle=shuffle),
            "eval_dataloader": TensorLoader(*data, batch_size=BATCH_SIZE, shuffle=False),
            "optimizers": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            "max_duration": "6ba",
            "algorithms": list(algorithms),
            "device": "cpu",
            "run_dir": tmp_path / "run",
        }
        return Trainer(**(defaults | arguments))

    return make


@pytest.fixture
def train(make_trainer: MakeTrainer) -> Callable[..., BatchRecord]:
    """Return a function that trains six batches and returns the gradients of each."""

    def run(*algorithms: Algorithm, **arguments: Any) -> BatchRecord:
        record = BatchRecord()
        with make_trainer(*algorithms, callbacks=[record], **arguments) as trainer:
            trainer.fit()
        return record

    return run


@pytest.fixture
def check_resume(make_trainer: MakeTrainer, tmp_path: Path) -> Callable[..., None]:
    """Return a check that a run that is stopped and resumed is bit-identical to a run of six batches without a stop."""

    def weights(trainer: Trainer) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in trainer.state.unwrapped_model.state_dict().items()}

    def check(make_algorithms: Callable[[], Sequence[Algorithm]], stop_at: int = 4, **arguments: Any) -> None:
        with make_trainer(*make_algorithms(), **arguments) as whole:
            whole.fit()
            whole_metrics = whole.eval()
        callbacks = [*arguments.get("callbacks", []), StopAt(stop_at)]
        with make_trainer(*make_algorithms(), **{**arguments, "callbacks": callbacks}) as stopped:
            stopped.fit()
            save_checkpoint(stopped.state, tmp_path / "checkpoint")
        with make_trainer(*make_algorithms(), resume_path=tmp_path / "checkpoint", **arguments) as resumed:
            resumed.fit()
            resumed_metrics = resumed.eval()
        assert resumed.state.timestamp.batch == 6
        torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
        torch.testing.assert_close(resumed_metrics, whole_metrics, rtol=0, atol=0)
        assert not all(map(torch.equal, weights(stopped).values(), weights(whole).values()))

    return check
