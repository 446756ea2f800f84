"""The last lines of a test run show its cost."""

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
    ("most", "tier", "warns"), [("0", "not slow", True), ("600", "not slow", False), ("0", "slow or not slow", False)]
)
def test_times_are_printed_with_a_warning_if_the_first_tier_takes_too_long(
    tmp_path: Path, most: str, tier: str, warns: bool
):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = run_python(["-c", PROGRAM, most, "-m", tier, "test_it.py"], cwd=tmp_path, env=env)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^wall time (\d+) s, CPU time (\d+) s$", process.stdout, re.MULTILINE), process.stdout
    assert ("THE FIRST TIER TAKES TOO LONG" in process.stdout) == warns
