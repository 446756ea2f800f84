from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_runs import tiny_trainer

from runner import Callback, Trainer
from runner.callbacks import InMemoryLogger, SystemMetricsMonitor
from runner.callbacks.system_metrics_monitor import GPU, MACHINE

SENT = 40_000_000  # bytes per batch
SENDING = 6  # batches that send
SECONDS = 0.05  # per batch, by a clock that stands still while bytes are sent


class Sends(Callback):
    """Sends bytes to itself over the loopback interface in each of the first batches."""

    def batch_start(self, state, logger):
        time.sleep(SECONDS)
        if state.timestamp.batch >= SENDING:
            return
        with socket.create_server(("127.0.0.1", 0)) as server:
            receiver = threading.Thread(target=self.receive, args=(server,))
            receiver.start()
            with socket.create_connection(server.getsockname(), timeout=20) as connection:
                connection.sendall(bytes(SENT))
            receiver.join(timeout=20)

    def receive(self, server: socket.socket) -> None:
        server.settimeout(20)
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    return tiny_trainer(*callbacks, **({"max_duration": "2ep"} | arguments))


def series(memory: InMemoryLogger) -> dict[str, tuple[list[int], list[float]]]:
    return {key: memory.get_timeseries(key) for key in memory.data if key.startswith("system/")}


@pytest.mark.usefixtures("steady")
def test_readings_match_the_load_of_the_machine(tmp_path: Path):
    memory, sends = InMemoryLogger(), Sends()
    monitor = SystemMetricsMonitor("2ba")
    with make_trainer(sends, monitor, loggers=[memory], run_dir=tmp_path / "not" / "yet") as trainer:
        trainer.fit()
    readings = series(memory)
    disk = {key for key in readings if "disk_read" in key or "disk_write" in key}
    assert readings.keys() | disk == {f"system/node0/{name}" for name in MACHINE} | disk  # no GPU, no rank
    assert all(steps == [2, 4, 6, 8] for steps, _ in readings.values())
    now = psutil.virtual_memory()
    assert readings["system/node0/memory_gb"][1][-1] == pytest.approx((now.total - now.available) / 1e9, rel=0.3)
    assert readings["system/node0/memory_percent"][1][-1] == pytest.approx(now.percent, rel=0.3)
    usage = psutil.disk_usage(str(tmp_path))
    assert readings["system/node0/disk_percent"][1][-1] == pytest.approx(usage.percent, abs=1.0)
    assert all(0 <= value <= 100 for value in readings["system/node0/cpu_percent"][1])
    assert max(readings["system/node0/cpu_percent"][1]) > 0
    for name in ("sent", "received"):
        rates = readings[f"system/node0/network_{name}_mb_per_sec"][1]
        assert rates[3] < rates[2] / 2  # the last two batches sent nothing, and a rate covers only its own interval
        for rate in rates[:3]:
            assert 1 <= rate / (SENT / 1e6 / SECONDS) < 3  # other processes may send too


@pytest.mark.usefixtures("steady")
def test_an_interval_may_be_in_seconds():
    memory = InMemoryLogger()

    class Waits(Callback):
        def batch_start(self, state, logger):
            time.sleep(0.03)

    with make_trainer(Waits(), SystemMetricsMonitor("0.1s"), loggers=[memory], max_duration="16ba") as trainer:
        trainer.fit()
    steps, _ = series(memory)["system/node0/cpu_percent"]
    assert steps == [4, 7, 10, 14]  # the first batches after each tenth of a second


def program() -> None:
    import os

    import torch
    from tiny_runs import tiny_trainer

    from runner.callbacks import InMemoryLogger, SystemMetricsMonitor
    from runner.data import TensorLoader

    if os.environ["NODES"] == "2":
        os.environ["LOCAL_RANK"] = "0"
    data = TensorLoader(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64), batch_size=4, shuffle=False)
    with tiny_trainer(
        train_dataloader=data,
        max_duration="2ep",
        callbacks=[monitor := SystemMetricsMonitor("1ep")],
        loggers=[memory := InMemoryLogger()],
    ) as trainer:
        trainer.fit()
    cpu = {key: memory.get_timeseries(key) for key in memory.data if key.endswith("memory_gb")}
    assert all(steps == [2, 4] for steps, _ in cpu.values())
    one_machine = [("system/node0/gpu0_percent", 8), ("system/node0/gpu1_percent", 0)]
    two_machines = [("system/node0/gpu0_percent", 8), ("system/node1/gpu0_percent", 8)]
    keys = [(gpu[0], len(machine)) for machine, gpu in monitor._keys]
    assert keys == (one_machine if os.environ["NODES"] == "1" else two_machines)
    print(sorted(cpu), [values for _, values in cpu.values()])


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_machine_is_read_once(nodes: int, run_ranks):
    first, second = run_ranks(program, env={"NODES": str(nodes)})
    assert first.stdout == second.stdout  # all ranks have the same readings
    keys = [f"system/node{node}/memory_gb" for node in range(nodes)]
    assert first.stdout.startswith(str(keys))


@pytest.mark.gpu
def test_readings_of_a_gpu_are_plausible():
    pytest.importorskip("pynvml", reason="needs the package nvidia-ml-py")
    memory = InMemoryLogger()
    with make_trainer(SystemMetricsMonitor("2ba"), loggers=[memory], device="cuda") as trainer:
        trainer.fit()
    readings = {name: series(memory)[f"system/node0/gpu0_{name}"][1] for name in GPU}
    free, total = torch.cuda.mem_get_info(0)
    assert readings["memory_gb"][-1] == pytest.approx((total - free) / 1e9, rel=0.2)
    assert all(0 <= value <= 100 for value in readings["percent"])
    assert all(10 < value < 110 for value in readings["temperature_celsius"])
    assert all(5 < value < 1500 for value in readings["power_watts"])


@pytest.mark.parametrize("value", [0, "0ba", "sometimes"])
def test_wrong_arguments_are_refused(value: Any):
    with pytest.raises(ValueError, match=f"interval={value!r}"):
        SystemMetricsMonitor(value)
