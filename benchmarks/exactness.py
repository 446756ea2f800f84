"""Check that sharded models train bit for bit like replicas, and measure the memory of a rank.

    python benchmarks/exactness.py            # all parts, on the CPU, with up to four ranks: some minutes
    python benchmarks/exactness.py memory     # one part: cases, split, layouts, memory or save
    python benchmarks/exactness.py save --megabytes 100

- cases: each algorithm and optimizer, on two ranks and two small tasks: the largest difference between parallel=fsdp
  and ddp in weights, buffers and metrics, and between a whole run and a run resumed in the middle of an epoch, from
  shards with the layout that saved them, and with the other layout.
- split: the same differences between tensor_parallel=2 and ddp, on two ranks, and on four together with fsdp, for each
  algorithm and optimizer that fits, in 64 bits: only the metric, in 32 bits, differs in more than the last digits.
- layouts: a run saved on two ranks, gathered and in shards, and loaded on 1 to 4 ranks: its weights and moments, with a
  vocabulary whose size two ranks cannot divide, and the weights after further training, compared with the whole run.
- memory: bytes of weights, gradients and optimizer states of a GPT of 50 million weights on each of four ranks.
- save: how long training on four ranks stands still while a GPT with AdamW is saved in shards in the background, into
  the memory of the previous save, and how long a plain copy of each rank's tensors takes; for comparison, the first
  save of a run, and the duration of complete saves.

`=` means bit-identical. The exit code is 1 if something differs that should not, a rank holds too much, or training
stands still for too long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ranks import Results, runs, start

from runner import Callback, LanguageModel, Trainer
from runner.callbacks import CheckpointSaver
from runner.checkpoints.files import read_file
from runner.checkpoints.hashing import digest
from runner.data import TensorLoader
from runner.distributed.ranks import get_global_rank
from runner.distributed.sharding import local
from runner.models import GPT
from runner.trials.sizes import size_of

EXACT: dict[str, Any] = {"exact": True}  # 64 bits, and no dropout, whose masks differ between ranks
LIMIT = 0.30
"""Limit of the bytes of one of four ranks with fsdp, relative to the bytes of a rank with ddp."""
COPY_LIMIT = 1.2
"""Longest time that training may stand still for a save in the background, as a multiple of a plain copy."""
ROUNDS = 5


def compare_cases() -> Results:
    """Return the differences of each case: between fsdp and ddp, and of resumed runs. All ranks."""
    results: Results = {}
    for name, case in runs.CASES.items():
        folder = Path(name.replace(" ", "_"))
        plain = runs.train(case, folder)
        sharded = runs.train(case, folder, save=folder / "saved", sharded=True, parallel="fsdp")
        resumed = runs.train(case, folder, parallel="fsdp", resume_path=folder / "saved")
        resumed_with_ddp = runs.train(case, folder, resume_path=folder / "saved")
        results[name] = [
            runs.difference(plain, sharded),
            runs.difference(sharded, resumed),
            runs.difference(plain, resumed_with_ddp),
        ]
    return results


def compare_split() -> Results:
    """Return the differences of each case in 64 bits: between split layers and ddp, and of resumed runs. All ranks."""
    results: Results = {}
    layout = {"tensor_parallel": 2, "parallel": "ddp" if torch.distributed.get_world_size() == 2 else "fsdp"}
    for name in runs.SPLIT:
        case, folder = runs.CASES[name], Path(name.replace(" ", "_"))
        plain = runs.train(case, folder, **EXACT)
        split = runs.train(case, folder, save=folder / "saved", sharded=True, **layout, **EXACT)
        resumed = runs.train(case, folder, resume_path=folder / "saved", **layout, **EXACT)
        resumed_with_ddp = runs.train(case, folder, resume_path=folder / "saved", **EXACT)
        results[name] = [
            runs.difference(plain, split),
            runs.difference(split, resumed),
            runs.difference(plain, resumed_with_ddp),
        ]
    return results


def save_on_ranks(kind: str) -> Results:
    """Return the results of a whole run that saves a checkpoint in the middle, 'gathered' or 'sharded'. All ranks."""
    options: dict[str, Any] = {"sharded": kind == "sharded", "parallel": "fsdp", **EXACT}
    return dict(runs.train(runs.CASES["text: sgd"], Path("run"), save=Path(kind), **options))


def load_on_ranks(kind: str) -> Results:
    """Return, for each layout, a digest of the loaded state and the results of further training. All ranks."""
    results: Results = {}
    case = runs.CASES["text: sgd"]
    for parallel in ("ddp", "fsdp"):
        options = {"parallel": parallel, "optimizers": runs.OPTIMIZERS["sgd"], "resume_path": kind, **EXACT}
        with runs.make_trainer("text", folder=Path("run"), **options) as trainer:
            trainer.save_checkpoint(Path("loaded"), sharded=kind == "sharded")
        results[parallel] = [
            digest_of(Path("loaded")) if get_global_rank() == 0 else "",  # other ranks do not wait until it is written
            runs.train(case, Path("run"), parallel=parallel, resume_path=kind, **EXACT),
        ]
    return results


def digest_of(checkpoint: Path) -> str:
    """Return a digest of the weights and optimizers in a checkpoint."""
    weights, state = (read_file(checkpoint, name) for name in ("model.pt", "state.pt"))
    return digest([weights, state["optimizers"]])


class Held(Callback):
    """Counts the bytes that this rank holds after each step."""

    def batch_end(self, state, logger):
        """Count the bytes of weights, gradients and optimizer states."""
        weights = [*state.unwrapped_model.parameters()]
        entries = [entry for optimizer in state.optimizers for entry in optimizer.state.values()]
        states = [tensor for entry in entries for tensor in entry.values()]
        kinds = {"weights": weights, "gradients": [weight.grad for weight in weights], "optimizer": states}
        self.bytes = {kind: size_of([*map(local, tensors)]) for kind, tensors in kinds.items()}


def measure_memory() -> Results:
    """Return the bytes of the fullest rank, by layout and kind. All ranks."""
    results: Results = {}
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
            count = sum(parameter.numel() for parameter in trainer.state.unwrapped_model.parameters())
        most = torch.tensor([*held.bytes.values()])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        results[name] = {"parameters": count, **dict(zip(held.bytes, most.tolist(), strict=True))}
    return results


def measure_save(megabytes: int) -> Results:
    """Return the seconds of copies and saves on the slowest rank, medians of rounds that take turns. All ranks.

    Args:
        megabytes: size of the weights and both moments of AdamW, over all ranks.
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
        moments = [moment for entry in state.optimizers[0].state.values() for moment in entry.values()]
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
            elapsed = {"copy": _time_on_ranks(lambda: [tensor.clone() for tensor in held])}
            for name, saver in savers.items():
                if name == "first":
                    saver._copies = None
                elapsed[name] = _time_on_ranks(partial(saver._save, state, trainer.logger))
                saver._wait()  # until it is written
            for name, seconds in elapsed.items() if turn else ():
                times[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {"megabytes": sum(tensor.nbytes for tensor in held) * 4 / 1e6, **medians}


def _time_on_ranks(function: Callable[[], object]) -> float:
    torch.distributed.barrier()
    start_time = time.perf_counter()
    function()
    elapsed = torch.tensor(time.perf_counter() - start_time)
    torch.distributed.all_reduce(elapsed, torch.distributed.ReduceOp.MAX)
    return float(elapsed)


def format_difference(value: float) -> str:
    """Return a difference as text."""
    return "=" if value == 0 else f"{value:.1e}"


def show_cases(folder: Path) -> bool:
    """Print the table of cases; return whether all are bit-identical, except for those that round differently."""
    print("two ranks: fsdp - ddp, resumed with fsdp - whole, saved with fsdp and resumed with ddp - whole")
    results = start(compare_cases, 2, folder)
    for name, values in results.items():
        print(f"{name:36} {' '.join(f'{format_difference(value):>8}' for value in values)}")
    return all(
        resumed == 0 and (name in runs.ROUNDED or (sharded == 0 and resumed_with_ddp == 0))
        for name, (sharded, resumed, resumed_with_ddp) in results.items()
    )


def show_split(folder: Path) -> bool:
    """Print the tables of split layers; return whether the differences are small enough."""
    passed = True
    for ranks, layout in {2: "tensor_parallel=2", 4: "tensor_parallel=2 and fsdp"}.items():
        print(f"{ranks} ranks: {layout} - ddp, resumed - whole, resumed with ddp - whole")
        for name, values in start(compare_split, ranks, folder).items():
            print(f"{name:36} {' '.join(f'{format_difference(value):>8}' for value in values)}")
            passed = passed and values[1] == 0 and max(values) < 1e-6
    return passed


def show_layouts(folder: Path) -> bool:
    """Print the table of layouts; return whether weights are equal after loading, and on two ranks after training."""
    passed = True
    print("saved by fsdp on two ranks: loaded, and trained on from there - whole")
    for kind in ("gathered", "sharded"):
        whole = start(partial(save_on_ranks, kind), 2, folder)
        saved = digest_of(folder / kind)
        for ranks in (1, 2, 3, 4):
            for parallel, (loaded, trained) in start(partial(load_on_ranks, kind), ranks, folder).items():
                difference = runs.difference(whole, trained)
                passed = passed and loaded == saved and (difference == 0 or ranks != 2)
                same = "=" if loaded == saved else "differs"
                print(f"{kind}, {parallel:4} on {ranks} {same:>8} {format_difference(difference):>8}")
    return passed


def show_memory(folder: Path) -> bool:
    """Print the table of memory; return whether fsdp is within the limit."""
    sizes: dict[str, dict[str, int]] = start(measure_memory, 4, folder)
    counts = [size.pop("parameters") for size in sizes.values()]
    totals = {name: sum(size.values()) for name, size in sizes.items()}
    print(f"four ranks, {counts[0]:,} parameters: MB on the fullest rank")
    for name, size in sizes.items():
        kinds = " ".join(f"{kind} {value / 1e6:.0f}," for kind, value in size.items())
        print(f"{name:5} {kinds} together {totals[name] / 1e6:.0f}")
    ratio = totals["fsdp"] / totals["ddp"]
    print(f"ratio {ratio:.3f}, at most {LIMIT}")
    return ratio <= LIMIT


def show_save(folder: Path, megabytes: int = 1000) -> bool:
    """Print the durations of saves; return whether training stands still no longer than the limit."""
    results: dict[str, float] = start(partial(measure_save, megabytes), 4, folder)
    print(f"four ranks, {results['megabytes']:.0f} MB of weights and moments: ms on the slowest rank")
    print(f"copy {1e3 * results['copy']:.0f}, stands still {1e3 * results['stands still']:.0f},", end=" ")
    print(f"at first, in new memory, {1e3 * results['first']:.0f};", end=" ")
    print(f"whole save in shards {1e3 * results['in shards']:.0f}, gathered {1e3 * results['gathered']:.0f}")
    ratio = results["stands still"] / results["copy"]
    print(f"ratio to a copy {ratio:.2f}, at most {COPY_LIMIT}")
    return ratio <= COPY_LIMIT


PARTS = {"cases": show_cases, "split": show_split, "layouts": show_layouts, "memory": show_memory, "save": show_save}


def main() -> int:
    """Measure and print the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the weights and moments in `save`")
    arguments = parser.parse_args()
    passed = True
    for part in arguments.parts or PARTS:
        function = partial(show_save, megabytes=arguments.megabytes) if part == "save" else PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            passed = function(Path(folder)) and passed
    return int(not passed)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
