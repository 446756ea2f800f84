"""Signals end a job, even if the process waits inside torch and runs no Python handler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from python_process import PATIENCE, start_python

from runner.distributed.endings import ended_by_signals, noting_interrupts, was_interrupted
from runner.distributed.signals import HANDLED

STUCK = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from runner.distributed import endings

endings.SECOND_CTRL_C = 0.3
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=30))
with endings.ended_by_signals(grace=float(sys.argv[1])):
    is_printed = False
    while True:  # a signal just before the wait starts is not tested here
        try:
            if not is_printed:
                is_printed = True
                print("waiting", flush=True)
            store.get("never")
        except BaseException:
            pass
"""


@pytest.mark.parametrize(
    ("numbers", "grace"), [([signal.SIGTERM], 0.3), ([signal.SIGHUP], 0.3), ([signal.SIGINT, signal.SIGINT], 1e6)]
)
def test_a_process_that_is_stuck_in_torch_ends_after_the_grace_or_a_second_ctrl_c(
    tmp_path: Path, numbers: list[signal.Signals], grace: float
):
    process = start_python(["-c", STUCK, str(grace)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"waiting\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)  # the operating system merges two signals that are pending at the same time
        assert process.wait(PATIENCE) == 128 + numbers[-1]
        assert process.stderr.read().startswith(f"ended by {numbers[-1].name}: ".encode())


def test_a_command_with_json_that_ends_abruptly_still_prints_its_object(tmp_path: Path):
    body = "".join(f"    {line}\n" for line in STUCK.splitlines())
    start = "from runner.terminal.answer import run_with_answer\ndef run(arguments):\n"
    program = f"{start}{body}run_with_answer(run)\n".replace(
        'print("waiting", flush=True)', 'print("waiting", file=sys.stderr, flush=True)'
    )
    arguments = ["-c", program, "0.3", "--json"]
    process = start_python(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.readline() == b"waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
        (line,) = process.stdout.read().splitlines()
    error = json.loads(line)["error"]
    assert error["code"] == "terminated" and error["message"].startswith(
        "ended by SIGTERM: the job did not stop in time"
    )


def test_a_signal_raises_an_exception_and_a_second_one_does_not_interrupt_the_cleanup():
    before = [signal.getsignal(number) for number in HANDLED]
    threads = threading.active_count()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        closed = False
        with pytest.raises(SystemExit) as raised, ended_by_signals(grace=PATIENCE):
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)
                closed = True
        assert raised.value.code == 128 + number and closed
    assert [signal.getsignal(number) for number in HANDLED] == before
    assert signal.set_wakeup_fd(-1) == -1 and threading.active_count() == threads


def test_ignored_signals_and_other_handlers_are_left_alone():
    def mine(number, frame): ...

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGUSR2, mine)
    try:
        with ended_by_signals(grace=0.01):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.1)
            assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGUSR2)) == (signal.SIG_IGN, mine)
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR2, before[1])


def test_a_signal_to_a_forked_process_does_not_end_its_parent():
    with ended_by_signals(grace=0.01):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        time.sleep(0.1)


def test_in_a_thread_no_handler_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def work() -> None:
        with ended_by_signals(grace=0.01):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_ctrl_c_waits_until_torch_is_imported():
    """During the import, an exception would be swallowed or abort the process."""
    program = "import signal; signal.raise_signal(signal.SIGINT); is_complete = True"
    torch_during_import = {"__name__": "torch"}
    before = signal.getsignal(signal.SIGINT)
    with noting_interrupts():
        assert not was_interrupted()
        exec(compile(program, "torch/__init__.py", "exec"), torch_during_import)
        assert torch_during_import["is_complete"] and was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
        with pytest.raises(KeyboardInterrupt):
            exec(compile(program, "numpy/__init__.py", "exec"), {"__name__": "numpy"})
    assert signal.getsignal(signal.SIGINT) is before
    with noting_interrupts():
        assert not was_interrupted()
