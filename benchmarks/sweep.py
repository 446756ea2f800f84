"""Compare the time of a sweep of short runs in one process with the same number of separate commands.

    python benchmarks/sweep.py

The runs train the multi-layer perceptron on digits for two epochs, with the default callbacks, and differ only in their
seed. The separate commands run first, one after another, and then the sweep with its table, picture and summary in
MLflow. All use cached bytecode, and a folder in which the MLflow store already exists.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 0.25
RUN = [sys.executable, "-m", "runner"]
SHORT = ["model=mlp", "trainer.max_duration=2ep"]


def measure(folder: Path, commands: list[list[str]]) -> float:
    """Return the seconds that commands take one after the other."""
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - start


def main() -> int:
    """Print the ratio; exit code 1 if it is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs in the sweep, and commands (default 20)")
    runs = parser.parse_args().runs
    seeds = [str(seed) for seed in range(1, runs + 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(folder, [[*RUN, *SHORT]])  # makes the store, and fills caches
        separate = measure(folder, [[*RUN, *SHORT, f"seed={seed}"] for seed in seeds])
        in_sweep = measure(folder, [[*RUN, "-m", *SHORT, f"seed={','.join(seeds)}"]])
    print(f"{runs:>3} separate commands: {separate:6.1f} s  ({separate / runs:.2f} s each)")
    print(f"{runs:>3} runs in one sweep: {in_sweep:6.1f} s  ({in_sweep / runs:.2f} s each)")
    print(f"{'ratio':>21}: {in_sweep / separate:6.2f}    (limit {LIMIT:.2f})")
    return int(in_sweep > LIMIT * separate)


if __name__ == "__main__":
    sys.exit(main())
