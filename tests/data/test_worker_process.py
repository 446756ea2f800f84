"""Data workers forked from a server: what they are sent, how long they live, and how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from python_process import PATIENCE, wait_until

from runner.data import DatasetLoader, late_worker
from runner.data.worker_process import dump
from runner.failures.facts import is_of_environment

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings(r"ignore:unclosed file <_io\.(FileIO|BufferedRandom):ResourceWarning"),
]


def data_set(read: Any, size: int = 8, **attributes: Any) -> Any:
    """Return a data set of samples `read(self, index)` with these attributes; no other process can import its class."""

    class Local:
        def __init__(self) -> None:
            vars(self).update(attributes)

        def __len__(self) -> int:
            return size

        def __getitem__(self, index: int) -> Any:
            return read(self, index)

    return Local()


def load(data: Any, batch_size: int = 4, **options: Any) -> DatasetLoader:
    return DatasetLoader(data, batch_size, shuffle=False, num_workers=1, **options)


def values(loader: Any) -> list[Any]:
    return [value for batch in loader for value in batch.tolist()]


def test_workers_are_forked_from_a_process_with_one_thread():
    def read(self: Any, index: int) -> int:
        return len(os.listdir(f"/proc/{os.getppid()}/task")) * 1000 + (os.getppid() == self.trainer)

    assert set(values(load(data_set(read, trainer=os.getpid())))) == {1000}


def test_workers_live_across_epochs_and_end_with_their_loader():
    loader = load(data_set(lambda self, index: os.getpid()))
    (pid,) = set(values(loader))
    assert set(values(loader)) == {pid}
    process = psutil.Process(pid)
    del loader
    process.wait(PATIENCE)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: vars(data).update(epoch=2),
        lambda data: data.pool.append(0),
        lambda data: data.pool.__setitem__(0, 5),
        lambda data: data.scale.mul_(3),
        lambda data: data.inner.update(deep=[4]),
    ],
)
def test_changes_to_a_data_set_between_epochs_reach_the_workers(change: Any):
    def read(self: Any, index: int) -> int:
        return int((self.epoch + sum(self.pool) + len(self.pool) + self.inner["deep"][0]) * self.scale)

    data = data_set(read, epoch=1, pool=[1, 2], scale=torch.ones(()), inner={"deep": [3]})
    loader = load(data)
    before = values(loader)
    change(data)
    assert values(loader) == [data[index] for index in range(8)] != before


def test_simultaneous_iterations_have_separate_workers():
    loader = load(data_set(lambda self, index: index))
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([4, 5, 6, 7], [4, 5, 6, 7]),
    ]


@pytest.mark.slow
def test_a_script_without_a_main_guard_can_use_its_own_classes_and_functions(tmp_path: Path):
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "runner.py").write_text("raise SystemExit('runner.py shadows the package')\n")
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text("""
import os, sys
sys.path.append(os.getcwd())
import helper
from dataclasses import dataclass
from runner.data import DatasetLoader

@dataclass
class Sample:
    number: int

class Numbers:
    def __init__(self):
        self.transform = lambda x: helper.double(x) + 1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert os.environ["OWN"] == "set late"
        return Sample(self.transform(index))

print("once")
os.environ["OWN"] = "set late"
read = [*DatasetLoader(Numbers(), 2, shuffle=False, num_workers=1, collate_fn=list)]
assert read == [[Sample(1), Sample(3)], [Sample(5), Sample(7)]], read
""")
    result = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "once\n"), result.stderr


def test_errors_name_the_unpicklable_part():
    lines = (line for line in "ab")
    loader = load(data_set(lambda self, index: index, files={"train": [lines]}))
    with pytest.raises(
        ValueError, match=r"^dataset\.files\['train'\]\[0\]=<generator .*: cannot be sent .*num_workers=0"
    ):
        list(loader)


def local_error(*bases: type[Exception]) -> type[Exception]:
    class Local(*bases):
        pass

    return Local


class Strict(Exception):
    """An error that cannot be rebuilt from its message."""

    def __init__(self, row: int, column: str) -> None:
        super().__init__(row, column)
        self.lock = threading.Lock()


@pytest.mark.parametrize("context", ["forkserver", "fork"])
@pytest.mark.parametrize(
    ("stage", "kind", "arguments"),
    [
        ("sample", local_error(Exception), ("row 7",)),
        ("collate", local_error(Exception), ("row 7",)),
        ("start", local_error(Exception), ("row 7",)),
        ("sample", local_error(Strict), (7, "row 7")),
        ("sample", Strict, (7, "row 7")),
    ],
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_error_of_an_unpicklable_class_is_raised_with_its_traceback(
    stage: str, kind: Any, arguments: Any, context: str
):
    def fail(current: str) -> None:
        if current == stage:
            error = kind(*arguments)
            error.add_note("a note from the user")
            raise error

    def collate(samples: Any) -> Any:
        fail("collate")
        return samples

    data = data_set(lambda self, index: fail("sample"))
    loader = load(data, collate_fn=collate, worker_init_fn=lambda _: fail("start"), multiprocessing_context=context)
    with pytest.raises(Exception, match=r"row 7") as caught:
        list(loader)
    assert all(text in str(caught.value) for text in (kind.__name__, "in fail", "a note from the user"))
    assert stage != "sample" or "raised by dataset[0]" in str(caught.value)


@pytest.mark.parametrize("context", ["forkserver", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_unpicklable_batch_raises_an_error_that_names_the_part(context: str):
    data = data_set(lambda self, index: {"x": (letter for letter in "ab")})
    with pytest.raises(TypeError, match=r"batch\[0\]\['x'\] is of type generator"):
        list(load(data, collate_fn=list, multiprocessing_context=context))


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_exit_in_a_worker_raises_an_error_that_names_the_sample(error: BaseException):
    def read(self: Any, index: int) -> None:
        raise error

    with pytest.raises(RuntimeError, match=r"raised by dataset\[0\](.|\n)*the data set raised " + type(error).__name__):
        list(load(data_set(read)))


@pytest.mark.slow
def test_a_worker_that_exits_is_not_an_environment_failure():
    loader = load(data_set(lambda self, index: os._exit(0)))
    expected = r"data worker 0 \(pid \d+\) ended with exit code 0 while it read sample 0; batch 1 of epoch 1 was due"
    with pytest.raises(RuntimeError, match=expected) as caught:
        list(loader)
    assert not is_of_environment(caught.value)


def test_a_worker_without_a_first_batch_is_an_error_and_prints_its_stack(monkeypatch: Any, capfd: Any):
    def read_forever(self: Any, index: int) -> None:
        threading.Event().wait()

    monkeypatch.setattr(late_worker, "FIRST_BATCH", 2.0)
    with pytest.raises(RuntimeError, match=r"^data worker 0 \(pid \d+, sleeping\) has not delivered its first batch"):
        list(load(data_set(read_forever)))
    assert "in read_forever" in capfd.readouterr().err


def test_the_server_survives_signals_and_is_restarted_after_its_death():
    loader = load(data_set(lambda self, index: os.getppid()), batch_size=1)
    batches = iter(loader)
    server = psutil.Process(int(next(batches)))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        server.send_signal(number)
    assert [int(batch) for batch in batches] == [server.pid] * 7
    server.kill()
    wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE)  # the process that starts the next server reaps it
    assert server.pid not in values(loader)


def test_tensors_are_shared_and_mapped_files_are_reopened(tmp_path: Path):
    mapped = numpy.memmap(tmp_path / "numbers", numpy.int32, "w+", shape=(1000, 1000))
    mapped[:] = numpy.arange(1_000_000).reshape(1000, 1000)
    part = mapped[100:900:3, ::-1]
    assert len(dump([mapped, part])) < 2000
    shared = torch.zeros(1 << 20)

    def read(self: Any, index: int) -> int:
        self.shared[index] = 1
        assert isinstance(self.part.base, numpy.memmap)
        return int(self.part[index, 5]) - int(self.many[index])

    many = [torch.tensor(number) for number in range(1000)]  # more tensors than are shared
    data = data_set(read, shared=shared, part=part, many=many)
    assert values(load(data)) == [int(part[index, 5]) - index for index in range(8)]
    assert int(shared.sum()) == 8
