"""Each fault of `mutations.py` still fits the code; the script itself takes too long to run with every change."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import FAULTS, ROOT, Fault, apply


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_code_as_it_is(fault: Fault, tmp_path: Path):
    before = (ROOT / fault.file).read_text()
    (tmp_path / fault.file).parent.mkdir(parents=True)
    (tmp_path / fault.file).write_text(before)
    apply(fault, tmp_path)
    after = (tmp_path / fault.file).read_text()
    assert after != before
    compile(after, fault.file, "exec")
    assert all((ROOT / "tests" / path).exists() for path in fault.tests.split())


def test_a_fault_that_fits_no_more_is_refused(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="'y = 2' stands 0 times in a.py"):
        apply(Fault("name", "unit", "a.py", "y = 2", "", ""), tmp_path)
