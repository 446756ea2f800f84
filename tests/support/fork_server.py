"""A server that imports everything once and then forks: each Python process that it forks starts in 0.1 s.

`python_process.py` runs this file as a program. A forked process behaves like a new interpreter with the same
arguments, environment, working directory and streams. If it starts Python processes itself, they are forked too, from a
copy of it that was made before it ran any code of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "runner.__main__",
    "runner.program.command",
    "runner.verbs.compare",
    "runner.trials.diagnosis",
    "runner.verbs.explain",
    "runner.trials.lint",
    "runner.verbs.prove",
    "runner.verbs.sync",
    "runner.verbs.train",
    "runner.checkpoints.files",
    "runner.optim.schedulers",
    "runner.data.images.digits",
    "runner.data.loaders",
    "runner.data.images.synthetic_images",
    "runner.data.text.synthetic_tokens",
    "runner.models",
    "runner.optim",
    "runner.training.trainer",
    "runner.distributed.store",
    "torch._dynamo",
    "torch.distributed.run",
    "torchmetrics.classification",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "rich.progress",
    "mlflow",
    "mlflow.tracking.client",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.db.utils",
    "runner.callbacks._mlflow.senders",
    "runner.callbacks._mlflow.sink",
    "runner.callbacks._mlflow.store",
    "optuna",
    "submitit",
)
"""Modules that commands and ranks import sooner or later, besides the callbacks and algorithms."""
READS_ENVIRONMENT = ("transformers", "datasets", "huggingface_hub", "wandb")
"""Packages that read the environment when they are imported: not for processes that set its variables."""
EXTRAS = (
    "torchvision.transforms.v2",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "peft",
)
"""Modules of optional libraries that models, texts and images need."""
NOT_FORKED = "submitit.local._local"
"""A module that is always run by a new interpreter: forked, it would look for its folder before its parent makes it."""
MAX_PASSED = 32  # file descriptors that a request can pass
ARROW_THREAD = "jemalloc_bg_thd"  # a thread of pyarrow's allocator, which handles forks correctly
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STREAMS = (0, 1, 2)


def preload(extras: bool) -> None:
    """Import everything that processes of tests import, and optional libraries if `extras` is set."""
    from runner.libraries.targets import prepare_import

    prepare_import("torchmetrics")
    for package in ("runner.callbacks", "runner.algorithms"):
        module = importlib.import_module(package)
        for name in module.__all__:
            getattr(module, name)
    for name in PRELOADED:
        importlib.import_module(name)
    del sys.modules["runner.__main__"]  # otherwise `runpy` warns that the module to run has been imported already
    import sqlalchemy.orm

    sqlalchemy.orm.configure_mappers()
    made_once = runpy.run_path(str(Path(__file__).with_name("made_once.py")))
    made_once["make_stores_once"]()
    made_once["parse_once"]()
    warm_up_hydra()
    loaded = [name for name in READS_ENVIRONMENT if name in sys.modules]
    assert not loaded, f"{loaded} must not be imported here, because they read the environment when they are imported"
    if extras:
        for name in EXTRAS:
            prepare_import(name)
            importlib.import_module(name)
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()} - {ARROW_THREAD}
    assert len(threads) == 1, f"a process must not be forked while it has threads: {threads}"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # most unregister operators of torch, which would take each process 0.1 s
    gc.collect()
    gc.freeze()  # forked processes need not search the objects that exist now for garbage


def warm_up_hydra() -> None:
    """Parse all config files and tables, and compose once, because Hydra builds the tables of its parser then."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from runner.cli import foreign
    from runner.config.composing import initialized

    conf = Path(__file__).resolve().parents[2] / "conf"
    for file in conf.rglob("*.yaml"):
        OmegaConf.load(file)
    foreign.about_foreign("model")
    with initialized(conf):
        compose("config", ["model=mlp", "optimizer.lr=0.1", "callbacks=[checkpoint_saver]", "+callbacks=lr_monitor"])
    GlobalHydra.instance().clear()


def serve(listener: socket.socket) -> None:
    """Fork a process for each request and report its exit code, until the last client disconnects.

    A request passes a channel and three streams; the job follows on the channel as a line of JSON, see `become`. The
    answer on the channel is a line with the process id and, when that process ends, a line with its exit code (negative
    for a signal).
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    clients = [listener.accept()[0]]
    running: dict[int, tuple[socket.socket, socket.socket]] = {}  # the client, and the channel
    while clients:
        ready, _, _ = select.select([listener, *clients, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    tell(running.pop(ended[0])[1], os.waitstatus_to_exitcode(ended[1])).close()
        if listener in ready:
            clients.append(listener.accept()[0])
        for client in [client for client in clients if client in ready]:
            message, received, _, _ = socket.recv_fds(client, 16, 1 + len(STREAMS))
            if not message:
                clients.remove(client)
                client.close()
                for pid in [pid for pid, (owner, _) in running.items() if owner is client]:
                    os.kill(pid, signal.SIGKILL)
                continue
            channel = socket.socket(fileno=received[0])
            job = json.loads(read_line(channel))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for open_socket in (listener, *clients, channel, *(other for _, other in running.values())):
                    open_socket.close()
                os.close(woken)
                os.close(wake)
                become(job, received[1:])
            for stream in received[1:]:
                os.close(stream)
            running[pid] = client, tell(channel, pid)


def tell(channel: socket.socket, number: int) -> socket.socket:
    """Write a number as a line and return the channel; ignore a reader that has gone."""
    with suppress(OSError):
        channel.sendall(b"%d\n" % number)
    return channel


def read_line(channel: socket.socket) -> bytes:
    """Return the bytes up to the next line feed."""
    with channel.makefile("rb") as file:
        return file.readline()


def become(job: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Turn this process into the requested one: run its program, and exit with its exit code.

    Args:
        job: a mapping with `arguments` (of Python), `env`, `cwd`, `session` (whether the process leads a new session),
            `group` (the process group to join, 0 to lead a new one, None to stay in the present one), `forks` (whether
            Python processes that it starts are forked too) and optionally `passed` (the numbers that further file
            descriptors get).
        streams: file descriptors of the standard streams, followed by those for `passed`.
    """
    streams, passed = streams[: len(STREAMS)], streams[len(STREAMS) :]
    passed = [_move_up(descriptor) for descriptor in passed]
    copies = [os.dup(descriptor) if descriptor in STREAMS else descriptor for descriptor in streams]
    for number, descriptor in zip(STREAMS, copies, strict=True):
        os.dup2(descriptor, number)
    for descriptor in {*copies, *streams} - {*STREAMS}:
        os.close(descriptor)
    for descriptor, number in zip(passed, job.get("passed", ()), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    if "datasets" in sys.modules and "HF_DATASETS_CACHE" in os.environ:  # the one variable of them that tests set
        vars(sys.modules["datasets.config"])["HF_DATASETS_CACHE"] = Path(os.environ["HF_DATASETS_CACHE"])
    if job["session"]:
        os.setsid()
    elif job["group"] is not None:
        os.setpgid(0, job["group"])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=-1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "PYTHONWARNINGS" in os.environ:
        warnings.simplefilter(os.environ["PYTHONWARNINGS"])  # type: ignore[arg-type]
    if job["forks"]:
        fork_subprocesses(Copier())
    code = 1
    try:
        code = run_python(job["arguments"])
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except KeyboardInterrupt:
        report_exception()
        code = -signal.SIGINT
    except BaseException:
        report_exception()
    finally:
        leave(code)


def report_exception() -> None:
    """Do what an interpreter does with an exception that nothing catches."""
    exception: Any = sys.exc_info()
    sys.last_type, sys.last_value, sys.last_traceback = exception
    sys.excepthook(*exception)


def _move_up(descriptor: int) -> int:
    """Close a file descriptor, and return a copy of it with a number of at least 500."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 500)
    os.close(descriptor)
    return copy


def leave(code: int) -> NoReturn:
    """Exit as an interpreter does, but without destroying its modules, because torch sometimes aborts a rank then."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:  # an interpreter that ends with KeyboardInterrupt kills itself with SIGINT
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_python(arguments: Sequence[str]) -> int:
    """Run the program of `python ARGUMENTS`, and return 0."""
    sys.orig_argv = [sys.executable, *arguments]
    options, kind, argv = split(arguments)
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*entries, *BASE]
    first = {"-m": os.getcwd(), "-c": "", "script": os.path.dirname(os.path.abspath(argv[0]))}[kind]
    sys.path[:0] = [] if "-P" in options else [first]
    importlib.invalidate_caches()
    if kind == "-m":
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *argv[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(argv[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    return 0


def split(arguments: Sequence[str]) -> tuple[set[str], str, list[str]]:
    """Return Python's options, the kind of program ('-m', '-c' or 'script'), and the program with its arguments."""
    options: set[str] = set()
    for index, argument in enumerate(arguments):
        if argument in ("-m", "-c"):
            return options, argument, [*arguments[index + 1 :]]
        if not argument.startswith("-"):
            return options, "script", [*arguments[index:]]
        if argument not in ("-P", "-u"):
            raise ValueError(f"{argument!r}: a forked process cannot apply this option of Python; pass real=True")
        options.add(argument)
    raise ValueError(f"{arguments!r}: no module, program or script to run")


class Copier:
    """A copy of this process as it is now, from which the Python processes that this one starts later are forked."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that the processes that the copy forks become children of this process
        parent = os.getpid()
        if os.fork():
            theirs.close()
            return
        os.chdir("/")  # tests find processes by their working directory, and must not find this copy
        self.channel.close()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            with suppress(OSError):
                self._serve(theirs)
        os._exit(0)

    def start(self, job: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Fork a child of this process, and return its id."""
        socket.send_fds(self.channel, [b"1"], streams)
        self.channel.sendall(json.dumps(job).encode() + b"\n")
        return int(read_line(self.channel))

    def _serve(self, channel: socket.socket) -> None:
        while True:
            message, received, _, _ = socket.recv_fds(channel, 1, MAX_PASSED)
            if not message:
                return
            job = json.loads(read_line(channel))
            reader, writer = os.pipe()
            intermediate = os.fork()
            if intermediate == 0:
                intermediate = os.getpid()
                pid = os.fork()
                if pid:  # exit, so that the orphan becomes a child of the process that requested it
                    os.write(writer, b"%d\n" % pid)
                    os._exit(0)
                while os.getppid() == intermediate:
                    time.sleep(0.0005)
                for descriptor in (reader, writer):
                    os.close(descriptor)
                channel.close()
                become(job, received)
            os.waitpid(intermediate, 0)
            channel.sendall(os.read(reader, 32))
            for descriptor in (reader, writer, *received):
                os.close(descriptor)


def prctl(option: int, value: int) -> None:
    """Set a process attribute; see prctl(2)."""
    ctypes.CDLL(None).prctl(option, value)


def fork_subprocesses(copier: Copier) -> None:
    """Patch `subprocess` so that `copier` forks plain Python commands; all other commands start as usual."""
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(start)

    def execute_child(popen: Any, *values: Any) -> None:
        call = signature.bind(popen, *values).arguments
        arguments: Any = call["args"]
        is_special = isinstance(arguments, str | bytes) or call["preexec_fn"] or call["shell"] or call["pass_fds"]
        program, *arguments = [""] if is_special else map(os.fsdecode, arguments)  # type: ignore[arg-type]
        if program != sys.executable or NOT_FORKED in arguments:
            start(popen, *values)
            return
        env = {os.fsdecode(key): os.fsdecode(value) for key, value in (call["env"] or os.environ).items()}
        group = call.get("process_group", -1)
        job = {
            "arguments": arguments,
            "env": env,
            "cwd": os.fspath(call["cwd"] or os.getcwd()),
            "session": bool(call["start_new_session"]),
            "group": None if group in (-1, None) else group,
            "forks": "-m" in arguments and env.get("RANK", "0") == "0",
        }
        ends = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if end == -1 else end for end, number in zip(ends, STREAMS, strict=True)]
        popen.pid = copier.start(job, streams)
        popen._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(call[name] for name in pipes))

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_forked(path: bytes, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        arguments = [os.fsdecode(argument) for argument in arguments]
        if not arguments[-1].startswith("from multiprocessing.forkserver import"):
            return spawn(path, arguments, passed)
        arguments = [argument for argument in arguments if argument == "-P"] + arguments[-2:]
        job = {"env": dict(os.environ), "cwd": os.getcwd(), "session": False, "group": None, "forks": False}
        return copier.start({**job, "arguments": arguments, "passed": [*passed]}, [*STREAMS, *passed])

    multiprocessing.util.spawnv_passfds = spawn_forked  # starts the server from which data workers are forked


if __name__ == "__main__":
    from_environment = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    BASE = [entry for entry in sys.path if entry not in from_environment]  # without the server's PYTHONPATH
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        preload(extras="--extras" in sys.argv)
        serve(listening)
else:
    BASE = []
