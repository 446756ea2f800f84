"""The last lines of a test run, which show its cost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from python_process import run_python

PROGRAM = """
import sys, pytest, summary
summary.MOST = float(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "summary", "-p", "no:cacheprovider", "--rootdir", ".", *sys.argv[2:]]))
"""
TESTS = """
def test_one_that_computes():
    assert sum(range(10_000_000))
"""


@pytest.mark.parametrize(
    ("most", "tier", "loud"), [("0", "not slow", True), ("600", "not slow", False), ("0", "slow or not slow", False)]
)
def test_times_are_printed_and_a_first_tier_that_takes_too_long_is_said_loudly(
    tmp_path: Path, most: str, tier: str, loud: bool
):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = run_python(["-c", PROGRAM, most, "-m", tier, "test_it.py"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^wall time (\d+) s, CPU time (\d+) s$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert ("THE FIRST TIER TAKES TOO LONG" in done.stdout) == loud
