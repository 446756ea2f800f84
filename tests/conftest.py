"""Shared by all tests: an isolated environment, free ports, and commands and ranks as processes with time limits."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import http.server
import inspect
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from filelock import FileLock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LAUNCHED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TERMINAL = pytest.StashKey[int]()

SUPPORT = HERE / "support"
# For imports of helpers and of `mutations`; last in the path, because folders of tests/ have names of packages.
sys.path += [str(folder) for folder in (SUPPORT, HERE, HERE / "project") if str(folder) not in sys.path]

os.environ["COLUMNS"] = "120"  # the same width of printed text everywhere

pytest_plugins = ["summary"]

from forked_writer import fork_writers  # noqa: E402
from made_once import parse_once  # noqa: E402
from python_process import EXTRAS, PATIENCE, Finished, describe, find_free_port, run_processes, run_python, start_python  # noqa: E402
from shares import deal  # noqa: E402
from stores import query  # noqa: E402


def isolate_environment() -> None:
    """Keep the user's configuration out of reach of this process and its children.

    Call it before torch is imported, which reads the number of threads once.
    """
    for name in list(os.environ):
        if name in LAUNCHED or name.startswith(("MLFLOW_", "HYDRA_", "TORCHELASTIC_", "WANDB_")):
            del os.environ[name]
    matplotlib_folder = ROOT / ".pytest_cache" / "matplotlib"  # kept, because making its font list takes seconds
    matplotlib_folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": str(matplotlib_folder),
        "XDG_CONFIG_HOME": str(ROOT / ".pytest_cache" / "config"),  # for the key that signs records
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    # Background jobs of a shell ignore Ctrl-C, and `nohup` ignores SIGHUP; children inherit both.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if "PYTHONPATH" in os.environ:  # children run in other folders
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)


isolate_environment()
parse_once()
fork_writers()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `hang_timeout`."""
    parser.addini("hang_timeout", "seconds after which a test that has not ended ends its process", default="1320")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the stderr of the terminal, because stderr is captured while tests run."""
    assert sys.__stderr__ is not None
    config.stash[TERMINAL] = os.dup(sys.__stderr__.fileno())


def watch_for_a_hang(config: pytest.Config) -> None:
    """Print the stacks of all threads and end the process after `hang_timeout` seconds, unless canceled before."""
    if not config.getoption("usepdb"):
        seconds = float(config.getini("hang_timeout"))
        faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[TERMINAL])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End a test that hangs; xdist names it and continues in a new worker.

    pytest-timeout cannot interrupt code that waits in C, nor fixtures of a failed test.
    """
    watch_for_a_hang(item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection(session: pytest.Session) -> None:
    """Import torchmetrics and torchvision as the product does: the first faster, the second in any build.

    Garbage collection is off until all tests are collected, because nearly all objects live until the process ends.
    """
    if not session.config.getoption("numprocesses", None):  # under xdist, only its workers collect
        gc.disable()
        from runner.libraries.targets import prepare_import

        prepare_import("torchmetrics")
        prepare_import("torchvision")


def pytest_collection_finish() -> None:
    """Exempt all objects loaded so far from garbage collection: a full pass over them takes most of a second."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch again after a failure, because pytest cancels the watch there for debuggers."""
    if isinstance(node, pytest.Item):
        watch_for_a_hang(node.config)


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have selected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if there is no GPU, and order the tests for the workers of xdist."""
    items[:] = deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # here, so that collecting other tests does not wait for it

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class VirtualClock:
    """A clock that advances only when something sleeps, and by one tick at each reading."""

    def __init__(self) -> None:
        self.now = 0
        """Nanoseconds."""
        self.tick = 0
        """Nanoseconds. Tests set it above 0 if successive measurements must begin at different times."""

    def read(self) -> int:
        """Replace `time.perf_counter_ns`."""
        self.now += self.tick
        return self.now

    def sleep(self, seconds: float) -> None:
        """Replace `time.sleep`: advance the clock without waiting."""
        self.now += round(seconds * 1e9)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """A virtual clock in place of `time.perf_counter`, `time.perf_counter_ns` and `time.sleep`."""
    clock = VirtualClock()
    monkeypatch.setattr(time, "perf_counter_ns", clock.read)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.read() / 1e9)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    return find_free_port()


class RunApp(Protocol):
    """Run `python -m runner ARGUMENTS` in a forked process; with `real`, in a new interpreter."""

    def __call__(
        self,
        *arguments: str,
        exit_code: int | None = 0,
        timeout: float = PATIENCE,
        env: Mapping[str, str | None] = ...,
        folder: Path | None = None,
        real: bool = False,
    ) -> Finished:
        """Return the finished process; fail the test unless its exit code is `exit_code` (None: any)."""
        ...


@pytest.fixture
def run_app(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RunApp:
    """Run `python -m runner ARGUMENTS` in the test's `tmp_path`, or in `folder`, within `timeout` seconds."""

    def run(
        *arguments: str,
        exit_code: int | None = 0,
        timeout: float = PATIENCE,
        env: Mapping[str, str | None] = {},
        folder: Path | None = None,
        real: bool = False,
    ) -> Finished:
        command = ["-m", "runner", *arguments]
        logs = tmp_path_factory.mktemp("app")
        (finished,) = run_processes(command, [env], folder=folder or tmp_path, logs=logs, timeout=timeout, real=real)
        if exit_code is not None and finished.returncode != exit_code:
            pytest.fail(f"expected exit code {exit_code}\n{describe([finished])}")
        return finished

    return run


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of the test from one that has imported transformers, datasets, peft and torchvision."""
    monkeypatch.setenv(EXTRAS, "1")


class Ended(NamedTuple):
    """A finished command: its exit code and its output."""

    code: int
    out: str
    err: str


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore the root logger after the test, because Hydra configures it for the whole process."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, own_logging: None
) -> Iterator[Callable[..., Ended]]:
    """Run `python -m runner ARGUMENTS` in this process, in `tmp_path`; `code` is the expected exit code."""
    from runner.__main__ import main  # here, so that collecting other tests does not wait for it

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int | None = None) -> Ended:
        monkeypatch.setattr(sys, "argv", ["runner", *arguments])
        finished = Ended(main(), *capfd.readouterr())
        assert code in (None, finished.code), finished.err
        return finished

    yield run
    if "joblib" in sys.modules:  # its processes would wait for another sweep
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)
    sys.modules.pop("own", None)


# Appended to the programs of ranks. It exits as the command line does, because torch sometimes aborts a rank when the
# interpreter exits ("terminate called without an active exception"). It is not reached if the program fails.
LEAVE = """
import atexit, os, sys, threading
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


class RunRanks(Protocol):
    """Run a program on several ranks until all have ended."""

    def __call__(
        self,
        program: Callable[[], object] | str,
        world_size: int = 2,
        *arguments: str,
        check: bool = True,
        timeout: float = PATIENCE,
        env: Mapping[str, str | None] = ...,
    ) -> list[Finished]:
        """Return the finished processes by rank; with `check`, fail the test unless all exit with 0."""
        ...


@pytest.fixture
def run_ranks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """Run a program as `world_size` processes in the test's `tmp_path`, with the environment variables of torchrun.

    The program is source text, or a function without arguments that imports everything it uses, because only its source
    is passed on.
    """

    def run(
        program: Callable[[], object] | str,
        world_size: int = 2,
        *arguments: str,
        check: bool = True,
        timeout: float = PATIENCE,
        env: Mapping[str, str | None] = {},
    ) -> list[Finished]:
        if callable(program):
            source = f"{textwrap.dedent(inspect.getsource(program))}\n\n{program.__name__}()\n"
        else:
            source = textwrap.dedent(program)
        logs = tmp_path_factory.mktemp("ranks")
        script = logs / "program.py"
        script.write_text(source + LEAVE)
        for module in ("tiny_runs.py", "turns.py"):
            shutil.copy(SUPPORT / module, logs)
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "GLOO_SOCKET_IFNAME": LOOPBACK,
        }
        environments = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r), **env} for r in range(world_size)]
        command = [str(script), *arguments]
        finished = run_processes(command, environments, folder=tmp_path, logs=logs, timeout=timeout, forks=False)
        if check and any(process.returncode for process in finished):
            pytest.fail(describe(finished))
        return finished

    return run


@pytest.fixture
def strict() -> dict[str, str]:
    """An environment in which warnings are errors in child processes too."""
    return {"PYTHONWARNINGS": "error"}


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store, which tests copy because creating one takes seconds."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # xdist's workers share it
    path = folder / "empty_store.db"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make = f"from mlflow import MlflowClient; MlflowClient('sqlite:///{path}.new').get_experiment_by_name('x')"
            run_python(["-c", make], check=True)
            Path(f"{path}.new").rename(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path) -> Path:
    """A working directory with an empty store and the user's `own.py`."""
    from main_runs import OWN

    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_store, tmp_path / "outputs" / "mlflow.db")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@dataclass(frozen=True)
class MLflowServer:
    """A real `mlflow server` on 127.0.0.1, with its store and its artifacts in one folder."""

    port: int
    folder: Path

    @property
    def uri(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return rows of the server's store."""
        return query(self.folder / "mlflow.db", sql, *values)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[MLflowServer]:
    """A real MLflow server, which all tests share because it takes seconds to start."""
    folder = tmp_path_factory.mktemp("server")
    server = MLflowServer(find_free_port(), folder)
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # otherwise ten processes poll for jobs
    shutil.copy(empty_store, folder / "mlflow.db")
    with (folder / "log").open("wb") as log:
        process = start_python(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.uri}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail((folder / "log").read_text())
            time.sleep(0.1)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one committed file, as working directory."""
    from kept_runs import git

    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def request_log() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and a list of the requests that it receives."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            requests.append(self.rfile.readline(1000).decode(errors="replace"))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()
