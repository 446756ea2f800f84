"""Whether a batch that is trained again is the run's own to the bit, at random batches of runs of many kinds.

    python benchmarks/replay.py [--batches 50]
    python benchmarks/replay.py outputs/mine    # of a run of one's own; under torchrun for one of several ranks

Each run saves a checkpoint after each seventh batch and keeps three, of which the last is then deleted: so the batches,
the first and the last always among them, lie before the first checkpoint, between two, and after the last. Each is
trained again by `runner.replay`, on as many ranks, and all digests from there on are compared with those that the run
kept. One line a run; exit code 1 where a batch differs.
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
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    shutil.rmtree((folder / "run" / "checkpoints" / "latest").resolve())
    return folder / "run"


def count_equal(run: Path, batches: list[int]) -> int:
    """Train batches of a run again, and return how many are the run's own. All ranks."""
    equal = 0
    for batch in batches:
        with runner.replay(run, batch) as trainer:
            trainer.fit()
            found = runner.first_difference(trainer.state.run_dir, run) if runner.get_global_rank() == 0 else None
        if found is not None and (found.batch, found.agreed) != (None, batch):
            print(f"batch {batch} differs: {found}", file=sys.stderr)
        equal += found is not None and (found.batch, found.agreed) == (None, batch)
    return equal


def chosen(run: Path, count: int) -> list[int]:
    """Return the first and the last batch of a run, and others at random."""
    kept = [one["batch"] for one in read_digests(run)]
    return [kept[0], kept[-1], *random.Random(0).sample(kept[1:-1], min(count, len(kept)) - 2)]


def main() -> int:
    """Print how many batches are equal, a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50, help="batches of each run, at least 2")
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a run that kept digests")
    asked = parser.parse_args()
    if asked.run is not None:
        batches = chosen(asked.run, asked.batches)
        equal = count_equal(asked.run, batches)
        if runner.get_global_rank() == 0:
            print(f"{equal} of {len(batches)} equal to the bit", flush=True)
        return int(runner.get_global_rank() == 0 and equal < len(batches))
    differing = 0
    with tempfile.TemporaryDirectory() as place:
        for number, (name, arguments) in enumerate(RUNS.items()):
            folder = Path(place, str(number))
            folder.mkdir()
            run = train(arguments, folder)
            ranks = 2 if "launch.nproc_per_node=2" in arguments else 1
            torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
            again = [*(torchrun if ranks > 1 else ()), __file__, str(run), "--batches", str(asked.batches)]
            done = subprocess.run([sys.executable, *again], capture_output=True, text=True)
            differing += done.returncode != 0
            print(f"{name:24} {done.stdout.strip()}{done.stderr if done.returncode else ''}", flush=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
