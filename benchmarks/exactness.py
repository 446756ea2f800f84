"""Whether sharded models train like replicas to the bit, and what a rank holds of them.

    python benchmarks/exactness.py            # all of it, on the CPU, with up to four ranks: some minutes
    python benchmarks/exactness.py memory     # one part: cases, split, layouts, memory or save
    python benchmarks/exactness.py save --megabytes 100

- cases: each algorithm and optimizer, on two ranks and two small tasks: the largest difference between parallel=fsdp
  and ddp in weights, buffers and metrics, and between a run resumed in the middle of an epoch and the whole run, with
  the layout that saved it, in shards, and with the other one.
- split: the same differences of tensor_parallel=2 from ddp, on two ranks, and on four together with fsdp, for each
  algorithm and optimizer that fits, in 64 bits: only the metric, which has 32, differs in more than the last digits.
- layouts: a run saved on two ranks, gathered and in shards, and loaded on 1 to 4: its weights and moments, with a
  vocabulary that does not divide, and the rest of training, compared with the whole run.
- memory: bytes of weights, gradients and optimizer states of a GPT of 50 million weights on each of four ranks.
- save: how long training on four ranks stands still while a GPT with AdamW is saved in shards in the background, into
  the memory of the save before, and how long a plain copy of what each rank holds takes; for comparison, the first save
  of a run, and how long saves take to their end.

A `=` means equal to the bit. The exit code is 1 where something differs that should not, a rank holds too much, or
training stands still for too long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ranks import Found, runs, start

from runner import Callback, LanguageModel, Trainer
from runner.callbacks import CheckpointSaver
from runner.checkpoints.files import read_file
from runner.checkpoints.hashing import digest
from runner.data import TensorLoader
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import local
from runner.models import GPT
from runner.trials.sizes import size_of

EXACT: dict[str, Any] = {"exact": True}  # 64 bits and no dropout, whose masks are of a rank
LIMIT = 0.30
"""Of what a rank holds with ddp, the most that one of four may hold with fsdp."""
COPY_LIMIT = 1.2
"""Times a plain copy: the longest that training may stand still for a save in the background."""
ROUNDS = 5


def compare_cases() -> Found:
    """Return the differences of each case: of fsdp from ddp, and of runs that were resumed. All ranks."""
    found: Found = {}
    for name, case in runs.CASES.items():
        folder = Path(name.replace(" ", "_"))
        plain = runs.train(case, folder)
        sharded = runs.train(case, folder, save=folder / "saved", sharded=True, parallel="fsdp")
        again = runs.train(case, folder, parallel="fsdp", resume_path=folder / "saved")
        crossed = runs.train(case, folder, resume_path=folder / "saved")
        found[name] = [
            runs.difference(plain, sharded),
            runs.difference(sharded, again),
            runs.difference(plain, crossed),
        ]
    return found


def compare_split() -> Found:
    """Return the differences of each case, in 64 bits: of split layers from ddp, and of resumed runs. All ranks."""
    found: Found = {}
    layout = {"tensor_parallel": 2, "parallel": "ddp" if torch.distributed.get_world_size() == 2 else "fsdp"}
    for name in runs.SPLIT:
        case, folder = runs.CASES[name], Path(name.replace(" ", "_"))
        plain = runs.train(case, folder, **EXACT)
        split = runs.train(case, folder, save=folder / "saved", sharded=True, **layout, **EXACT)
        again = runs.train(case, folder, resume_path=folder / "saved", **layout, **EXACT)
        crossed = runs.train(case, folder, resume_path=folder / "saved", **EXACT)
        found[name] = [
            runs.difference(plain, split),
            runs.difference(split, again),
            runs.difference(plain, crossed),
        ]
    return found


def save_on_ranks(kind: str) -> Found:
    """Return the results of a whole run that saves in the middle, 'gathered' or 'sharded'. All ranks."""
    options: dict[str, Any] = {"sharded": kind == "sharded", "parallel": "fsdp", **EXACT}
    return dict(runs.train(runs.CASES["text: sgd"], Path("run"), save=Path(kind), **options))


def load_on_ranks(kind: str) -> Found:
    """Return digests of what each layout loads, and what the rest of training leaves. All ranks."""
    found: Found = {}
    case = runs.CASES["text: sgd"]
    for parallel in ("ddp", "fsdp"):
        options = {"parallel": parallel, "optimizers": runs.OPTIMIZERS["sgd"], "resume_path": kind, **EXACT}
        with runs.make_trainer("text", folder=Path("run"), **options) as trainer:
            trainer.save_checkpoint(Path("loaded"), sharded=kind == "sharded")
        found[parallel] = [
            digest_of(Path("loaded")) if get_global_rank() == 0 else "",  # the others do not wait until it is written
            runs.train(case, Path("run"), parallel=parallel, resume_path=kind, **EXACT),
        ]
    return found


def digest_of(checkpoint: Path) -> str:
    """Return a digest of the weights and optimizers in a checkpoint."""
    weights, rest = (read_file(checkpoint, name) for name in ("model.pt", "state.pt"))
    return digest([weights, rest["optimizers"]])


class Held(Callback):
    """Adds up the bytes that this rank holds after the second step."""

    def batch_end(self, state, logger):
        """Measure."""
        weights = [*state.unwrapped_model.parameters()]
        states = [one for optimizer in state.optimizers for its in optimizer.state.values() for one in its.values()]
        kinds = {"weights": weights, "gradients": [one.grad for one in weights], "optimizer": states}
        self.bytes = {kind: size_of([*map(local, tensors)]) for kind, tensors in kinds.items()}


def measure_memory() -> Found:
    """Return the bytes that the fullest rank holds, by layout and kind. All ranks."""
    found: Found = {}
    for name, options in {"ddp": {}, "fsdp": {"parallel": "fsdp"}}.items():
        tokens = torch.zeros(8, 16, dtype=torch.int64)
        held = Held()
        with Trainer(
            model=LanguageModel(GPT(vocab_size=12289, context=16, d_model=640, n_layers=9, n_heads=8)),
            train_dataloader=TensorLoader(tokens, tokens, batch_size=4, shuffle=False),
            optimizers=lambda params: torch.optim.AdamW(params, lr=1e-4),
            max_duration="2ba",
            callbacks=[held],
            device="cpu",
            run_dir="run",
            **options,
        ) as trainer:
            trainer.fit()
            count = sum(one.numel() for one in trainer.state.unwrapped_model.parameters())
        most = torch.tensor([*held.bytes.values()])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        found[name] = {"parameters": count, **dict(zip(held.bytes, most.tolist(), strict=True))}
    return found


def measure_save(megabytes: int) -> Found:
    """Return the seconds of copies and saves on the slowest rank, medians of rounds in turn. All ranks.

    Args:
        megabytes: size of the weights with both moments of AdamW, all ranks together.
    """
    width = round((megabytes * 1e6 / 12 / 96) ** 0.5 / 8) * 8  # 8 layers of 12 width^2 weights, 12 bytes each
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    with Trainer(
        model=LanguageModel(GPT(vocab_size=64, context=16, d_model=width, n_layers=8, n_heads=8)),
        train_dataloader=TensorLoader(tokens, tokens, batch_size=4, shuffle=False),
        optimizers=lambda params: torch.optim.AdamW(params, lr=1e-4),
        max_duration="1ba",
        device="cpu",
        run_dir="run",
        parallel="fsdp",
    ) as trainer:
        trainer.fit()
        state = trainer.state
        moments = [one for its in state.optimizers[0].state.values() for one in its.values()]
        held = [*map(local, [*state.unwrapped_model.parameters(), *moments])]
        kinds: dict[str, dict[str, Any]] = {
            "stands still": {"asynchronous": True, "sharded": True},
            "first": {"asynchronous": True, "sharded": True},
            "in shards": {"sharded": True},
            "gathered": {"sharded": False},
        }
        savers = {name: CheckpointSaver("1ba", name, **{"keep": 1, **options}) for name, options in kinds.items()}
        times: dict[str, list[float]] = {"copy": [], **{name: [] for name in savers}}
        for turn in range(ROUNDS + 1):
            spent = {"copy": _time_on_ranks(lambda: [one.clone() for one in held])}
            for name, saver in savers.items():
                if name == "first":
                    saver._copies = None
                spent[name] = _time_on_ranks(partial(saver._save, state, trainer.logger))
                saver._wait()  # until it is written
            for name, seconds in spent.items() if turn else ():
                times[name].append(seconds)
    return {"megabytes": sum(one.nbytes for one in held) * 4 / 1e6} | {
        name: statistics.median(its) for name, its in times.items()
    }


def _time_on_ranks(function: Callable[[], object]) -> float:
    torch.distributed.barrier()
    began = time.perf_counter()
    function()
    spent = torch.tensor(time.perf_counter() - began)
    torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
    return float(spent)


def shown(value: float) -> str:
    """Return a difference as it is printed."""
    return "=" if value == 0 else f"{value:.1e}"


def show_cases(folder: Path) -> bool:
    """Print the table of cases; return whether all is as it should be."""
    print("two ranks: fsdp - ddp, resumed with fsdp - whole, saved with fsdp and resumed with ddp - whole")
    found = start(compare_cases, 2, folder)
    for name, values in found.items():
        print(f"{name:36} {' '.join(f'{shown(one):>8}' for one in values)}")
    return all(
        again == 0 and (name in runs.ROUNDED or (sharded == 0 and crossed == 0))
        for name, (sharded, again, crossed) in found.items()
    )


def show_split(folder: Path) -> bool:
    """Print the tables of split layers; return whether all is as it should be."""
    good = True
    for ranks, layout in {2: "tensor_parallel=2", 4: "tensor_parallel=2 and fsdp"}.items():
        print(f"{ranks} ranks: {layout} - ddp, resumed - whole, resumed with ddp - whole")
        for name, values in start(compare_split, ranks, folder).items():
            print(f"{name:36} {' '.join(f'{shown(one):>8}' for one in values)}")
            good = good and values[1] == 0 and max(values) < 1e-6
    return good


def show_layouts(folder: Path) -> bool:
    """Print the table of layouts; return whether all is as it should be."""
    good = True
    print("saved by fsdp on two ranks: loaded, and trained on from there - whole")
    for kind in ("gathered", "sharded"):
        whole = start(partial(save_on_ranks, kind), 2, folder)
        saved = digest_of(folder / kind)
        for ranks in (1, 2, 3, 4):
            for parallel, (loaded, trained) in start(partial(load_on_ranks, kind), ranks, folder).items():
                apart = runs.difference(whole, trained)
                good = good and loaded == saved and (apart == 0 or ranks != 2)
                print(f"{kind}, {parallel:4} on {ranks} {'=' if loaded == saved else 'differs':>8} {shown(apart):>8}")
    return good


def show_memory(folder: Path) -> bool:
    """Print the table of memory; return whether all is as it should be."""
    found: Mapping[str, Mapping[str, int]] = start(measure_memory, 4, folder)
    totals = {name: sum(value for kind, value in its.items() if kind != "parameters") for name, its in found.items()}
    print(f"four ranks, {found['ddp']['parameters']:,} parameters: MB on the fullest rank")
    for name, its in found.items():
        kinds = " ".join(f"{kind} {value / 1e6:.0f}," for kind, value in its.items() if kind != "parameters")
        print(f"{name:5} {kinds} together {totals[name] / 1e6:.0f}")
    ratio = totals["fsdp"] / totals["ddp"]
    print(f"ratio {ratio:.3f}, at most {LIMIT}")
    return ratio <= LIMIT


def show_save(folder: Path, megabytes: int = 1000) -> bool:
    """Print how long saves take; return whether training stands still no longer than it should."""
    found: dict[str, float] = start(partial(measure_save, megabytes), 4, folder)
    print(f"four ranks, {found['megabytes']:.0f} MB of weights and moments: ms on the slowest rank")
    print(f"copy {1e3 * found['copy']:.0f}, stands still {1e3 * found['stands still']:.0f},", end=" ")
    print(f"at first, in new memory, {1e3 * found['first']:.0f};", end=" ")
    print(f"whole save in shards {1e3 * found['in shards']:.0f}, gathered {1e3 * found['gathered']:.0f}")
    ratio = found["stands still"] / found["copy"]
    print(f"ratio to a copy {ratio:.2f}, at most {COPY_LIMIT}")
    return ratio <= COPY_LIMIT


PARTS = {"cases": show_cases, "split": show_split, "layouts": show_layouts, "memory": show_memory, "save": show_save}


def main() -> int:
    """Measure and print the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if there is none")
    parser.add_argument("--megabytes", type=int, default=1000, help="what `save` saves: weights and moments")
    arguments = parser.parse_args()
    good = True
    for part in arguments.parts or PARTS:
        function = partial(show_save, megabytes=arguments.megabytes) if part == "save" else PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            good = function(Path(folder)) and good
    return int(not good)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
