"""How busy the machine was: measured beside other work, kept over sessions, and told where times are compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.records.load import LoadMeter, describe_inequality
from runner.records.result import Result, read_result

SECONDS = 1.0  # of CPU time; starting an interpreter takes up to a quarter of that on a busy machine
MEASURE = f"""
import subprocess, sys
from runner.records.load import _cpu_seconds

busy = [sys.executable, "-I", "-c", "import time\\nwhile time.process_time() < {SECONDS}: pass"]
orphan = [sys.executable, "-I", "-c", f"import subprocess; subprocess.Popen({{busy!r}})"]
before = _cpu_seconds()
subprocess.run(busy if sys.argv[1] == "True" else orphan, check=True, stdout=subprocess.PIPE)  # closed when both end
print(*(now - then for now, then in zip(_cpu_seconds(), before)))
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_other_work_counts_and_that_of_our_own_processes_does_not(is_own: bool):
    """In a process without other children, as those of other tests may end meanwhile."""
    measure = [sys.executable, "-c", MEASURE, str(is_own)]
    everyone, own = map(float, subprocess.run(measure, stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    assert everyone > SECONDS - 0.1  # counted in hundredths, for each core
    assert (own > SECONDS / 2) is is_own


def test_sessions_are_averaged_by_their_length():
    before = {"start": 0.25, "end": 2.0, "others": 0.5}
    found = LoadMeter().read(before, 100.0)
    assert found["start"] == 0.25 and found["others"] == 0.5 and "end" in found


def test_unequal_load_is_told():
    assert describe_inequality([{}, {"others": 0.4}]) is None
    assert describe_inequality([{"others": 0.4}, {"others": 0.45}]) is None
    said = describe_inequality([{"others": 0.02}, {}, {"others": 0.41}])
    assert said is not None and "other work took 2% to 41% of the machine" in said


def test_compared_runs_show_it(tmp_path: Path, run_here: Any):
    for name, others in (("a", 0.02), ("b", 0.41)):
        result = Result("FINISHED", name, name, [], seconds=3.0, load={"start": 0.1, "end": 0.2, "others": others})
        (tmp_path / name).mkdir()
        result.write(tmp_path / name)
        assert read_result(tmp_path / name) == result
    out = run_here("compare", "a", "b", code=0).out
    assert "other work on the machine  2%" in out and "note: other work took 2% to 41% of the machine" in out
