"""If a test hangs, the report names it, and the tests after it still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import signal, threading, time
import pytest

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def test_one_whose_fixture_hangs_once_it_has_failed(stuck):
    assert False

def test_one_that_no_signal_interrupts():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()

def test_one_that_comes_after_them():
    pass
"""


@pytest.mark.slow
def test_a_hanging_test_is_named_and_later_tests_run(tmp_path: Path):
    (tmp_path / "test_stuck.py").write_text(TESTS)
    options = ["-p", "conftest", "-o", "hang_timeout=3", "-o", "timeout=1", "-n", "1"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    for name in ("whose_fixture_hangs_once_it_has_failed", "that_no_signal_interrupts"):
        assert f"crashed while running 'test_stuck.py::test_one_{name}'" in process.stdout
    assert "1 passed" in process.stdout
    assert "test_stuck.py" in process.stderr and "most recent call first" in process.stderr  # the stack of the hang
