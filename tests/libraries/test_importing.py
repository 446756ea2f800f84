"""Imported modules are exempt from garbage collection."""

from __future__ import annotations

from pathlib import Path

import pytest
from python_process import run_python

GARBAGE = """
import gc, weakref
from runner.libraries.importing import importing

class Cycle:
    def __init__(self):
        self.me = self

with importing():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count()
earlier = weakref.ref(Cycle())
with importing():
    assert not gc.isenabled()
gc.collect()
assert gc.isenabled() and earlier() is None
"""
COMMAND = """
import gc, sys
from runner.__main__ import main

sys.argv[1:] = ["check"]
print(main(), gc.get_freeze_count() > 100_000, gc.isenabled())
"""


def test_modules_are_frozen_and_earlier_garbage_is_collected():
    run_python(["-c", GARBAGE], real=True, check=True)


@pytest.mark.slow
def test_a_command_exempts_torch_from_garbage_collection(tmp_path: Path):
    done = run_python(["-c", COMMAND], real=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0 True True"
