"""Collectives of ranks: their results, their number, and the errors about loaders that ranks cannot divide.

`test_splitting.py` compares the training of ranks with that of one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_models import Classifier, class_data
from rank_runs import (
    program_of,
    train,
    train_out_of_memory,
    train_with_mixup_and_dropout,
)
from torch.utils.data import DataLoader, TensorDataset

from runner import Trainer
from runner.distributed.collectives import any_rank
from runner.distributed.ranks import get_global_rank, get_world_size


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_agree_with_few_collectives_and_refuse_loaders_they_cannot_divide(
    world_size: int, run_ranks, tmp_path: Path, strict
):
    run_ranks(program_of("rank_runs", "agree"), world_size, env=strict)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    check_refusals(ranks[0]["refusals"], world_size)
    for results in ranks:
        assert results["refusals"] == ranks[0]["refusals"]
        assert results["any"] == [True, False] and results["object"] == {"rank": 0}
        # All gradients are in one bucket. Counting the tokens of all ranks takes an all-reduce of one more number.
        gradients = {"gloo:all_reduce [[32]]": 10}
        tokens = {"gloo:all_reduce [[]]": 10, "gloo:all_reduce [[63]]": 10}
        assert results["collectives"] == {
            "samples": gradients,
            "accumulated": gradients,
            "tokens": tokens,
            "windows": {"gloo:all_reduce [[63]]": 10},  # the loader declares that all samples have equally many tokens
            "left out": tokens,  # an algorithm ignores some of the tokens
        }
        assert results["clock"] == ranks[0]["clock"]
        # Rank 0's clock counts. After one batch, ranks agree to synchronize again in a second, which is 50 batches.
        assert results["virtual clock"] == (101, pytest.approx(101 * 0.02))
    batches, seconds = ranks[0]["clock"]
    assert batches > 0 and seconds >= 0.5


def check_refusals(messages: dict[str, str | None], ranks: int) -> None:
    """Check the error message for each kind of loader; None means that it is accepted."""
    undeclared = f"train_dataloader: nothing says how {ranks} ranks divide this"
    for name in ("plain", "shuffled", "batch sampler"):
        assert (messages[name] or "").startswith(f"{undeclared} DataLoader"), name
    for name in ("sharded", "sharded batch sampler", "evaluation, sharded"):
        assert messages[name] is None
    assert (messages["list"] or "").startswith(f"{undeclared} list")
    for name in ("evaluation", "evaluation, list", "eval", "predict"):
        assert "the same samples" in (messages[name] or ""), name
    for name, replicas in {"one replica": 1, "equal parts": 2}.items():
        reason = f"divides the samples by num_replicas={replicas}, and {ranks} ranks read parts {[0] * ranks}"
        assert reason in (messages[name] or ""), name
    assert "its sampler divides them" in (messages["evaluation, replicated shares"] or "")
    assert "DistributedSampler repeats samples, as 13" in (messages["evaluation, padded"] or "")
    for kind in ("evaluation", "evaluation without a length"):
        for rank, name in enumerate(("first", "second")):
            message = f"dataloader of evaluator 'eval': the share of rank {rank} has no batch: each rank needs"
            assert (messages[f"{kind}, {name} empty"] or "").startswith(message)


def test_different_seeds_give_different_dropout_masks_and_mixup_weights():
    # The seed of a rank is the run's seed plus its number, so ranks also draw different numbers.
    first, second = train_with_mixup_and_dropout(0), train_with_mixup_and_dropout(1)
    assert not torch.equal(first["module.0.weight"], second["module.0.weight"])


def refuse_data_then_train() -> None:
    """Make a Trainer that refuses its data, then train with another Trainer. All ranks."""
    unsharded = DataLoader(TensorDataset(*class_data(12)), batch_size=2)
    with pytest.raises(ValueError, match="nothing says how 2 ranks divide"):
        Trainer(model=Classifier(), train_dataloader=unsharded, device="cpu")
    assert not dist.is_initialized()
    train("even")


def test_a_trainer_that_refuses_its_data_leaves_no_process_group(run_ranks, strict):
    run_ranks(program_of("distributed/test_collectives", "refuse_data_then_train"), 2, env=strict)


def test_one_process_that_runs_out_of_memory_finds_the_size_of_microbatches():
    (automatic_size, weights), (size, expected) = train_out_of_memory()
    assert automatic_size == size == 2
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_one_process_makes_no_process_group():
    train("even")
    assert not dist.is_initialized()
    assert (get_world_size(), get_global_rank()) == (1, 0)
    assert any_rank(True) and not any_rank(False)


def test_three_ranks_with_deterministic_resume_bit_for_bit(run_ranks):
    def program():
        import torch
        from torch import nn

        from runner import ClassificationModel, Trainer, get_global_rank, save_checkpoint
        from runner.data import TensorLoader

        def make(deterministic, resume_path=None):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
            return Trainer(
                model=ClassificationModel(module, 3),
                train_dataloader=TensorLoader(torch.randn(96, 20), torch.arange(96) % 3, batch_size=9, shuffle=True),
                optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
                max_duration="8ba",
                device="cpu",
                deterministic=deterministic,
                resume_path=resume_path,
            )

        def weights(trainer):
            return torch.cat([weight.detach().flatten() for weight in trainer.state.unwrapped_model.parameters()])

        with make(True) as whole:
            whole.fit()
        with make(True) as first:
            first.fit(duration="3ba")
            save_checkpoint(first.state, "checkpoint")
        with make(True, "checkpoint") as second:
            second.fit()
        with make(False) as overlapping:
            overlapping.fit()
        if get_global_rank() == 0:
            print(torch.equal(weights(whole), weights(second)))
            print(torch.allclose(weights(whole), weights(overlapping), atol=1e-6))

    first, *_ = run_ranks(program, 3)
    assert first.stdout.split() == ["True", "True"]


def average_gradients() -> None:
    """Average gradients of several types and layouts, check them, and print the number of collectives. All ranks."""
    from collections import Counter

    from torch.utils._python_dispatch import TorchDispatchMode

    from runner.distributed import collectives, gradients

    calls: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[func.name()] += 1
            return func(*args, **(kwargs or {}))

    def make_parameters(offset: float) -> list[torch.nn.Parameter]:
        shapes = [(3, 4), (5,), (), (2, 3, 4, 4), (7,)]
        parameters = []
        for number, shape in enumerate(shapes):
            dtype = torch.float64 if number == 1 else torch.float32
            values = torch.arange(float(max(1, torch.Size(shape).numel())), dtype=dtype).view(shape) + offset
            if number == 3:
                values = values.to(memory_format=torch.channels_last)
            parameters.append(torch.nn.Parameter(torch.zeros_like(values)))
            parameters[-1].grad = None if number == 4 else values
        return parameters

    rank = get_global_rank()
    collectives.init_process_group(torch.device("cpu"))
    for limit in (1 << 25, 48):
        parameters = make_parameters(rank)
        gradients.BUCKET_BYTES = limit
        calls.clear()
        with Count():
            gradients.all_reduce_gradients(parameters)
        for actual, expected in zip(parameters, make_parameters(0.5), strict=True):
            if actual.grad is None or expected.grad is None:
                assert actual.grad is expected.grad
            else:
                assert torch.equal(actual.grad, expected.grad) and actual.grad.stride() == expected.grad.stride()
        if rank == 0:
            print(calls["c10d::allreduce_"])
    collectives.destroy_process_group()


def test_gradients_are_averaged_in_few_collectives(run_ranks):
    first, *_ = run_ranks(program_of("distributed/test_collectives", "average_gradients"), 2)
    assert first.stdout.split() == ["2", "3"]  # one for each type; with small buckets, one more


def test_a_process_group_is_not_destroyed_after_the_device_has_failed(free_port: int):
    """NCCL would wait for the device, so the group is left until the process ends."""
    import torch
    from torch import distributed

    from runner.distributed.collectives import destroy_process_group

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1)
    destroy_process_group(torch.AcceleratorError("the cause"))
    assert distributed.is_initialized()
    destroy_process_group(ValueError("another"))
    assert not distributed.is_initialized()
