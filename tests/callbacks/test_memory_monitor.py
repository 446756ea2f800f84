from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch
from tiny_runs import make_data, tiny_trainer

from runner import Callback
from runner.callbacks import InMemoryLogger, MemoryMonitor
from runner.callbacks import memory_monitor as module

GIGABYTE = 1e9


class Hold(Callback):
    """Allocates memory at the start of batch `first`, and frees it at the start of batch `last`."""

    def __init__(self, first: int, last: int, size: int, device: str = "cpu"):
        self.first, self.last, self.size, self.device = first, last, size, device
        self.rss: list[float] = []

    def batch_start(self, state, logger):
        time.sleep(0.06)  # so that each batch is measured
        if state.timestamp.batch + 1 == self.first:
            self.held = torch.ones(self.size // 4, device=self.device)
        if state.timestamp.batch + 1 == self.last:
            del self.held

    def batch_end(self, state, logger):
        self.rss.append(psutil.Process().memory_info().rss / GIGABYTE)


def fit(*callbacks: Callback, **arguments: Any) -> InMemoryLogger:
    memory = InMemoryLogger()
    with tiny_trainer(*callbacks, loggers=[memory], **({"max_duration": "6ba"} | arguments)) as trainer:
        trainer.fit()
    return memory


def test_the_resident_set_size_equals_psutils():
    hold = Hold(3, 5, 200_000_000)
    memory = fit(hold, MemoryMonitor())
    assert {key for key in memory.data if key.startswith("memory/")} == {"memory/rss", "memory/peak_rss"}
    steps, now = memory.get_timeseries("memory/rss")
    assert steps == [*range(1, 7)]
    assert now == pytest.approx(hold.rss, rel=0.01)
    peak = memory.get_timeseries("memory/peak_rss")[1]
    # Linux's counts may be off by some pages.
    assert peak == pytest.approx(sorted(peak), abs=0.005)
    assert all(highest > current - 0.005 for highest, current in zip(peak, now, strict=True))
    assert now[2] - now[1] == pytest.approx(0.2, abs=0.02)
    assert peak[5] >= now[5] + 0.15  # the peak includes memory that was freed


@pytest.mark.usefixtures("steady")
def test_the_resident_set_size_without_proc_is_the_same(monkeypatch):
    with_proc = fit(MemoryMonitor(), Hold(0, 0, 0)).get_timeseries("memory/rss")[1]
    assert len(with_proc) == 6
    monkeypatch.setattr(module, "STATUS", "/nowhere")
    memory = fit(MemoryMonitor(), Hold(0, 0, 0))
    assert memory.get_timeseries("memory/rss")[1] == pytest.approx(with_proc, abs=0.02)
    assert memory.get_timeseries("memory/peak_rss")[1][0] > 0


def test_short_batches_are_not_all_measured():
    start = time.perf_counter()
    steps, _ = fit(MemoryMonitor(), train_dataloader=make_data(2000), max_duration="1ep").get_timeseries("memory/rss")
    assert steps[0] == 1
    assert 1 < len(steps) <= 100 * (time.perf_counter() - start) + 1


def test_files_are_closed():
    process = psutil.Process()
    before = process.num_fds()
    fit(MemoryMonitor())
    assert process.num_fds() <= before


def test_memory_keys_without_cuda_give_one_warning(caplog):
    memory = fit(MemoryMonitor({"allocated_bytes.all.peak": "peak"}))
    assert caplog.messages == ["memory_keys is not used: the model is on cpu; memory/rss is logged"]
    assert "memory/peak" not in memory.data and "memory/rss" in memory.data


def test_the_aggregates_of_one_process_are_its_values():
    memory = fit(MemoryMonitor(dist_aggregate_batch_interval=3))
    for kind in ("avg", "min", "max"):
        steps, values = memory.get_timeseries(f"memory/rss_{kind}")
        assert steps == [3, 6]
        logged = dict(zip(*memory.get_timeseries("memory/rss"), strict=True))
        assert values == [logged[step] for step in steps]


def test_all_ranks_log_the_average_the_least_and_the_most_memory(run_ranks):
    def program():
        import torch
        from tiny_runs import tiny_trainer

        from runner import get_global_rank
        from runner.callbacks import InMemoryLogger, MemoryMonitor

        rank = get_global_rank()
        held = torch.ones(rank * 100_000_000)
        monitor, memory = MemoryMonitor(dist_aggregate_batch_interval=4), InMemoryLogger()
        with tiny_trainer(monitor, loggers=[memory], max_duration="6ba") as trainer:
            trainer.fit()
        print(*(memory.get_timeseries(f"memory/rss{end}") for end in ("", "_avg", "_min", "_max")), sep="\n")
        assert len(held) == rank * 100_000_000

    first, second = ([eval(line) for line in rank.stdout.splitlines()] for rank in run_ranks(program))
    assert first[1:] == second[1:]
    values = [dict(zip(*series[0], strict=True))[4] for series in (first, second)]
    average, least, most = first[1:]
    assert average == ([4], [pytest.approx(sum(values) / 2)])
    assert least == ([4], [values[0]])
    assert most == ([4], [values[1]])
    assert values[1] - values[0] == pytest.approx(0.4, abs=0.1)


@pytest.mark.gpu
def test_the_allocated_memory_of_a_gpu_is_logged():
    hold = Hold(3, 5, 200_000_000, "cuda")
    keys = {"memory/alloc_retries"} | {
        f"memory/{when}_{what}_mem"
        for when in ("current", "peak")
        for what in ("allocated", "active", "inactive", "reserved")
    }
    memory = fit(hold, MemoryMonitor(), device="cuda")
    assert {key for key in memory.data if key.startswith("memory/")} == keys
    now = memory.get_timeseries("memory/current_allocated_mem")[1]
    assert now[2] - now[1] == pytest.approx(0.2, abs=0.01)
    assert now[2] - now[4] == pytest.approx(0.2, abs=0.01)
    assert memory.get_timeseries("memory/peak_allocated_mem")[1][5] >= now[2]


@pytest.mark.gpu
def test_the_error_for_an_unknown_statistic_names_similar_keys():
    with pytest.raises(ValueError, match="'allocated_bytes.all.peek' is not a key .*near: allocated_bytes.all.peak"):
        fit(MemoryMonitor({"allocated_bytes.all.peek": "peak"}), device="cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        {"memory_keys": {}},
        {"memory_keys": ["allocated_bytes.all.peak"]},
        {"dist_aggregate_batch_interval": 0},
        {"dist_aggregate_batch_interval": 1.5},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        MemoryMonitor(**arguments)
