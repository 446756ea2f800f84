"""Complex parameters and sparse gradients, wherever norms, checks, clipping, averages and digests meet them."""

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
    def __init__(self, sparse: bool = False):
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
        algorithms=[one for one in hooks if isinstance(one, Algorithm)],
        callbacks=[one for one in hooks if not isinstance(one, Algorithm)],
        max_duration="2ep",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.state.unwrapped_model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_saved_digested_and_resumed(kind: str, tmp_path: Path):
    saver = CheckpointSaver(save_interval="1ba", keep=-1)
    whole = fit(make_model(kind), saver, StateDigest(), run_dir=tmp_path / "run")
    resumed = fit(make_model(kind), resume_path=tmp_path / "run" / "checkpoints" / "ep0-ba2")
    assert all(torch.equal(one, weights_of(resumed)[name]) for name, one in weights_of(whole).items())


def test_a_weight_that_is_not_finite_in_its_imaginary_part_is_not_saved():
    from runner.callbacks._soundness import find_fault

    weights = {"w": torch.ones(3, dtype=torch.complex64)}
    assert find_fault({"model.pt": weights}, {"w"}, 0.0) is None
    weights["w"].imag[1] = float("inf")
    assert find_fault({"model.pt": weights}, {"w"}, 0.0) == "the weights are not finite: 'w'"


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_a_sparse_gradient_is_clipped_like_a_dense_one(kind: str):
    dense, sparse = (fit(make_model("sparse", sparse=one), GradientClipping(kind, 0.01)) for one in (False, True))
    for name, value in weights_of(dense).items():
        torch.testing.assert_close(weights_of(sparse)[name], value, rtol=1e-12, atol=1e-14)


def test_sam_climbs_along_sparse_gradients():
    dense, sparse = (fit(make_model("sparse", sparse=one), SAM()) for one in (False, True))
    for name, value in weights_of(dense).items():
        torch.testing.assert_close(weights_of(sparse)[name], value, rtol=1e-12, atol=1e-14)


class LastGradient(Callback):
    def after_train_batch(self, state, logger):
        gradient = next(state.unwrapped_model.parameters()).grad
        assert gradient is not None
        self.gradient = gradient.clone()


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_a_complex_gradient_is_clipped(kind: str):
    seen = LastGradient()
    fit(make_model("complex"), GradientClipping(kind, 0.01), seen)
    numbers = torch.view_as_real(seen.gradient)
    size = numbers.norm() if kind == "norm" else numbers.abs().max()
    assert float(size) == pytest.approx(0.01, rel=1e-4)


def test_norms_of_complex_tensors_are_those_of_their_numbers():
    tensor = torch.tensor([3 + 4j, 0j])
    assert norm([tensor]) == 5.0 and float(numbers_of(tensor.conj()).norm()) == 5.0
    memory, seen = InMemoryLogger(), LastGradient()
    fit(make_model("complex"), OptimizerMonitor(batch_log_interval=1), memory, seen)
    logged = float(memory.data["l2_norm/grad/module.weight"][-1][1])
    assert logged == pytest.approx(float(torch.view_as_real(seen.gradient).norm()))


def test_an_average_of_complex_weights_is_an_average():
    trainer = fit(make_model("complex"), EMA(half_life=None, smoothing=0.9))
    average = trainer.state.algorithms[0].state_dict()["average"]["module.weight"]
    assert not torch.equal(average, weights_of(trainer)["module.weight"])


def test_sparse_tensors_have_digests():
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.ones(3), (4,), check_invariants=False)
    same = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([2.0, 1.0]), (4,), check_invariants=False)
    assert digest(sparse) == digest(same) != digest(same * 2)
    assert digest(torch.ones(2, dtype=torch.complex64).conj()) == digest(
        torch.ones(2, dtype=torch.complex64).conj().clone()
    )


def test_muon_leaves_complex_matrices_to_the_rest():
    model = make_model("complex")
    model.extra = nn.Linear(3, 3)
    matrices, others = split_parameters(model, ())
    assert len(matrices) == 1 and any(one.is_complex() for one in others)


def on_ranks() -> None:
    """Save what ranks leave of models with complex parameters and sparse gradients."""
    for kind in KINDS:
        trainer = fit(make_model(kind), GradientClipping("norm", 1.0))
        torch.save(weights_of(trainer), f"{kind}-{get_global_rank()}.pt")


def test_ranks_are_one_process(tmp_path: Path, run_ranks: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(program_of("device/test_numbers", "on_ranks"), 2)
    for kind in KINDS:
        alone = weights_of(fit(make_model(kind), GradientClipping("norm", 1.0)))
        first, second = (torch.load(f"{kind}-{rank}.pt") for rank in range(2))
        for name, value in alone.items():
            assert torch.equal(first[name], second[name])
            torch.testing.assert_close(first[name], value, rtol=1e-10, atol=1e-12)
