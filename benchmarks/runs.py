"""Measure how long `runner runs` takes with thousands of runs.

    python benchmarks/runs.py

Each command is a separate process that reads 5,000 folders of runs. The output shows the smallest wall and CPU seconds
of several measurements. The limit is on CPU seconds, because other processes may use the machine. The folders are
written by this file, with the format and size of real ones.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from many_runs import write_many  # type: ignore[import-not-found] (a file of the tests)

LIMIT = 3.0  # seconds
COMMANDS = {
    "all of them": [],
    "by metric and choice": ["eval/loss<0.5 model=resnet8", "--sort=eval/loss"],
    "by a key of the config": ["optimizer.lr>0.02", "--sort=-optimizer.lr"],
    "as JSON": ["--json", "--limit=0"],
}


def main() -> int:
    """Print the times; exit code 1 if one is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000, help="number of runs (default 5000)")
    parser.add_argument("--times", type=int, default=3, help="measurements of each command (default 3)")
    arguments = parser.parse_args()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        write_many(Path(name) / "outputs", arguments.runs)
        for title, words in COMMANDS.items():
            measured = [measure([sys.executable, "-m", "runner", "runs", *words], name) for _ in range(arguments.times)]
            wall, cpu = map(min, zip(*measured, strict=True))
            slowest = max(slowest, cpu)
            print(f"{title:>24}: {wall:.2f} s, {cpu:.2f} s of CPU time")
    print(f"{'slowest':>24}: {slowest:.2f} s of CPU time (limit {LIMIT:.1f} for 5,000 runs)")
    return int(slowest > LIMIT)


def measure(command: list[str], folder: str) -> tuple[float, float]:
    """Return the wall and CPU seconds of a command."""
    before = os.times()
    start_time = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start_time
    after = os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


if __name__ == "__main__":
    sys.exit(main())
