"""Put faults into a copy of the product, one at a time, and print which tests catch them.

    python tests/mutations.py                 # all, as a table; exit code 1 if a fault is missed
    python tests/mutations.py order uneven    # faults with one of these words in their names
    python tests/mutations.py survival        # faults that the tests of a promise must catch

The faults are in `tests/faults/`. Each is tried on its tests, first those of the first tier, then the slow ones. If
they miss it, the whole first tier must catch it. Add a fault with each new promise.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("runner", "callbacks", "algorithms", "conf", "tests", "benchmarks", "docs", ".editable")
FILES = (
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "Makefile",
    "LICENSE",
    "constraints.txt",
)
AT_ONCE = 2
NO_TESTS = 5  # exit code of pytest if no test is selected
TIMEOUT = 1800.0  # seconds for the whole first tier


class Fault(NamedTuple):
    """A change of one file, and the tests that must catch it."""

    name: str
    promise: str
    """The broken promise, named like a file in `tests/promises/`, or `unit`."""
    file: str
    before: str
    after: str
    tests: str
    """Paths below `tests/`, separated by spaces."""


def read_faults(folder: Path) -> Iterator[Fault]:
    """Read the faults of all files.

    `NAME.toml` has the faults that `promises/test_NAME.py` must catch, if that exists. Any other file has faults of
    units, each with the tests next to the unit.
    """
    for path in sorted(folder.glob("*.toml")):
        promise = f"promises/test_{path.stem}.py"
        is_promise = (folder.parent / promise).exists()
        known = {"promise": path.stem, "tests": promise} if is_promise else {"promise": "unit"}
        for name, change in tomllib.loads(path.read_text(encoding="utf-8")).items():
            yield Fault(name=name, **known, **change)


FAULTS = (*read_faults(ROOT / "tests" / "faults"),)


def apply(fault: Fault, tree: Path) -> None:
    """Put a fault into a tree; the text that it changes must occur exactly once."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.name}: {fault.before!r} occurs {text.count(fault.before)} times in {fault.file}")
    path.write_text(text.replace(fault.before, fault.after))


def copy_tree(tree: Path) -> None:
    """Copy the files that the tests need."""
    tree.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)


def run_tests(tree: Path, tier: str, *arguments: str) -> tuple[str | None, float]:
    """Return the first test of a tier that failed or hung, None if all passed, and the seconds taken."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", tier, "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env=environment | {"PYTHONPATH": str(tree)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:  # conftest.py ends a process that hangs, and prints its stack
        failed = [f"{file}::{name}" for file, name in re.findall(r'/tests/(\S+)", line \d+ in (test_\w+)', done.stderr)]
    if done.returncode not in (0, NO_TESTS) and not failed:
        raise RuntimeError(f"the tests could not be run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[0] if failed else None, time.monotonic() - began


def try_out(fault: Fault, trees: queue.SimpleQueue[Path]) -> tuple[bool, str]:
    """Return whether the tests catch a fault, and its row of the table.

    Args:
        fault: the fault.
        trees: unchanged copies of the product; takes a free one, and puts it back.
    """
    tree = trees.get()
    whole = (tree / fault.file).read_text()
    apply(fault, tree)
    try:
        near = [f"tests/{path}" for path in fault.tests.split()]
        where, (failed, seconds) = "next to it", run_tests(tree, "not slow", *near)
        if failed is None:
            where, (failed, seconds) = "next to it, slow", run_tests(tree, "slow", *near)
        if failed is None:  # without test_mutations.py, which would catch any fault
            result = run_tests(tree, "not slow", "-n", "2", "--ignore=tests/project/test_mutations.py", "tests")
            where, (failed, seconds) = "first tier", result
    finally:
        (tree / fault.file).write_text(whole)
        trees.put(tree)
    return failed is not None, f"| {fault.name} | {where if failed else 'NOT CAUGHT'} | {failed} | {seconds:.0f} s |"


def main() -> int:
    """Try the faults named on the command line, or all, and print the table."""
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if not words or any(word in f"{fault.promise} {fault.name}" for word in words)]
    for fault in chosen:  # before anything is run
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / fault.file).parent.mkdir(parents=True)
            shutil.copy(ROOT / fault.file, Path(folder) / fault.file)
            apply(fault, Path(folder))
    print("| fault | caught | by | time |\n|---|---|---|---|")
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(AT_ONCE):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))
        rows = []
        for row in pool.map(try_out, chosen, repeat(trees)):
            rows.append(row)
            print(row[1], flush=True)
    missed = sum(not caught for caught, _ in rows)
    print(f"{len(rows) - missed} of {len(rows)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
