"""Load of other processes on the machine: measured, averaged over sessions, and reported by compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.records.load import LoadMeter, describe_inequality
from runner.records.result import Result, read_result

SECONDS = 1.0  # CPU time; starting an interpreter takes up to a quarter of that on a busy machine
MEASURE = f"""
import subprocess, sys
from runner.records.load import _cpu_seconds

busy = [sys.executable, "-I", "-c", "import time\\nwhile time.process_time() < {SECONDS}: pass"]
orphan = [sys.executable, "-I", "-c", f"import subprocess; subprocess.Popen({{busy!r}})"]
before = _cpu_seconds()
# The orphan inherits the pipe, so reading it to its end waits for the orphan too.
subprocess.run(busy if sys.argv[1] == "True" else orphan, check=True, stdout=subprocess.PIPE)
print(*(end - start for end, start in zip(_cpu_seconds(), before)))
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_only_cpu_time_of_child_processes_counts_as_own(is_own: bool):
    """Measure in a subprocess, because children that other tests have started may end in the meantime."""
    measure = [sys.executable, "-c", MEASURE, str(is_own)]
    total, own = map(float, subprocess.run(measure, stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    assert total > SECONDS - 0.1  # CPU time is counted in hundredths of a second per core
    assert (own > SECONDS / 2) is is_own


def test_load_of_sessions_is_averaged_by_their_length():
    before = {"start": 0.25, "end": 2.0, "others": 0.5}
    load = LoadMeter().read(before, 100.0)
    assert load["start"] == 0.25 and load["others"] == 0.5 and "end" in load


def test_unequal_load_is_described():
    assert describe_inequality([{}, {"others": 0.4}]) is None
    assert describe_inequality([{"others": 0.4}, {"others": 0.45}]) is None
    sentence = describe_inequality([{"others": 0.02}, {}, {"others": 0.41}])
    assert sentence is not None and "other work took 2% to 41% of the machine" in sentence


def test_compare_shows_other_work_and_a_note_if_unequal(tmp_path: Path, run_here: Any):
    for name, others in (("a", 0.02), ("b", 0.41)):
        result = Result("FINISHED", name, name, [], seconds=3.0, load={"start": 0.1, "end": 0.2, "others": others})
        (tmp_path / name).mkdir()
        result.write(tmp_path / name)
        assert read_result(tmp_path / name) == result
    out = run_here("compare", "a", "b", code=0).out
    assert "other work on the machine  2%" in out and "note: other work took 2% to 41% of the machine" in out
