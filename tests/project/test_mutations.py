"""Each fault can be applied to the code; each promise quotes the README and has at least one fault.

These quick checks run after each change, because `mutations.py` itself takes too long.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from mutations import FAULTS, ROOT, Fault, apply

PROMISES = sorted((ROOT / "tests" / "promises").glob("test_*.py"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_to_the_code(fault: Fault, tmp_path: Path):
    before = (ROOT / fault.file).read_text()
    (tmp_path / fault.file).parent.mkdir(parents=True)
    (tmp_path / fault.file).write_text(before)
    apply(fault, tmp_path)
    after = (tmp_path / fault.file).read_text()
    assert after != before
    compile(after, fault.file, "exec")
    assert all((ROOT / "tests" / path).exists() for path in fault.tests.split())


def test_a_fault_that_no_longer_applies_is_refused(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="'y = 2' occurs 0 times in a.py"):
        apply(Fault("name", "unit", "a.py", "y = 2", "", ""), tmp_path)


def plain(text: str) -> str:
    """Return Markdown as plain text on one line: links, bold and code lose their markup."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("**", "").replace("`", "")


@pytest.mark.parametrize("path", PROMISES, ids=lambda path: path.stem)
def test_a_promise_quotes_the_readme_and_has_faults(path: Path):
    sentence = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
    assert plain(sentence).rstrip(".") in plain((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [fault for fault in FAULTS if fault.promise == path.stem.removeprefix("test_")]


def test_faults_have_unique_names_and_those_of_units_run_no_tests_of_promises():
    names = [fault.name for fault in FAULTS]
    assert len({*names}) == len(names)
    assert not [fault.name for fault in FAULTS if fault.promise == "unit" and "promises/" in fault.tests]
