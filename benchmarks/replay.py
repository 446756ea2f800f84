"""Check that retrained batches are bit-identical to those of the run, at random batches of many kinds of runs.

    python benchmarks/replay.py [--batches 50]
    python benchmarks/replay.py outputs/mine    # for your own run; under torchrun if it has several ranks

Each run saves a checkpoint every seven batches and keeps three, of which the last is then deleted. The batches always
include the first and the last one, so some are before the first checkpoint, some between two, and some after the last.
`runner.replay` trains each batch again on the same number of ranks, and its digests are compared with those of the run.
The output has a line for each run; the exit code is 1 if a batch differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import runner
from runner.checkpoints.digest import read_digests

SMALL = (
    "data.batch_size=64",
    "trainer.max_duration=4ep",
    "~callbacks.mlflow_logger",
    "hydra.run.dir=run",
)  # 76 batches
KEPT = (
    "+callbacks=state_digest",
    "callbacks.state_digest.interval=1ba",
    "callbacks.checkpoint_saver.save_interval=7ba",
)
MLP = ("model=mlp", "model.module.dropout=0.2")
RUNS: dict[str, tuple[str, ...]] = {
    "the main job": (),
    "dropout, MixUp, EMA": (*MLP, "+algorithms=[mixup,ema]"),
    "SWA, warm-up and decay": (*MLP, "+algorithms=swa", "scheduler=warmup_stable_decay"),
    "CutMix, SAM, grad_accum": (*MLP, "+algorithms=[cutmix,sam]", "trainer.grad_accum=3"),
    "schedule-free": (*MLP, "+algorithms=schedule_free", "optimizer=schedule_free", "scheduler=none"),
    "two ranks": (*MLP, "+algorithms=[mixup,ema]", "launch.nproc_per_node=2"),
    "two ranks, sharded": (*MLP, "+algorithms=[mixup,ema]", "launch.nproc_per_node=2", "trainer.parallel=fsdp"),
}


def train(arguments: tuple[str, ...], folder: Path) -> Path:
    """Train a run in a folder, delete its last checkpoint, and return the run's folder."""
    command = [sys.executable, "-m", "runner", *SMALL, *KEPT, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}")
    shutil.rmtree((folder / "run" / "checkpoints" / "latest").resolve())
    return folder / "run"


def count_equal(run: Path, batches: list[int]) -> int:
    """Retrain batches of a run, and return how many are identical to the run's. All ranks."""
    equal = 0
    for batch in batches:
        with runner.replay(run, batch) as trainer:
            trainer.fit()
            if runner.get_global_rank() != 0:
                continue
            difference = runner.first_difference(trainer.state.run_dir, run)
        is_equal = (difference.batch, difference.agreed) == (None, batch)
        if not is_equal:
            print(f"batch {batch} differs: {difference}", file=sys.stderr)
        equal += is_equal
    return equal


def choose_batches(run: Path, count: int) -> list[int]:
    """Return the first and the last batch of a run, and random ones in between."""
    kept = [digests["batch"] for digests in read_digests(run)]
    return [kept[0], kept[-1], *random.Random(0).sample(kept[1:-1], min(count, len(kept)) - 2)]


def main() -> int:
    """Print the number of identical batches, a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50, help="number of batches of each run, at least 2")
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run that kept digests")
    options = parser.parse_args()
    if options.run is not None:
        batches = choose_batches(options.run, options.batches)
        equal = count_equal(options.run, batches)
        if runner.get_global_rank() == 0:
            print(f"{equal} of {len(batches)} bit-identical", flush=True)
        return int(runner.get_global_rank() == 0 and equal < len(batches))
    differing = 0
    with tempfile.TemporaryDirectory() as parent:
        for number, (name, arguments) in enumerate(RUNS.items()):
            folder = Path(parent, str(number))
            folder.mkdir()
            run = train(arguments, folder)
            ranks = 2 if "launch.nproc_per_node=2" in arguments else 1
            torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
            command = [*(torchrun if ranks > 1 else ()), __file__, str(run), "--batches", str(options.batches)]
            result = subprocess.run([sys.executable, *command], capture_output=True, text=True)
            differing += result.returncode != 0
            print(f"{name:24} {result.stdout.strip()}{result.stderr if result.returncode else ''}", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
