"""Check that SpikeGuard and SampleLedger find faults planted in the data, and nothing else.

    python benchmarks/guards.py [--seeds 5]

- SpikeGuard: the final loss of a small GPT on clean text, and with 8 of 700 batches replaced by nonsense, without and
  with the guard; and how often it acts in 20 runs on clean text.
- SampleLedger: how many of the digits with wrong labels, 5 % of all, are among the 8 % that it lists.

The exit code is 1 in any of these cases: on average over seeds, the loss of a run with the guard is more than 1 % above
that of the clean run, or the loss of a run without the guard is not; the guard acts on clean text; the ledger lists
less than 80 % of the wrong labels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from planted_runs import NONSENSE, flip_labels, keep_ledger, train_language  # noqa: E402  # pyright: ignore[reportMissingImports]

from runner.algorithms import SpikeGuard  # noqa: E402

CLEAN = 20  # runs on clean text


def measure_guard(seeds: int) -> bool:
    """Print losses with and without the guard; return whether it prevents the damage and ignores clean text."""
    excesses: dict[str, list[float]] = {"nonsense": [], "guard": []}
    print("SpikeGuard: final loss    clean   nonsense   with the guard   rollbacks")
    for seed in range(seeds):
        clean, _ = train_language(700, seed, range(0))
        damaged, _ = train_language(700, seed, NONSENSE)
        guarded, spikes = train_language(700, seed, NONSENSE, SpikeGuard())
        excesses["nonsense"].append(damaged / clean - 1)
        excesses["guard"].append(guarded / clean - 1)
        print(f"{f'seed {seed}':>22} {clean:8.4f} {damaged:10.4f} {guarded:16.4f} {spikes:11}", flush=True)
    interventions = sum(train_language(250, seed, range(0), SpikeGuard())[1] > 0 for seed in range(CLEAN))
    means = {name: statistics.fmean(values) for name, values in excesses.items()}
    print(
        f"above the clean run: {means['nonsense']:.2%} with nonsense, {means['guard']:.2%} with the guard, in the mean"
    )
    print(f"it acted in {interventions} of {CLEAN} clean runs")
    return means["guard"] <= 0.01 < means["nonsense"] and interventions == 0


def measure_ledger(seeds: int) -> bool:
    """Print the shares of wrong labels that are listed; return whether they are at least 80 % on average."""
    shares = []
    for seed in range(seeds):
        train, wrong = flip_labels(seed)
        with tempfile.TemporaryDirectory() as folder:
            rows = keep_ledger(train, seed, run_dir=folder).tables["sample_ledger"]["rows"]
        shares.append(len({row[0] for row in rows} & {*wrong.tolist()}) / len(wrong))
    texts = ", ".join(f"{share:.0%}" for share in shares)
    print(f"SampleLedger: share of the wrong labels that it lists: {texts}; mean {statistics.fmean(shares):.0%}")
    return statistics.fmean(shares) >= 0.8


def main() -> int:
    """Print all figures; exit code 1 if one misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    seeds = parser.parse_args().seeds
    return int(not all([measure_guard(seeds), measure_ledger(seeds)]))


if __name__ == "__main__":
    sys.exit(main())
