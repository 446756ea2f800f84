"""Complex parameters and sparse gradients in checkpoints, norms, clipping, SAM, averages, digests and Muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_runs import program_of
from torch import Tensor, nn

from runner import Algorithm, Callback, ClassificationModel, Trainer
from runner.algorithms import EMA, SAM, GradientClipping
from runner.callbacks import CheckpointSaver, InMemoryLogger, OptimizerMonitor, StateDigest
from runner.checkpoints.digest import norm
from runner.checkpoints.hashing import digest
from runner.data import TensorLoader
from runner.device.numbers import numbers_of
from runner.distributed.ranks import get_global_rank
from runner.optim.muon import split_parameters


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, inputs):
        return (F.one_hot(inputs, 6).to(self.weight.dtype) @ self.weight).abs()


class Embedding(nn.Module):
    def __init__(self, sparse: bool = True):
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, inputs):
        return self.head(self.table(inputs))


KINDS = {"complex": Complex, "sparse": Embedding}


def make_model(kind: str, **options: Any) -> ClassificationModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ClassificationModel(KINDS[kind](**options), 3)


def loader() -> TensorLoader:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(5, (24,), generator=generator)  # some rows get no gradient
    return TensorLoader(inputs, inputs % 3, batch_size=8, shuffle=False)


def fit(model: Any, *hooks: Any, **options: Any) -> Trainer:
    with Trainer(
        model=model,
        train_dataloader=loader(),
        eval_dataloader=loader(),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        algorithms=[hook for hook in hooks if isinstance(hook, Algorithm)],
        callbacks=[hook for hook in hooks if not isinstance(hook, Algorithm)],
        max_duration="2ep",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.state.unwrapped_model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_saved_digested_and_resumed_bit_for_bit(kind: str, tmp_path: Path):
    saver = CheckpointSaver(save_interval="1ba", keep=-1)
    whole = fit(make_model(kind), saver, StateDigest(), run_dir=tmp_path / "run")
    resumed = fit(make_model(kind), resume_path=tmp_path / "run" / "checkpoints" / "ep0-ba2")
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)


def test_a_weight_with_an_infinite_imaginary_part_is_not_finite():
    from runner.callbacks._soundness import find_fault

    weights = {"w": torch.ones(3, dtype=torch.complex64)}
    assert find_fault({"model.pt": weights}, {"w"}, 0.0) is None
    weights["w"].imag[1] = float("inf")
    assert find_fault({"model.pt": weights}, {"w"}, 0.0) == "the weights are not finite: 'w'"


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_a_sparse_gradient_is_clipped_like_a_dense_one(kind: str):
    dense, sparse = (
        fit(make_model("sparse", sparse=is_sparse), GradientClipping(kind, 0.01)) for is_sparse in (False, True)
    )
    torch.testing.assert_close(weights_of(sparse), weights_of(dense), rtol=1e-12, atol=1e-14)


def test_sam_with_sparse_gradients_equals_sam_with_dense_ones():
    dense, sparse = (fit(make_model("sparse", sparse=is_sparse), SAM()) for is_sparse in (False, True))
    torch.testing.assert_close(weights_of(sparse), weights_of(dense), rtol=1e-12, atol=1e-14)


class LastGradient(Callback):
    """Keeps the gradient of the first parameter in the last batch."""

    def after_train_batch(self, state, logger):
        gradient = next(state.unwrapped_model.parameters()).grad
        assert gradient is not None
        self.gradient = gradient.clone()


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_the_real_numbers_of_a_complex_gradient_are_clipped(kind: str):
    callback = LastGradient()
    fit(make_model("complex"), GradientClipping(kind, 0.01), callback)
    numbers = torch.view_as_real(callback.gradient)
    size = numbers.norm() if kind == "norm" else numbers.abs().max()
    assert float(size) == pytest.approx(0.01, rel=1e-4)


def test_the_norm_of_a_complex_tensor_is_that_of_its_real_numbers():
    tensor = torch.tensor([3 + 4j, 0j])
    assert norm([tensor]) == 5.0 and float(numbers_of(tensor.conj()).norm()) == 5.0
    memory, callback = InMemoryLogger(), LastGradient()
    fit(make_model("complex"), OptimizerMonitor(batch_log_interval=1), memory, callback)
    logged = float(memory.data["l2_norm/grad/module.weight"][-1][1])
    assert logged == pytest.approx(float(torch.view_as_real(callback.gradient).norm()))


def test_ema_averages_complex_weights():
    trainer = fit(make_model("complex"), EMA(half_life=None, smoothing=0.9))
    average = trainer.state.algorithms[0].state_dict()["average"]["module.weight"]
    assert not torch.equal(average, weights_of(trainer)["module.weight"])


def test_digests_of_sparse_and_conjugated_tensors_depend_on_their_values():
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.ones(3), (4,), check_invariants=False)
    same = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([2.0, 1.0]), (4,), check_invariants=False)
    assert digest(sparse) == digest(same) != digest(same * 2)
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    assert digest(conjugated) == digest(conjugated.clone())


def test_muon_leaves_complex_matrices_to_the_fallback():
    model = make_model("complex")
    model.extra = nn.Linear(3, 3)
    matrices, others = split_parameters(model, ())
    assert len(matrices) == 1 and any(parameter.is_complex() for parameter in others)


def on_ranks() -> None:
    """Train on each rank, and save the weights."""
    for kind in KINDS:
        trainer = fit(make_model(kind), GradientClipping("norm", 1.0))
        torch.save(weights_of(trainer), f"{kind}-{get_global_rank()}.pt")


def test_two_ranks_train_the_weights_of_a_single_process(
    tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run_ranks(program_of("device/test_numbers", "on_ranks"), 2)
    for kind in KINDS:
        single = weights_of(fit(make_model(kind), GradientClipping("norm", 1.0)))
        first, second = (torch.load(f"{kind}-{rank}.pt") for rank in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, single, rtol=1e-10, atol=1e-12)
