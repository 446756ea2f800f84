"""Measure how much slower a run is while another one trains on the same machine.

    python benchmarks/together.py

The default experiment is trained alone, and then twice at the same time. The output is the time of a batch in the
slower of the two runs relative to a run alone: by default, with one thread each because its steps are short; with a
thread for each core, like larger experiments (`launch.threads`); and with torch's default for idle threads, which spin
on the cores that the other run needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"one thread each": 4.0, "all cores": 80.0}
DEFAULT = "300000"  # spins of libgomp by default, if there are no more threads than cores
ARGUMENTS = ("+callbacks=[json_lines_logger]", "trainer.max_duration=3ep")


def start(
    folder: Path, number: int, spins: str | None, arguments: Sequence[str]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run; return its process and its folder."""
    run_dir = folder / f"run{number}"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    env |= {"PYTHONPATH": str(ROOT)} | ({} if spins is None else {"GOMP_SPINCOUNT": spins})
    command = [sys.executable, "-m", "runner", *ARGUMENTS, *arguments, f"hydra.run.dir={run_dir}"]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL), run_dir


def train(runs: int, spins: str | None = None, arguments: Sequence[str] = ()) -> float:
    """Train runs at the same time, and return the median seconds of a batch in the last epoch of the slowest."""
    with tempfile.TemporaryDirectory() as name:
        started = [start(Path(name), number, spins, arguments) for number in range(runs)]
        if any(process.wait() for process, _ in started):
            raise RuntimeError("a run failed")
        return max(read_seconds(run_dir) for _, run_dir in started)


def read_seconds(run_dir: Path) -> float:
    """Return the median seconds of a batch in the last epoch of a run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [line["wall_time"] for line in lines if line.get("epoch") == 2 and "loss/train/total" in line["metrics"]]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def main() -> int:
    """Print the ratios; exit code 1 if one is over its limit."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    alone = min(train(1) for _ in range(2))
    many = [f"launch.threads={os.cpu_count()}"]
    ratios = {"one thread each": train(2) / alone, "all cores": train(2, None, many) / alone}
    print(f"alone: {1e3 * alone:.1f} ms a batch; the slower of two runs at once, over it:")
    for name, ratio in ratios.items():
        print(f"{name:>35}: {ratio:6.1f} times  (limit {LIMITS[name]:.0f})")
    print(f"{'all cores, as libgomp waits':>35}: {train(2, DEFAULT, many) / alone:6.1f} times")
    return int(any(ratio > LIMITS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
