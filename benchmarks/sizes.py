"""Measure the time and the disk space of an installation, for each dependency of pyproject.toml.

    python benchmarks/sizes.py
    python benchmarks/sizes.py --replace mlflow mlflow-skinny sqlalchemy alembic

Wheels of the versions in constraints.txt are first downloaded into build/sizes, which is not measured. Then pip
installs them into a new environment without a network, one dependency after another. The figures of a dependency
include only the packages that earlier ones have not installed. Seconds are CPU time, mostly for unpacking files and
compiling them to bytecode.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "sizes"
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))


def disk(folder: Path) -> float:
    """Return the megabytes that the files below a folder take."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()) / 1e6


def pip(python: str | Path, *words: str) -> None:
    """Run pip with a Python; its output is shown if it fails."""
    command = [str(python), "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stdout}")


def main() -> int:
    """Print a line for each dependency, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replace", nargs="+", default=[], help="a dependency to leave out, and packages to install instead"
    )
    replaced, *replacements = parser.parse_args().replace or [""]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if replaced and not any(text.startswith(f"{replaced}>") for text in declared):
        parser.error(f"--replace {replaced}: pyproject.toml has no such dependency")
    names = [text for text in declared if not replaced or not text.startswith(f"{replaced}>")]
    names += replacements
    pip(sys.executable, "wheel", "--wheel-dir", str(WHEELS), *CONSTRAINTS, *names)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin", "python")
        first = before = disk(Path(folder))
        total = 0.0
        for name in names:
            start_time = sum(os.times()[2:4])
            pip(python, "install", "--no-index", "--find-links", str(WHEELS), *CONSTRAINTS, name)
            seconds = sum(os.times()[2:4]) - start_time
            total += seconds
            after = disk(Path(folder))
            print(f"{name.partition('>')[0]:>16}: {after - before:7.1f} MB  {seconds:5.1f} s", flush=True)
            before = after
        listed = subprocess.run([python, "-m", "pip", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
        print(f"{'all':>16}: {before - first:7.1f} MB  {total:5.1f} s  {len(listed.splitlines()) - 2} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
