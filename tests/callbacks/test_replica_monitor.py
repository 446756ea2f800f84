from __future__ import annotations

import itertools
import logging
import sys
import textwrap

import pytest
import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner.callbacks import ReplicaMonitor
from runner.callbacks.replica_monitor import CHUNK, checksums, make_multipliers

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_is_a_weighted_sum_of_bits(dtype: torch.dtype):
    multipliers = make_multipliers()
    assert torch.equal(make_multipliers(), multipliers) and bool((multipliers % 2 != 0).all())
    tensor = torch.arange(-3, 4).to(dtype)
    width = min(4, tensor.element_size())
    raw = tensor.view(torch.uint8).numpy().tobytes()
    bits = [int.from_bytes(raw[i : i + width], sys.byteorder, signed=True) for i in range(0, len(raw), width)]
    factors = multipliers[: len(bits)].tolist()
    chunk_sum = sum(bit * factor for bit, factor in zip(bits, factors, strict=True))
    (checksum,) = checksums([tensor], multipliers).tolist()
    assert checksum % 2**64 == chunk_sum * factors[0] ** 2 % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flipping_a_bit_or_the_same_bit_of_two_elements_changes_the_checksum(dtype: torch.dtype):
    multipliers = make_multipliers()
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = [*itertools.product(range(5), range(tensor.element_size()), range(8))]
    changes = [[position] for position in positions]
    changes += [[a, b] for a, b in itertools.combinations(positions, 2) if a[1:] == b[1:]]
    sums = {checksums([tensor], multipliers).item()}
    for change in changes:
        changed = tensor.clone()
        for element, byte, bit in change:
            changed.view(torch.uint8)[element * tensor.element_size() + byte] ^= 1 << bit
        sums.add(checksums([changed], multipliers).item())
    assert len(sums) == 1 + len(changes)


def test_a_change_in_any_chunk_of_a_long_tensor_changes_the_checksum():
    multipliers = make_multipliers()
    tensor = torch.zeros(2 * CHUNK + 3)
    sums = {checksums([tensor], multipliers).item()}
    for element in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 2):
        tensor[element] = 1.0
        sums.add(checksums([tensor], multipliers).item())
        tensor[element] = 0.0
    assert len(sums) == 8


def test_a_checksum_depends_on_values_order_and_dtype_but_not_on_strides():
    multipliers = make_multipliers()
    a = torch.arange(6.0).reshape(2, 3)
    tensors = [a, a.t().contiguous().t(), a.flip(0), a * -1, a.bfloat16(), torch.tensor(0.0), torch.empty(0)]
    sums = checksums(tensors, multipliers).tolist()
    assert sums[0] == sums[1]
    assert len({*sums[:5]}) == 4
    assert checksums([nn.Parameter(a)], multipliers).tolist() == sums[:1]


PROGRAM = """
    import sys

    import torch

    from runner.callbacks import ReplicaMonitor
    from runner import Callback, ClassificationModel, Trainer, get_global_rank
    from runner.data import TensorLoader

    faulty_rank, batch, interval = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

    class FlipBit(Callback):
        def batch_start(self, state, logger):
            if get_global_rank() == faulty_rank and state.timestamp.batch == batch:
                parameter = state.unwrapped_model.get_parameter("module.2.weight")
                parameter.detach().view(-1)[4:5].view(torch.int32)[0] ^= 1 << 20

    class PrintBatch(Callback):
        def batch_end(self, state, logger):
            print(state.timestamp.batch, flush=True)

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3), torch.nn.Dropout(0.5)
    )
    with Trainer(
        model=ClassificationModel(network, 3),
        train_dataloader=TensorLoader(torch.randn(40, 4), torch.arange(40) % 3, batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        max_duration="2ep",
        eval_interval=0,
        device="cpu",
        callbacks=[PrintBatch(), FlipBit(), ReplicaMonitor(interval)],
    ) as trainer:
        trainer.fit()
        means = [torch.empty(6), torch.empty(6)]
        if trainer.run.world_size == 2:
            torch.distributed.all_gather(means, network[1].running_mean)
            assert not torch.equal(*means), "buffers should differ between ranks"
"""


@pytest.mark.parametrize(
    ("world_size", "faulty_rank", "batch", "interval", "detected_at", "ranks", "equal_at"),
    [
        (2, 1, 4, "3ba", 6, [1], 3),
        pytest.param(3, 2, 0, "1ba", 1, [2], 0, marks=pytest.mark.slow),
        pytest.param(2, 0, 3, "1ep", 5, [1], 0, marks=pytest.mark.slow),
    ],
)
def test_each_rank_ends_with_an_error_that_says_where_replicas_differ(
    run_ranks,
    world_size: int,
    faulty_rank: int,
    batch: int,
    interval: str,
    detected_at: int,
    ranks: list[int],
    equal_at: int,
):
    message = (
        f"RuntimeError: replicas have diverged: after batch {detected_at} (counted from 1), ranks {ranks} differ from "
        "the first replica in 1 of 6 parameters, starting with 'module.2.weight'. "
        f"They were equal after batch {equal_at}: resume from a checkpoint of that batch or earlier"
    )
    for rank in run_ranks(textwrap.dedent(PROGRAM), world_size, str(faulty_rank), str(batch), interval, check=False):
        assert rank.returncode == 1
        assert message in rank.stderr
        assert rank.stdout.split() == [str(batch + 1) for batch in range(detected_at)]


@pytest.mark.parametrize(("faulty_rank", "interval"), [(-1, "1ba"), (1, "0ba")])
def test_equal_or_unchecked_replicas_train_to_the_end(run_ranks, faulty_rank: int, interval: str):
    for rank in run_ranks(textwrap.dedent(PROGRAM), 2, str(faulty_rank), "4", interval):
        assert rank.stdout.split() == [str(batch + 1) for batch in range(10)]


def test_a_single_process_logs_that_it_has_nothing_to_compare(caplog):
    with caplog.at_level(logging.INFO, logger="runner"), tiny_trainer(ReplicaMonitor("1ba")) as trainer:
        trainer.fit("1ep")
    assert [record.getMessage() for record in caplog.records] == [
        "ReplicaMonitor: there are no replicas to compare, only one copy of the weights"
    ]


def test_an_invalid_interval_is_rejected():
    with pytest.raises(ValueError, match="interval='often'"):
        ReplicaMonitor("often")


@pytest.mark.gpu
def test_checksums_on_a_gpu_equal_those_on_the_cpu():
    multipliers = make_multipliers()
    tensors = [torch.randn(1000), torch.randn(CHUNK + 7), torch.randn(33).bfloat16()]
    on_gpu = checksums([tensor.cuda() for tensor in tensors], multipliers.cuda())
    assert torch.equal(on_gpu.cpu(), checksums(tensors, multipliers))
