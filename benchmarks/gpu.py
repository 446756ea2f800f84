"""Compare the trainer on a GPU with hand-written loops, within eight minutes, and write the table of docs/speed.md.

    python benchmarks/gpu.py            # everything
    python benchmarks/gpu.py loops      # sections with this word in their names
    python benchmarks/gpu.py --dry-run  # without a GPU, at tiny sizes: tests this file, but measures nothing

Times are medians of rounds that take turns; the device is synchronized before and after the timed steps. Each section
gets a share of the minutes, plus the time that earlier sections have not used; a section that runs out of time is cut
off, and the table says so. The exit code is 1 if a limit is exceeded or a section fails or is cut off, and 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from runner import Callback, ClassificationModel, LanguageModel, Model, Trainer, algorithms, callbacks
from runner.callbacks._peak_flops import find_peak
from runner.data import TensorLoader
from runner.models import GPT, ResNet18

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PRECISION = "amp_bf16" if ON_GPU else "fp32"
ROUNDS = 3 if ON_GPU else 1
WARM_UP, STEPS = (10, 40) if ON_GPU else (1, 2)
FEW_STEPS = 10 if ON_GPU else 2  # steps for each plug-in, because there are many plug-ins
LIMIT = 1.01  # of time and of peak memory, relative to the hand-written loop
NEEDS_GPU = "needs a GPU"
NETWORKS = ("gpt", "resnet18")
# For each network for texts, the size of its vocabulary and the tokens of a sequence.
TEXTS: dict[str, tuple[int, int]] = {"gpt": (50304, 512), "llama": (128256, 1024)}
if not ON_GPU:
    TEXTS = dict.fromkeys(TEXTS, (64, 8))
LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""A Llama of 1.2 billion weights, whose MLPs are four times as wide as its other layers."""
WRONG_LABELS = (
    "runner",
    "model=mlp",
    "model.num_classes=5",  # there are ten digits
    "model.module.num_classes=5",
    "algorithms=none",
    f"trainer.device={DEVICE}",
    "trainer.max_duration=1ba",
)


@dataclass(frozen=True)
class Row:
    """A row of the table; a value above its limit fails."""

    title: str
    value: float | str
    limit: float | None = None
    unit: str = "times"


class OutOfTime(Exception):
    """A section has used up its time."""


@dataclass
class Clock:
    """The time until which a section may begin another run."""

    deadline: float = float("inf")

    def check(self) -> None:
        """Raise `OutOfTime` after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime


CLOCK = Clock()


def make_model(name: str) -> Model:
    """Return a network with its loss, with the same weights each time."""
    return copy.deepcopy(_first_model(name))


@cache
def _first_model(name: str) -> Model:
    torch.manual_seed(0)
    if name == "gpt":
        sizes = (*TEXTS[name], 768, 12, 12) if ON_GPU else (*TEXTS[name], 16, 2, 2)
        keys = ("vocab_size", "context", "d_model", "n_layers", "n_heads")
        return LanguageModel(GPT(**dict(zip(keys, sizes, strict=True))))
    if name == "llama":
        return LanguageModel(make_llama())
    return ClassificationModel(ResNet18(num_classes=10), 10)


def make_llama() -> nn.Module:
    """Return a Llama of transformers with new weights."""
    from runner.models.hf.causal_lm import HFCausalLM

    vocab, context = TEXTS["llama"]
    sizes = LLAMA if ON_GPU else LLAMA | {"hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 4 * sizes["hidden_size"], "vocab_size": vocab, "max_position_embeddings": context}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
        return HFCausalLM(folder, pretrained=False)


@cache
def make_data(name: str, batches: int = 8) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of several batches, on the host."""
    samples = batches * batch_size(name)
    generator = torch.Generator().manual_seed(1)
    if name in TEXTS:
        vocab, context = TEXTS[name]
        tokens = torch.randint(vocab, (samples, context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    size = 32 if ON_GPU else 8
    return torch.rand(samples, 3, size, size, generator=generator), torch.arange(samples) % 10


def batch_size(name: str) -> int:
    """Return the number of samples in a batch."""
    return {"gpt": 16, "llama": 8, "resnet18": 512}[name] if ON_GPU else 2


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both loops, in torch's fastest version."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True if ON_GPU else None)


def wait() -> None:
    """Wait for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


class Stopwatch(Callback):
    """Measures the time of the steps after the warm-up, within the context that `around` returns."""

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[Any]], steps: int) -> None:
        self._last = WARM_UP + steps
        self._stack = contextlib.ExitStack()
        self._around = around
        self.seconds = 0.0

    def batch_start(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == WARM_UP:
            wait()
            self._stack.enter_context(self._around())
            self.seconds = -time.perf_counter()

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == self._last:
            self._stack.close()
            wait()
            self.seconds += time.perf_counter()


def by_hand(name: str) -> float:
    """Return the seconds of the steps in a hand-written loop."""
    CLOCK.check()
    model = make_model(name).to(DEVICE)
    optimizer = make_optimizer(model.parameters())
    inputs, targets = (tensor.to(DEVICE).split(batch_size(name)) for tensor in make_data(name))
    start_time = 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            wait()
            start_time = time.perf_counter()
        batch = inputs[step % len(inputs)], targets[step % len(inputs)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
            loss: Any = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
    wait()
    return time.perf_counter() - start_time


def by_trainer(
    name: str,
    loader: Any = None,
    around: Any = contextlib.nullcontext,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
    steps: int = STEPS,
    **arguments: Any,
) -> float:
    """Return the seconds of the same steps in the Trainer, after `prepare` has changed it."""
    CLOCK.check()
    model = make_model(name)
    vars(model)["metrics"] = lambda train: {}  # the hand-written loop has none
    watch = Stopwatch(around, steps)
    own_callbacks = arguments.pop("callbacks", [])
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            model=model,
            train_dataloader=loader or TensorLoader(*make_data(name), batch_size=batch_size(name), shuffle=False),
            optimizers=make_optimizer,
            max_duration=f"{WARM_UP + steps}ba",
            precision=PRECISION,
            device=DEVICE,
            callbacks=[*own_callbacks, watch],
            progress_bar=False,
            run_dir=folder,
            **arguments,
        ) as trainer,
    ):
        prepare(trainer)
        trainer.fit()
    return watch.seconds


def compare(first: Callable[[], float], second: Callable[[], float]) -> float:
    """Return the time of the first function relative to the second: the median of rounds that take turns."""
    return statistics.median(first() / second() for _ in range(ROUNDS))


def peak(run: Callable[[], float]) -> float:
    """Return the peak GPU memory of a run in bytes, without memory allocated before."""
    gc.collect()  # a Trainer has reference cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def loops() -> Iterator[Row]:
    """Time and peak memory of a step."""
    for name in NETWORKS:
        yield Row(f"{name} by hand", 1000 * by_hand(name) / STEPS, unit="ms a step")
        yield Row(f"{name}, time", compare(lambda: by_trainer(name), lambda: by_hand(name)), LIMIT)  # noqa: B023
        ratio = peak(lambda: by_trainer(name)) / peak(lambda: by_hand(name)) if ON_GPU else NEEDS_GPU  # noqa: B023
        yield Row(f"{name}, peak memory", ratio, LIMIT)


def syncs() -> Iterator[Row]:
    """Waits of the host for the GPU within steps, by file and line."""
    waits: Counter[str] = Counter()

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        synchronizing = (warning for warning in caught if "called a synchronizing" in str(warning.message))
        waits.update(f"{warning.filename}:{warning.lineno}" for warning in synchronizing)

    for name in NETWORKS:
        if not ON_GPU:
            yield Row(f"{name}, waits in a step", NEEDS_GPU)
            continue
        by_trainer(name, around=watched)
        yield Row(f"{name}, waits in {STEPS} steps", float(waits.total()), 0, "waits")
        yield from (Row(f"  {location}", float(count), unit="waits") for location, count in waits.items())
        waits.clear()


def throughput() -> Iterator[Row]:
    """Tokens per second of a Llama with compiled blocks, and its share of the GPU's peak."""
    seconds = statistics.median(
        by_trainer("llama", algorithms=[algorithms.Compile()] if ON_GPU else []) for _ in range(ROUNDS)
    )
    batch = tuple(tensor[: batch_size("llama")] for tensor in make_data("llama", 1))
    yield Row("llama", STEPS * batch[0].numel() / seconds, unit="tokens/s")
    peak = find_peak(torch.cuda.get_device_name(), PRECISION) if ON_GPU else None
    flops = make_model("llama").flops_per_batch(batch)
    share = STEPS * flops / seconds / peak if peak and flops else "the peak of this device is unknown"
    yield Row("of the peak", share)


def plug_ins() -> Iterator[Row]:
    """Time with each algorithm and callback, on the GPT, or on ResNet-18 if it does not work with the GPT."""
    operations = importlib.import_module("operations")
    plain = {name: statistics.median(by_trainer(name, steps=FEW_STEPS) for _ in range(ROUNDS)) for name in NETWORKS}
    for module in (algorithms, callbacks):
        for name in (name for name in module.__all__ if name not in operations.LEFT_OUT):
            for network, seconds in plain.items():
                try:
                    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                        plug_in: Any = [getattr(module, name)(**operations.ARGUMENTS.get(name, {}))]
                        group = module.__name__.rpartition(".")[2]
                        seconds_with = by_trainer(network, steps=FEW_STEPS, **{group: plug_in})
                except (TypeError, ValueError):
                    continue  # it does not support this network
                yield Row(f"{name}, {network}", seconds_with / seconds)
                break
            else:
                yield Row(name, "does not fit these runs")


def compiling() -> Iterator[Row]:
    """Steps of a compiled model, and recorded steps of a small one, whose speed the host limits."""
    if not ON_GPU:
        yield Row("compiled and recorded steps", NEEDS_GPU)
        return
    for scope in ("block", "step"):
        compiled = partial(by_trainer, "gpt", algorithms=[algorithms.Compile(scope=scope)])
        yield Row(f"{scope} compiled", compare(compiled, lambda: by_hand("gpt")))
    recorded = partial(by_trainer, "resnet18", algorithms=[algorithms.CUDAGraph()])
    yield Row("resnet18, recorded", compare(recorded, lambda: by_hand("resnet18")))
    losses: list[Tensor] = []

    class Losses(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            losses.append(state.total_loss)

    for graphs in ([algorithms.CUDAGraph()], []):
        by_trainer("resnet18", algorithms=graphs, callbacks=[Losses()])
    with_graphs, plain = torch.stack(losses).chunk(2)
    yield Row("largest difference of a loss, recorded", float((with_graphs - plain).abs().max()), 0.05, "")


def prefetch() -> Iterator[Row]:
    """Batches from the host, compared with data on the GPU."""
    inputs, targets = (tensor.split(batch_size("resnet18")) for tensor in make_data("resnet18"))
    pageable = [*zip(inputs, targets, strict=True)] * ((WARM_UP + STEPS) // len(inputs) + 1)
    kinds: dict[str, Iterable[Any]] = {"pageable": pageable}
    if ON_GPU:
        pinned = {id(tensor): tensor.pin_memory() for batch in pageable for tensor in batch}
        kinds["pinned"] = [tuple(pinned[id(tensor)] for tensor in batch) for batch in pageable]
    for kind, batches in kinds.items():
        yield Row(kind, compare(lambda: by_trainer("resnet18", batches), lambda: by_hand("resnet18")), LIMIT)  # noqa: B023


def out_of_memory() -> Iterator[Row]:
    """Size of microbatches under a cap of the memory."""
    if not ON_GPU:
        yield Row("samples that fit under a cap", NEEDS_GPU)
        return
    needed = peak(lambda: by_trainer("gpt"))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * needed / torch.cuda.get_device_properties(DEVICE).total_memory)
    sizes: list[int] = []

    class Size(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            sizes.append(state.samples_per_microbatch)

    try:
        by_trainer("gpt", microbatch_size="auto", callbacks=[Size()])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    yield Row("samples that fit under a cap", float(sizes[-1]), batch_size("gpt") - 1, "samples")


def resumed() -> Iterator[Row]:
    """A resumed run, compared with an uninterrupted one."""
    for name in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:

            def trainer(**arguments: Any) -> Trainer:
                loader = TensorLoader(*make_data(name), batch_size=batch_size(name), shuffle=True)  # noqa: B023
                required = {"model": make_model(name), "train_dataloader": loader, "optimizers": make_optimizer}  # noqa: B023
                required |= {"max_duration": "6ba", "precision": PRECISION, "device": DEVICE, "progress_bar": False}
                return Trainer(**required, run_dir=f"{folder}/run", deterministic=True, **arguments)

            with trainer() as whole:
                whole.fit("3ba")
                whole.save_checkpoint(f"{folder}/saved")
                whole.fit("3ba")
            with trainer(resume_path=f"{folder}/saved") as second:
                second.fit()
            states = [side.state.unwrapped_model.state_dict() for side in (whole, second)]
            different = sum(not torch.equal(states[0][key], states[1][key]) for key in states[0])
            yield Row(f"{name}, tensors that differ", float(different), 0, "tensors")


def saves() -> Iterator[Row]:
    """Steps with a checkpoint after every tenth, written in the background or not."""
    for asynchronous in (False, True):

        def run() -> float:
            saver = callbacks.CheckpointSaver(save_interval="10ba", asynchronous=asynchronous)  # noqa: B023
            return by_trainer("gpt", callbacks=[saver])

        yield Row("asynchronous" if asynchronous else "synchronous", compare(run, lambda: by_trainer("gpt")))


def wrong_labels() -> Iterator[Row]:
    """Message of a run with invalid labels: an assertion fails on the GPU, which is unusable afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-m", *WRONG_LABELS], cwd=folder, capture_output=True, text=True, timeout=300
        )
    if result.returncode == 0:
        raise RuntimeError("labels that have no class were trained")
    phrases = re.findall(r"device-side assert triggered|out of bounds|runner check", result.stderr)
    phrases = phrases or [result.stderr[-200:]]
    yield Row(f"exit code {result.returncode}, which names", ", ".join(dict.fromkeys(phrases)))


def one_rank() -> Iterator[Row]:
    """DDP with a single rank, over NCCL on a GPU: time of a step, and whether weights are bit-identical."""
    weights: dict[bool, Tensor] = {}

    class Keep(Callback):
        def fit_end(self, state: Any, logger: Any) -> None:
            vector = nn.utils.parameters_to_vector(state.unwrapped_model.parameters()).detach().cpu()
            weights[isinstance(state.model, DistributedDataParallel)] = vector

    def wrap(trainer: Trainer) -> None:
        model = trainer.state.unwrapped_model
        trainer.run.bind(DistributedDataParallel(model, gradient_as_bucket_view=True))

    dist.init_process_group("nccl" if ON_GPU else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = partial(by_trainer, "gpt", prepare=wrap, callbacks=[Keep()])
        yield Row("time", compare(wrapped, lambda: by_trainer("gpt", callbacks=[Keep()])))
    finally:
        gc.collect()
        dist.destroy_process_group()
    yield Row("largest difference of a weight", float((weights[True] - weights[False]).abs().max()), 0, "")


# Each section with its share of the time, in percent.
SECTIONS: dict[Callable[[], Iterator[Row]], int] = {
    loops: 10,
    syncs: 2,
    compiling: 22,
    prefetch: 5,
    out_of_memory: 3,
    resumed: 4,
    saves: 14,
    wrong_labels: 4,
    one_rank: 5,
    throughput: 13,
    plug_ins: 18,
}


def measure(section: Callable[[], Iterator[Row]]) -> Iterator[tuple[str, str, bool]]:
    """Yield each row of a section as its title, its value and whether it failed; an error is a row that failed."""
    try:
        for row in section():
            value = row.value if isinstance(row.value, str) else f"{row.value:.3f} {row.unit}".rstrip()
            limit = "" if row.limit is None else f" (limit {row.limit:g})"
            is_over = ON_GPU and row.limit is not None and not isinstance(row.value, str) and row.value > row.limit
            yield row.title, f"{value}{limit}{', OVER' * is_over}", is_over
    except OutOfTime:
        yield "CUT OFF", "its share of the time was used up", True
    except Exception as error:
        yield "FAILED", f"{type(error).__name__}: {error}", True


def main(arguments: list[str]) -> int:
    """Print each row, and write all of them as a table; return 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names of sections (default: all)")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for all sections (default 7.5)")
    parser.add_argument("--table", type=Path, default=Path("build/gpu.md"), help="file to write (default build/gpu.md)")
    parser.add_argument("--dry-run", action="store_true", help="run at tiny sizes without a GPU")
    options = parser.parse_args(arguments)
    for word in options.words:
        if not any(word in section.__name__ for section in SECTIONS):
            names = ", ".join(section.__name__ for section in SECTIONS)
            parser.error(f"{word!r} is in no section's name: {names}")
    if options.dry_run == ON_GPU:
        problem = "--dry-run is for machines without a GPU; hide this one with CUDA_VISIBLE_DEVICES="
        parser.error(problem if ON_GPU else "there is no GPU to measure; --dry-run runs it at tiny sizes")
    device = torch.cuda.get_device_name() if ON_GPU else "dry run at tiny sizes, which measure nothing"
    heading = f"{device}, torch {torch.__version__}, {PRECISION}"
    print(heading)
    chosen = {
        key: share
        for key, share in SECTIONS.items()
        if not options.words or any(word in key.__name__ for word in options.words)
    }
    failed, share_so_far, start_time = False, 0, time.monotonic()
    table = [heading, "", "| | | |", "| --- | --- | --- |"]
    options.table.parent.mkdir(parents=True, exist_ok=True)
    for section, share in chosen.items():
        share_so_far += share
        CLOCK.deadline = start_time + 60 * options.minutes * share_so_far / sum(chosen.values())
        print(f"\n{section.__name__}: {section.__doc__}")
        for title, value, is_failed in measure(section):
            failed |= is_failed
            print(f"{title:>36}: {value}", flush=True)
            table.append(f"| {section.__name__} | {title} | {value} |".replace("\n", " "))
        options.table.write_text("\n".join(table) + "\n")  # after each section, in case this process is killed
    print(f"\n{time.monotonic() - start_time:.0f} s; table in {options.table}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
