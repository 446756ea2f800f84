"""Each fault fits the code, and each promise has its sentence in the README and at least one fault.

Running `mutations.py` takes too long for every change.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from mutations import FAULTS, ROOT, Fault, apply

PROMISES = sorted((ROOT / "tests" / "promises").glob("test_*.py"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_code(fault: Fault, tmp_path: Path):
    before = (ROOT / fault.file).read_text()
    (tmp_path / fault.file).parent.mkdir(parents=True)
    (tmp_path / fault.file).write_text(before)
    apply(fault, tmp_path)
    after = (tmp_path / fault.file).read_text()
    assert after != before
    compile(after, fault.file, "exec")
    assert all((ROOT / "tests" / path).exists() for path in fault.tests.split())


def test_a_fault_that_no_longer_fits_is_refused(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="'y = 2' stands 0 times in a.py"):
        apply(Fault("name", "unit", "a.py", "y = 2", "", ""), tmp_path)


def plain(text: str) -> str:
    """Return a text without line breaks and without the marks and links of Markdown."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("**", "").replace("`", "")


@pytest.mark.parametrize("path", PROMISES, ids=lambda path: path.stem)
def test_a_promise_quotes_the_readme_and_has_faults(path: Path):
    words = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
    assert plain(words).rstrip(".") in plain((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [fault for fault in FAULTS if fault.promise == path.stem.removeprefix("test_")]


def test_names_of_faults_are_unique_and_unit_faults_name_no_promise():
    names = [fault.name for fault in FAULTS]
    assert len({*names}) == len(names)
    assert not [fault.name for fault in FAULTS if fault.promise == "unit" and "promises/" in fault.tests]
