"""What a sweep over the length and the final rate of the decay saves with `share=true`, and whether it changes a bit.

    python benchmarks/shared_sweep.py

The 12 points are four lengths of decay and three final rates of the multi-layer perceptron on digits. They are trained
alone and then sharing what they have in common, with digests after every batch; training is counted in batches.

Exit code 1 says that sharing trained more than 0.55 of the batches, or that a digest differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runner import first_difference

LIMIT = 0.55
POINTS = ["scheduler.t_decay=0.2dur,0.3dur,0.4dur,0.5dur", "scheduler.alpha_f=0,0.01,0.1"]
RUN = [
    *(sys.executable, "-m", "runner", "-m", "model=mlp", "scheduler=warmup_stable_decay", *POINTS),
    *("callbacks=[checkpoint_saver,state_digest]", "callbacks.state_digest.interval=1ba"),
]


def sweep(folder: Path, name: str, *arguments: str) -> tuple[int, float]:
    """Run the sweep into a folder of its own, and return the batches that its jobs trained, and the seconds."""
    began = time.perf_counter()
    command = [*RUN, *arguments, f"hydra.sweep.dir={name}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=3600)
    seconds = time.perf_counter() - began
    batches = 0
    for run in (folder / name).glob("[!.]*/result.json"):
        manifest = json.loads((run.parent / "checkpoints" / "latest" / "manifest.json").read_text())
        batches += manifest["timestamp"]["batch"] - json.loads(run.read_text())["forked_at"]
    return batches, seconds


def main() -> int:
    """Print the figures; exit code 1 when one is out of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=24, help="length of a job (default 24)")
    length = f"trainer.max_duration={parser.parse_args().epochs}ep"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone, seconds = sweep(folder, "alone", length)
        shared, its_seconds = sweep(folder, "shared", length, "share=true")
        runs = sorted(one.parent for one in (folder / "alone").glob("[!.]*/result.json"))
        found = [first_difference(run, folder / "shared" / run.name) for run in runs]
    equal = sum(one.batch is None for one in found)
    print(f"{len(runs)} jobs alone:  {alone:7,} batches in {seconds:.0f} s")
    print(f"{len(runs)} jobs shared: {shared:7,} batches in {its_seconds:.0f} s")
    print(f"ratio: {shared / alone:.3f} of the batches (limit {LIMIT})")
    print(f"equal to the bit: {equal} of {len(runs)}, {sum(one.agreed for one in found):,} batches compared")
    return int(shared > LIMIT * alone or equal < len(runs))


if __name__ == "__main__":
    sys.exit(main())
