"""A forked process behaves like the interpreter that it replaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from python_process import CAN_FORK, PATIENCE, processes_in, run_python, start_python, wait_until

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")

PROBE = """
import json, os, signal, sys
print(json.dumps({
    "name": __name__,
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "path": sys.path,
    "environment": {key: value for key, value in os.environ.items() if key not in ("LC_CTYPE", "_")},
    "stdin": sys.stdin.read(),
    "terminals": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:3],
}))
print("said", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["program", "safe program", "module", "script"])
def test_a_forked_process_starts_in_the_same_state_as_an_interpreter(tmp_path: Path, kind: str):
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "more").mkdir()
    arguments = {
        "program": ["-c", PROBE, "a", "-b"],
        "safe program": ["-P", "-c", PROBE],
        "module": ["-m", "probe", "a"],
        "script": ["probe.py", "a"],
    }[kind]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "more"), "MINE": "1"}
    forked, real = (run_python(arguments, cwd=tmp_path, env=env, real=real) for real in (False, True))
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.returncode == 0 and real.stderr == "said\n"


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "raise SystemExit(3)",
        "raise SystemExit",
        "raise SystemExit('a reason')",
        "{}['key']",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'left'); print('done')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "import warnings; warnings.warn('odd')",
    ],
)
def test_a_forked_process_ends_like_an_interpreter(tmp_path: Path, program: str):
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    forked, real = (run_python(["-c", program], cwd=tmp_path, env=env, real=real) for real in (False, True))
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert [*forked.stderr.splitlines()[-1:]] == [*real.stderr.splitlines()[-1:]]


def test_a_forked_process_reads_and_writes_pipes_and_can_be_killed(tmp_path: Path):
    program = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    with start_python(["-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        streams: Any = process
        streams.stdin.write(b"one\n")
        streams.stdin.flush()
        assert streams.stdout.readline() == b"ONE\n" and process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert [running.pid for running in processes_in(tmp_path)] == [process.pid]
        process.kill()
    assert process.returncode == -signal.SIGKILL and processes_in(tmp_path) == []


def test_python_processes_that_a_forked_process_starts_are_forked_and_are_its_children(tmp_path: Path):
    program = f"""
import os, subprocess, sys, time
def start(*arguments, **options):
    return subprocess.Popen([{sys.executable!r}, *arguments], **options)
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child = start("-m", "child", "x", env={{**os.environ, "MINE": "2"}}, process_group=0, **pipes)
out, _ = child.communicate("hello")
print(out, child.returncode, end="")
print(start("-c", "raise SystemExit(4)", start_new_session=True).wait(), flush=True)
start("-c", "import time; time.sleep(100)")
time.sleep(100)
"""
    (tmp_path / "child.py").write_text(
        "import os, sys\n"
        "print('torch' in sys.modules, os.getppid() == int(os.environ['PARENT']), os.getpgid(0) == os.getpid())\n"
        "print(sys.argv[1:], os.environ['MINE'], sys.stdin.read())\n"
        "sys.exit(5)\n"
    )
    program = "import os; os.environ['PARENT'] = str(os.getpid())\n" + program
    with start_python(["-c", program], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        streams: Any = process
        lines = [streams.stdout.readline().decode() for _ in range(3)]
        assert lines == ["True True True\n", "['x'] 2 hello\n", " 54\n"]
        wait_until(lambda: len(processes_in(tmp_path)) == 2)
        process.kill()
        process.wait(PATIENCE)
    (orphan,) = processes_in(tmp_path)  # the child survives its parent, as with a new interpreter
    orphan.kill()
    psutil.wait_procs([orphan], 30)
