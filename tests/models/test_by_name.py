"""Weights drawn by name are the same for any layout and number of ranks, and no rank holds the whole model."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from sharded_runs import on_ranks
from torch import nn

from runner import Algorithm, LanguageModel, Model, Trainer, get_global_rank, get_world_size
from runner.checkpoints.hashing import digest
from runner.data import TensorLoader
from runner.distributed.deferred import deferred_draws, fill_deferred
from runner.distributed.sharding import local, whole
from runner.models import GPT
from runner.models.by_name import make_by_name


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def gpt(**sizes: Any) -> Model:
    return LanguageModel(GPT(**{"vocab_size": 11, "context": 12, "d_model": 16, "n_heads": 4, **sizes}))


def filled(make: Any, seed: int = 3) -> nn.Module:
    model = make_by_name(make, seed)
    fill_deferred(model)
    return model


# Draws


def test_a_weight_depends_only_on_its_name_the_seed_and_the_models_initialization():
    before = torch.get_rng_state()
    small, large, other = (values(filled(lambda n=n: gpt(n_layers=n), seed)) for n, seed in ((2, 3), (3, 3), (2, 4)))
    assert torch.equal(torch.get_rng_state(), before)
    # The standard deviation of these weights depends on the number of layers.
    assert {name for name in small if not torch.equal(small[name], large[name])} == {
        f"module.blocks.{block}.{name}.weight" for block in (0, 1) for name in ("attention.out", "mlp.down")
    }
    drawn = [name for name, weight in small.items() if weight.std() > 0]
    assert not any(torch.equal(small[name], other[name]) for name in drawn)
    assert len({digest(small[name]) for name in drawn}) == len(drawn)
    big: Any = filled(lambda: gpt(vocab_size=500, d_model=64, zero_init=True))
    assert float(big.module.token_embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert big.module.head.weight is big.module.token_embedding.weight
    assert not big.module.blocks[0].mlp.down.weight.any()


def test_torchs_layers_keep_their_usual_initialization():
    layers = [nn.Linear, 400, 300], [nn.Embedding, 9, 4, 2], [nn.BatchNorm2d, 3], [nn.LSTM, 3, 3]
    model = filled(lambda: nn.Sequential(*(layer(*sizes) for layer, *sizes in layers)))
    weights = values(model)
    assert float(weights["0.weight"].abs().max()) == pytest.approx(0.05, rel=0.01)
    assert float(weights["1.weight"][2].abs().max()) == 0 < float(weights["1.weight"][1].abs().max())
    assert torch.equal(weights["2.weight"], torch.ones(3))
    assert not deferred_draws(model)


@pytest.mark.parametrize("initialize", [nn.init.orthogonal_, lambda weight: nn.init.trunc_normal_(weight, std=0.1)])
def test_initialization_that_computes_a_weight_from_other_tensors_is_refused(initialize: Any):
    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        initialize(layer.weight)
        return layer

    with pytest.raises(ValueError, match=r"init_weights='by_name': .* computed from other tensors .*; set in_order"):
        make_by_name(make, 0)


# Ranks


class ChangeWeight(Algorithm):
    """Changes a weight at INIT, as surgery may do."""

    def init(self, state, logger):
        with torch.no_grad():
            next(state.unwrapped_model.parameters()).mul_(2)


def make_trainer(model: Model, **arguments: Any) -> Trainer:
    tokens = (torch.arange(8)[:, None] + torch.arange(6)) % 11
    return Trainer(
        model=model,
        train_dataloader=TensorLoader(tokens, tokens, batch_size=4, shuffle=True),
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        device="cpu",
        run_dir="run",
        **arguments,
    )


def train_layouts() -> None:
    """Save the initial and the final weights of each layout to a file for this rank."""
    layouts: list[dict[str, Any]] = [{}, {"parallel": "fsdp"}, {"parallel": "fsdp", "precision": "bf16"}]
    layouts += [{"tensor_parallel": 2}, {"tensor_parallel": 2, "parallel": "fsdp"}]
    weights = []
    with on_ranks():
        for layout in layouts if get_world_size() % 2 == 0 else layouts[:3]:
            model = make_by_name(gpt, 3 + get_global_rank())  # the seed of rank 0 counts
            with make_trainer(model, **layout) as trainer:
                initial = values(model)
                trainer.fit()
                weights.append((initial, values(model)))
        if get_world_size() > 1:
            with pytest.raises(ValueError, match="changed module.token_embedding.weight before it had a value"):
                make_trainer(make_by_name(gpt, 3), parallel="fsdp", algorithms=[ChangeWeight()])
    torch.save(weights, f"{get_world_size()}.{get_global_rank()}.pt")


def test_initial_weights_are_the_same_for_each_layout_and_number_of_ranks(run_ranks, tmp_path: Path):
    for ranks in (1, 2):
        run_ranks(program_of("models/test_by_name", "train_layouts"), ranks)
    assert_initial_weights_equal(tmp_path, 2)


@pytest.mark.slow
def test_initial_weights_are_the_same_on_three_and_four_ranks(run_ranks, tmp_path: Path):
    for ranks in (1, 3, 4):
        run_ranks(program_of("models/test_by_name", "train_layouts"), ranks)
    assert_initial_weights_equal(tmp_path, 3)
    assert_initial_weights_equal(tmp_path, 4)


def assert_initial_weights_equal(folder: Path, ranks: int) -> None:
    """Assert that each layout started with the weights of a single process; on two ranks, DDP and FSDP also end equal.

    FSDP in bf16 starts with the same weights, rounded.
    """
    (expected, _), *_ = torch.load(folder / "1.0.pt")
    for rank in range(ranks):
        (_, ddp), (_, fsdp), *_ = layouts = torch.load(folder / f"{ranks}.{rank}.pt")
        for initial, _ in layouts:
            dtype = next(iter(initial.values())).dtype
            assert digest(initial) == digest({name: weight.to(dtype) for name, weight in expected.items()})
        assert ranks > 2 or digest(ddp) == digest(fsdp)


def print_peak_memory() -> None:
    """Print by how many bytes this process grew at most, the bytes of its weights, and of the largest whole weight."""
    with on_ranks():
        make_trainer(make_by_name(gpt, 3), parallel="fsdp").close()  # imports modules before the measurement
        # Lift the peak before the measurement above the memory in use.
        torch.empty(1 << 26, dtype=torch.uint8).fill_(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = make_by_name(lambda: gpt(vocab_size=8000, d_model=512, n_layers=12), 3)
        with make_trainer(model, parallel="fsdp"):
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            held = sum(local(parameter).nbytes for parameter in model.parameters())
            largest = max(4 * parameter.numel() for parameter in model.parameters())
    print(grown, held, largest, file=sys.stderr if get_global_rank() else sys.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of a process's peak is the kilobyte on Linux")
def test_a_rank_needs_memory_for_its_shards_and_at_most_two_whole_weights(run_ranks):
    first, *_ = run_ranks(program_of("models/test_by_name", "print_peak_memory"), 2)
    grown, held, largest = map(int, first.stdout.split())
    assert grown < held + 2 * largest, (grown, held, largest)


@pytest.mark.slow
def test_check_and_explain_keep_large_models_on_the_meta_device(run_here):
    large = ("model=gpt", "model.module.d_model=1024", "model.module.n_layers=4", "data=stdlib_text", "algorithms=none")
    for init_weights in ((), ("init_weights=by_name",)):
        assert "on the meta device" in run_here("check", *large, *init_weights, code=0).out
        run_here("explain", *large, *init_weights, code=0)


def test_a_wrong_value_of_init_weights_is_refused(run_here):
    message = "init_weights='names': must be in_order (weights are drawn one after another), or by_name"
    assert message in run_here("init_weights=names", code=2).err
