from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer
from torch import nn

from runner import Callback, ClassificationModel, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, SpeedMonitor, _clock, speed_monitor
from runner.callbacks._clock import SAMPLING
from runner.callbacks._peak_flops import find_peak

DELAY = 0.06  # seconds to load a batch, long enough that each batch is logged
EVALUATION = 0.1  # seconds per evaluation


class Slow(ClassificationModel):
    """Evaluates slowly; reports 1000 operations and 5 tokens per sample."""

    def __init__(self):
        super().__init__(nn.Linear(3, 2), 2)

    def eval_forward(self, batch, outputs=None):
        time.sleep(EVALUATION)
        return super().eval_forward(batch, outputs)

    def metrics(self, train):
        return {}

    def num_tokens(self, batch):
        return 5 * len(batch[0])

    def flops_per_batch(self, batch):
        return 1000.0 * len(batch[0])


class SlowLoader:
    def __len__(self):
        return 5

    def __iter__(self):
        for _ in range(5):
            time.sleep(DELAY)
            yield torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


def fit(monitor: SpeedMonitor, **arguments: Any) -> tuple[dict[str, list[float]], Trainer, float]:
    """Return the series by key, the trainer, and the seconds that fit took."""
    memory = InMemoryLogger()
    defaults: dict[str, Any] = {
        "model": Slow(),
        "train_dataloader": SlowLoader(),
        "eval_dataloader": [(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64))],
        "max_duration": "4ep",
        "loggers": [memory],
    }
    with tiny_trainer(monitor, **(defaults | arguments)) as trainer:
        began = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - began
        series = {key: [value for _, value in memory.data[key]] for key in memory.data}
    return series, trainer, seconds


@pytest.mark.usefixtures("steady")
def test_rates_include_loading_but_not_evaluations():
    series, _, seconds = fit(SpeedMonitor(window_size=7, time_unit="seconds"))
    rates = series["throughput/batches_per_sec"]
    assert rates == pytest.approx([1 / DELAY] * 20)
    assert series["time/train"][-1] == pytest.approx(20 * DELAY)
    assert series["time/val"][-1] == pytest.approx(4 * EVALUATION)  # the fourth comes after the last batch
    assert series["time/train"][-1] + series["time/val"][-1] == pytest.approx(series["time/total"][-1])
    assert series["time/total"][-1] == pytest.approx(seconds)


class Watch(Callback):
    """Records when each batch ended, and waits; the monitor counts the wait if it runs afterwards."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self.ended: list[float] = []

    def batch_end(self, state, logger):
        self.ended.append(time.perf_counter())
        time.sleep(self.seconds * (1 + state.timestamp.batch % 3))


@pytest.mark.usefixtures("steady")
def test_rates_equal_those_measured_by_another_callback():
    slow, watch, monitor = Watch(DELAY), Watch(), SpeedMonitor(window_size=30)
    series, _, _ = fit(monitor, callbacks=[slow, monitor, watch], eval_dataloader=None, max_duration="40ba")
    rates = series["throughput/batches_per_sec"]
    for last in (35, 39):
        assert rates[last] == pytest.approx(30 / (watch.ended[last] - watch.ended[last - 30]), rel=1e-6)
    assert series["throughput/samples_per_sec"][-1] == pytest.approx(4 * rates[-1])


class Bracket(Callback):
    """Records the time before and after the monitor reads its clock, for each batch."""

    def __init__(self):
        self.before: list[float] = []
        self.after: list[float] = []

    def after_train_batch(self, state, logger):
        self.before.append(time.perf_counter())

    def batch_end(self, state, logger):
        self.after.append(time.perf_counter())


def test_rates_by_a_real_clock_are_accurate():
    watch, monitor = Bracket(), SpeedMonitor(window_size=6)
    series, _, _ = fit(monitor, callbacks=[monitor, watch], eval_dataloader=None, max_duration="10ba")
    rates = series["throughput/batches_per_sec"]
    assert max(rates) < 1 / DELAY
    for last in (7, 9):
        longest, shortest = watch.after[last] - watch.before[last - 6], watch.before[last] - watch.after[last - 6]
        assert 0.98 * 6 / longest <= rates[last] <= 1.02 * 6 / shortest


def test_short_batches_are_not_all_logged_but_the_last_is():
    batches = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))] * 500
    memory = InMemoryLogger()
    arguments: dict[str, Any] = {"train_dataloader": batches, "eval_dataloader": None, "max_duration": "500ba"}
    model = ClassificationModel(nn.Linear(3, 2), 2)
    _, _, seconds = fit(SpeedMonitor(window_size=500), model=model, loggers=[memory], **arguments)
    steps, rates = memory.get_timeseries("throughput/batches_per_sec")
    assert len(set(steps)) == len(steps) <= 2 + seconds / SAMPLING
    assert steps[0] == 1 and steps[-1] == 500
    assert rates[-1] >= 500 / seconds  # counts all batches, not only those that were logged


@pytest.mark.usefixtures("steady")
def test_all_rates_are_averages_over_the_window():
    series, _, _ = fit(SpeedMonitor(window_size=3, gpu_flops_available=1e6, time_unit="minutes"))
    batches = series["throughput/batches_per_sec"]
    for name, each in {"samples": 4, "tokens": 20, "flops": 4000}.items():
        assert series[f"throughput/{name}_per_sec"] == pytest.approx([each * rate for rate in batches])
        assert series[f"throughput/device/{name}_per_sec"] == series[f"throughput/{name}_per_sec"]
    assert series["throughput/device/mfu"] == pytest.approx([4000 * rate / 1e6 for rate in batches])
    seconds = [60 * value for value in series["time/train"]]
    for last in range(3, 20):
        assert batches[last] == pytest.approx(3 / (seconds[last] - seconds[last - 3]))
    assert batches[0] == pytest.approx(1 / seconds[0])


def test_rates_of_counts_that_the_model_lacks_are_left_out():
    series, _, _ = fit(SpeedMonitor(), model=ClassificationModel(nn.Linear(3, 2), 2), max_duration="2ba")
    assert {key for key in series if key.startswith(("throughput/", "time/t", "time/v"))} == {
        "throughput/batches_per_sec",
        "throughput/samples_per_sec",
        "throughput/device/batches_per_sec",
        "throughput/device/samples_per_sec",
        "time/train",
        "time/val",
        "time/total",
    }


class Queue:
    """A device that lags behind the host: a batch takes 10 ms, and progress is visible only once in a while."""

    ready = 0.0  # seconds when the device will have finished all queued work
    reached = 0.0  # seconds of the queue that are visibly finished

    class Event:
        def record(self) -> None:
            self.at = Queue.ready

        def query(self) -> bool:
            return self.at <= Queue.reached

        def synchronize(self) -> None:
            Queue.reached = max(Queue.reached, self.at)

        def elapsed_time(self, other: Queue.Event) -> float:
            return 1000 * (other.at - self.at)


def test_a_host_that_is_ahead_logs_the_speed_of_the_device(monkeypatch: pytest.MonkeyPatch):
    class Lag(Callback):
        def before_forward(self, state, logger):
            Queue.ready += 0.01

        def batch_end(self, state, logger):
            if state.timestamp.batch % 10 == 0:
                Queue.reached = Queue.ready - 0.045  # almost five batches behind

    class OnDevice(SpeedMonitor):
        def fit_start(self, state, logger):
            super().fit_start(state, logger)
            self._stopwatch = _clock.DeviceStopwatch()

    monkeypatch.setattr(_clock, "make_event", Queue.Event)
    monkeypatch.setattr(speed_monitor, "SAMPLING", 0.0)
    batches = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))] * 20
    options = {
        "train_dataloader": batches,
        "callbacks": [Lag(), OnDevice(time_unit="seconds")],
        "max_duration": "2ep",
    }
    series, _, _ = fit(SpeedMonitor(), **options, eval_dataloader=None)
    # No time is known before the tenth batch, and the host waits for the device only at the end.
    assert series["throughput/batches_per_sec"] == pytest.approx([100.0] * 31)
    assert series["time/train"][0] == pytest.approx(0.05) and series["time/train"][-1] == pytest.approx(0.4)


@pytest.mark.gpu
def test_rates_on_a_gpu_count_finished_batches():
    series, _, seconds = fit(SpeedMonitor(time_unit="seconds"), device="cuda")
    assert 0 < series["time/train"][-1] <= seconds
    # The rate counts until the GPU finishes the last batch; the time counts until the host learns that it has.
    assert series["throughput/batches_per_sec"][-1] == pytest.approx(20 / series["time/train"][-1], rel=1e-2)


@pytest.mark.usefixtures("steady")
def test_a_resumed_run_continues_its_times_and_window(tmp_path):
    first, trainer, _ = fit(SpeedMonitor(window_size=50, time_unit="seconds"), max_duration="2ep", run_dir=tmp_path)
    save_checkpoint(trainer.state, tmp_path / "checkpoint")
    second, _, _ = fit(SpeedMonitor(window_size=50, time_unit="seconds"), resume_path=tmp_path / "checkpoint")
    assert second["time/train"][0] == pytest.approx(first["time/train"][-1] + DELAY)
    assert second["time/val"][0] == first["time/val"][-1] == pytest.approx(first["time/val"][-2] + EVALUATION)
    assert second["time/total"][0] == pytest.approx(first["time/total"][-1] + DELAY)
    assert first["time/total"][-1] == pytest.approx(first["time/total"][-2] + EVALUATION)
    assert second["throughput/batches_per_sec"][-1] == pytest.approx(20 / second["time/train"][-2])  # at that batch


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "amp_bf16", False, 989.4),
        ("NVIDIA H100 PCIe", "amp_bf16", False, 756),
        ("NVIDIA GH200 480GB", "tf32", False, 494.7),
        ("NVIDIA H20", "bf16", False, 148),
        ("NVIDIA RTX 6000 Ada Generation", "amp_bf16", False, None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "fp32", True, 44.1),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "amp_bf16", False, None),
        ("AMD Instinct MI300X", "amp_bf16", False, 1307.4),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("Tesla V100-SXM2-16GB", "amp_fp16", False, 125),
        ("Tesla V100-SXM2-16GB", "amp_bf16", False, None),
        ("Tesla V100S-PCIE-32GB", "fp32", False, 16.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "amp_bf16", False, None),
        ("GRID V100-8Q", "amp_fp16", False, None),
        ("NVIDIA T4G", "amp_fp16", False, None),
        ("Tesla T4", "amp_fp16", False, 65),
        ("NVIDIA L40S", "bf16", False, 362),
        ("NVIDIA GeForce RTX 3090", "fp32", False, 35.6),
        ("NVIDIA GeForce RTX 3090 Ti", "fp32", False, None),
    ],
)
def test_peak_flops_depend_on_device_and_precision(device: str, precision: str, tf32: bool, teraflops: float | None):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12, rel=2e-3)
    assert find_peak(device, precision, tf32) == expected


@pytest.mark.gpu
def test_mfu_of_a_large_matrix_product_is_below_1():
    class Square(ClassificationModel):
        def flops_per_batch(self, batch):
            return 3 * 2 * 4096.0**3

    batches = [(torch.randn(4096, 4096), torch.zeros(4096, dtype=torch.int64)) for _ in range(5)]
    series, _, _ = fit(
        SpeedMonitor(),
        model=Square(nn.Linear(4096, 4096, bias=False), 4096),
        train_dataloader=batches,
        eval_dataloader=None,
        device="cuda",
        precision="amp_bf16",
    )
    assert 0 < series["throughput/device/mfu"][-1] < 1


@pytest.mark.parametrize("arguments", [{"window_size": 0}, {"gpu_flops_available": 0}, {"time_unit": "weeks"}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        SpeedMonitor(**arguments)
