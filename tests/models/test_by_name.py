"""Weights drawn by name: the same for each layout and number of ranks, and never whole on a rank that shares them."""

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
    return {name: whole(one).clone() for name, one in model.named_parameters()}


def gpt(**sizes: Any) -> Model:
    return LanguageModel(GPT(**{"vocab_size": 11, "context": 12, "d_model": 16, "n_heads": 4, **sizes}))


def filled(make: Any, seed: int = 3) -> nn.Module:
    model = make_by_name(make, seed)
    fill_deferred(model)
    return model


# Draws


def test_a_weight_depends_on_seed_and_name_alone_and_is_initialized_as_the_model_says():
    before = torch.get_rng_state()
    small, large, other = (values(filled(lambda n=n: gpt(n_layers=n), seed)) for n, seed in ((2, 3), (3, 3), (2, 4)))
    assert torch.equal(torch.get_rng_state(), before)
    same = [name for name in small if torch.equal(small[name], large[name])]
    assert {name for name in small if name not in same} == {  # whose deviation depends on the number of layers
        f"module.blocks.{block}.{name}.weight" for block in (0, 1) for name in ("attention.out", "mlp.down")
    }
    drawn = [name for name, one in small.items() if one.std() > 0]
    assert not any(torch.equal(small[name], other[name]) for name in drawn)
    assert len({digest(small[name]) for name in drawn}) == len(drawn)
    big: Any = filled(lambda: gpt(vocab_size=500, d_model=64, zero_init=True))
    assert float(big.module.token_embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert big.module.head.weight is big.module.token_embedding.weight
    assert not big.module.blocks[0].mlp.down.weight.any()


def test_layers_of_torch_are_initialized_as_ever():
    layers = [nn.Linear, 400, 300], [nn.Embedding, 9, 4, 2], [nn.BatchNorm2d, 3], [nn.LSTM, 3, 3]
    made = filled(lambda: nn.Sequential(*(kind(*sizes) for kind, *sizes in layers)))
    found = values(made)
    assert float(found["0.weight"].abs().max()) == pytest.approx(0.05, rel=0.01)
    assert float(found["1.weight"][2].abs().max()) == 0 < float(found["1.weight"][1].abs().max())
    assert torch.equal(found["2.weight"], torch.ones(3))
    assert not deferred_draws(made)


@pytest.mark.parametrize("change", [nn.init.orthogonal_, lambda one: nn.init.trunc_normal_(one, std=0.1)])
def test_a_weight_that_is_computed_from_others_is_refused(change: Any):
    def make() -> nn.Module:
        made = nn.Linear(3, 3)
        change(made.weight)
        return made

    with pytest.raises(ValueError, match=r"init_weights='by_name': .* computed from other tensors .*; set in_order"):
        make_by_name(make, 0)


# Ranks


class Change(Algorithm):
    """Changes a weight as surgery would."""

    def init(self, state, logger):
        with torch.no_grad():
            next(state.unwrapped_model.parameters()).mul_(2)


def make_trainer(model: Model, **more: Any) -> Trainer:
    tokens = (torch.arange(8)[:, None] + torch.arange(6)) % 11
    return Trainer(
        model=model,
        train_dataloader=TensorLoader(tokens, tokens, batch_size=4, shuffle=True),
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        device="cpu",
        run_dir="run",
        **more,
    )


def begin() -> None:
    """Leave the first weights of each layout, and the last ones of two, in a file."""
    layouts: list[dict[str, Any]] = [{}, {"parallel": "fsdp"}, {"parallel": "fsdp", "precision": "bf16"}]
    layouts += [{"tensor_parallel": 2}, {"tensor_parallel": 2, "parallel": "fsdp"}]
    found = []
    with on_ranks():
        for layout in layouts if get_world_size() % 2 == 0 else layouts[:3]:
            model = make_by_name(gpt, 3 + get_global_rank())  # those of rank 0 count
            with make_trainer(model, **layout) as trainer:
                first = values(model)
                trainer.fit()
                found.append((first, values(model)))
        if get_world_size() > 1:
            with pytest.raises(ValueError, match="changed module.token_embedding.weight before it had a value"):
                make_trainer(make_by_name(gpt, 3), parallel="fsdp", algorithms=[Change()])
    torch.save(found, f"{get_world_size()}.{get_global_rank()}.pt")


def test_first_weights_are_the_same_for_each_layout_and_number_of_ranks(run_ranks, tmp_path: Path):
    for ranks in (1, 2):
        run_ranks(program_of("models/test_by_name", "begin"), ranks)
    check_first(tmp_path, 2)


@pytest.mark.slow
def test_first_weights_are_the_same_on_four_ranks(run_ranks, tmp_path: Path):
    for ranks in (1, 3, 4):
        run_ranks(program_of("models/test_by_name", "begin"), ranks)
    check_first(tmp_path, 3)
    check_first(tmp_path, 4)


def check_first(folder: Path, ranks: int) -> None:
    (expected, _), *_ = torch.load(folder / "1.0.pt")
    for rank in range(ranks):
        replicas, *others = found = torch.load(folder / f"{ranks}.{rank}.pt")
        for first, _ in found:
            its = {name: one.to(next(iter(first.values())).dtype) for name, one in expected.items()}
            assert digest(first) == digest(its)
        assert ranks > 2 or digest(replicas[1]) == digest(others[0][1])  # trained with ddp and fsdp


def peak() -> None:
    """Print by how many bytes the memory of this process grew at most, what it holds, and its largest weight."""
    with on_ranks():
        make_trainer(make_by_name(gpt, 3), parallel="fsdp").close()  # what is imported on the way
        torch.empty(1 << 26, dtype=torch.uint8).fill_(1)  # so that the peak so far is no less than what is held now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = make_by_name(lambda: gpt(vocab_size=8000, d_model=512, n_layers=12), 3)
        with make_trainer(model, parallel="fsdp"):
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            held = sum(local(one).nbytes for one in model.parameters())
            largest = max(4 * one.numel() for one in model.parameters())
    print(grown, held, largest, file=sys.stderr if get_global_rank() else sys.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of a process's peak is the kilobyte on Linux")
def test_a_rank_holds_its_shard_and_one_weight_at_most(run_ranks):
    first, *_ = run_ranks(program_of("models/test_by_name", "peak"), 2)
    grown, held, largest = map(int, first.stdout.split())
    assert grown < held + 2 * largest, (grown, held, largest)


@pytest.mark.slow
def test_a_run_is_explained_and_checked_without_memory_for_its_weights(run_here):
    big = ("model=gpt", "model.module.d_model=1024", "model.module.n_layers=4", "data=stdlib_text", "algorithms=none")
    for more in ((), ("init_weights=by_name",)):
        assert "on the meta device" in run_here("check", *big, *more, code=0).out
        run_here("explain", *big, *more, code=0)


def test_a_wrong_value_is_one_message(run_here):
    assert (
        "init_weights='names': must be in_order (weights are drawn one after another), or by_name"
        in run_here("init_weights=names", code=2).err
    )
