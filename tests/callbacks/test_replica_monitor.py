from __future__ import annotations

import itertools
import logging
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from runner import ClassificationModel, Trainer
from runner.callbacks import ReplicaMonitor
from runner.callbacks.replica_monitor import CHUNK, checksums, make_multipliers
from runner.data import TensorLoader

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
    inner = sum(bit * factor for bit, factor in zip(bits, factors, strict=True))
    (found,) = checksums([tensor], multipliers).tolist()
    assert found % 2**64 == inner * factors[0] ** 2 % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_and_every_pair_of_equal_bits_shows(dtype: torch.dtype):
    multipliers = make_multipliers()
    tensor = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    places = [*itertools.product(range(5), range(tensor.element_size()), range(8))]
    changes = [[place] for place in places]
    changes += [[a, b] for a, b in itertools.combinations(places, 2) if a[1:] == b[1:]]
    found = {checksums([tensor], multipliers).item()}
    for change in changes:
        changed = tensor.clone()
        for element, byte, bit in change:
            changed.view(torch.uint8)[element * tensor.element_size() + byte] ^= 1 << bit
        found.add(checksums([changed], multipliers).item())
    assert len(found) == 1 + len(changes)


def test_a_long_tensor_is_summed_in_chunks():
    multipliers = make_multipliers()
    long = torch.zeros(2 * CHUNK + 3)
    found = {checksums([long], multipliers).item()}
    for element in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 2):
        long[element] = 1.0
        found.add(checksums([long], multipliers).item())
        long[element] = 0.0
    assert len(found) == 8


def test_order_and_sign_count_but_not_the_layout():
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

    broken, at, interval = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

    class Break(Callback):
        def batch_start(self, state, logger):
            if get_global_rank() == broken and state.timestamp.batch == at:
                parameter = state.unwrapped_model.get_parameter("module.2.weight")
                parameter.detach().view(-1)[4:5].view(torch.int32)[0] ^= 1 << 20

    class Count(Callback):
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
        callbacks=[Count(), Break(), ReplicaMonitor(interval)],
    ) as trainer:
        trainer.fit()
        means = [torch.empty(6), torch.empty(6)]
        if trainer.run.world_size == 2:
            torch.distributed.all_gather(means, network[1].running_mean)
            assert not torch.equal(*means), "buffers differ by design"
"""


@pytest.mark.parametrize(
    ("world_size", "broken", "at", "interval", "found", "ranks", "equal_at"),
    [
        (2, 1, 4, "3ba", 6, [1], 3),
        (3, 2, 0, "1ba", 1, [2], 0),
        (2, 0, 3, "1ep", 5, [1], 0),
    ],
)
def test_every_rank_ends_with_an_error_that_names_the_difference(
    run_ranks, world_size: int, broken: int, at: int, interval: str, found: int, ranks: list[int], equal_at: int
):
    message = (
        f"RuntimeError: replicas have diverged: after batch {found} (from 1), the parameters of ranks {ranks} differ "
        "from the first replica's, 1 of 6, the first 'module.2.weight'. "
        f"They were equal after batch {equal_at}: resume from a checkpoint of that batch or an earlier one"
    )
    for rank in run_ranks(textwrap.dedent(PROGRAM), world_size, str(broken), str(at), interval, check=False):
        assert rank.returncode == 1
        assert message in rank.stderr
        assert rank.stdout.split() == [str(batch + 1) for batch in range(found)]


@pytest.mark.parametrize(("broken", "interval"), [(-1, "1ba"), (1, "0ba")])
def test_equal_replicas_train_to_the_end(run_ranks, broken: int, interval: str):
    for rank in run_ranks(textwrap.dedent(PROGRAM), 2, str(broken), "4", interval):
        assert rank.stdout.split() == [str(batch + 1) for batch in range(10)]


def test_one_process_has_nothing_to_compare(caplog):
    model: Any = ClassificationModel(nn.Linear(4, 3), 3)
    loader = TensorLoader(torch.randn(8, 4), torch.arange(8) % 3, batch_size=4, shuffle=True)
    optimizers = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    trainer = Trainer(
        model=model, train_dataloader=loader, optimizers=optimizers, callbacks=[ReplicaMonitor("1ba")], device="cpu"
    )
    with caplog.at_level(logging.INFO, logger="runner"), trainer:
        trainer.fit()
    assert [record.getMessage() for record in caplog.records] == [
        "ReplicaMonitor: there are no replicas to compare, only one copy of the weights"
    ]


def test_an_interval_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="interval='often'"):
        ReplicaMonitor("often")


@pytest.mark.gpu
def test_a_gpu_finds_the_checksums_of_the_cpu():
    multipliers = make_multipliers()
    tensors = [torch.randn(1000), torch.randn(CHUNK + 7), torch.randn(33).bfloat16()]
    on_gpu = checksums([tensor.cuda() for tensor in tensors], multipliers.cuda())
    assert torch.equal(on_gpu.cpu(), checksums(tensors, multipliers))
