"""What watches or averages many parameters asks for as many operations as with few, on lists of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner import Callback, ClassificationModel, Trainer
from runner.algorithms import EMA
from runner.callbacks import InMemoryLogger, OptimizerMonitor, StateDigest
from runner.checkpoints.digest import norm
from runner.data import TensorLoader

FEW, MANY = 5, 50
ADDED: dict[str, dict[str, Any]] = {
    "EMA": {"algorithms": [lambda: EMA("10ba")]},
    "OptimizerMonitor": {"callbacks": [lambda: OptimizerMonitor(batch_log_interval=1)]},
    "StateDigest": {"callbacks": [lambda: StateDigest("1ba")]},
}


class Vectors(nn.Module):
    def __init__(self, tensors: int):
        super().__init__()
        self.parts = nn.ParameterList(torch.full((3,), 0.1) for _ in range(tensors))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.stack([*self.parts]).sum(0)


class Calls(TorchDispatchMode):
    """Counts all operations of this thread, views too."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Watched(Callback):
    """Counts the operations of the last two of five batches."""

    def __init__(self):
        self.calls = Calls()

    def before_dataloader(self, state, logger):
        if state.timestamp.batch == 3:
            self.calls.__enter__()

    def epoch_end(self, state, logger):
        self.calls.__exit__(None, None, None)


def count(tensors: int, run_dir: Path, added: dict[str, Any]) -> int:
    watched = Watched()
    made: dict[str, Any] = {key: [make() for make in kinds] for key, kinds in added.items()}
    with Trainer(
        model=ClassificationModel(Vectors(tensors), 3),
        train_dataloader=TensorLoader(torch.rand(10, 3), torch.arange(10) % 3, batch_size=2, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        max_duration="1ep",
        loggers=[InMemoryLogger()],
        device="cpu",
        run_dir=run_dir,
        **{**made, "callbacks": [watched, *made.get("callbacks", [])]},
    ) as trainer:
        trainer.fit()
    return watched.calls.count


@pytest.mark.parametrize("name", ADDED)
def test_operations_do_not_grow_with_the_number_of_parameters(name: str, tmp_path: Path):
    more = [count(tensors, tmp_path, ADDED[name]) - count(tensors, tmp_path, {}) for tensors in (FEW, MANY)]
    assert 0 < more[0] == more[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_norm_of_many_tensors_is_the_sum_of_theirs_to_the_bit(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (1,), (7,), (33, 5), (0,), (4, 3, 2), (1000,)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]
    numbers = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    expected = sum(float(one.double().norm()) ** 2 for one in numbers) ** 0.5
    assert norm(tensors) == norm([one.clone().requires_grad_() for one in tensors]) == expected
    assert norm([]) == 0.0
