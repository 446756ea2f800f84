"""Functions whose results on several ranks are compared with those in one process.

Ranks take seconds to start, so `train_and_evaluate` and `agree` call many of these functions on the same ranks.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from rank_models import (
    Classifier,
    OwnStep,
    SmallMemory,
    StepsItself,
    class_data,
    language_model,
    leaving_out,
    token_data,
    weighted_classifier,
    window_data,
)
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset
from torchmetrics.classification import BinaryAveragePrecision, MulticlassAccuracy

from runner import Algorithm, Callback, Model, Trainer
from runner.algorithms import EMA, MixUp
from runner.data import Replicated, Sharded, TensorLoader
from runner.distributed.collectives import any_rank, broadcast_object, destroy_process_group, init_process_group
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.optim.schedulers import linear

MOST_SAMPLES = 17


class LeavingOut(Algorithm):
    """Ignores the targets that are token 0; samples have different numbers of them."""

    def after_dataloader(self, state, logger):
        inputs, targets = state.batch
        state.batch = inputs, targets.masked_fill(targets == 0, -100)


CASES: dict[str, tuple[Any, Any, int, int, dict[str, Any]]] = {
    # name: model, data, samples, batch size, arguments of the Trainer
    "even": (Classifier, class_data, 24, 8, {}),
    "uneven last batch": (Classifier, class_data, 23, 9, {}),
    "fewer samples than ranks": (Classifier, class_data, 17, 8, {}),
    "always fewer samples than ranks": (Classifier, class_data, 5, 1, {}),
    "accumulated": (Classifier, class_data, 23, 9, {"grad_accum": 2}),
    "accumulated, fewer samples than ranks": (Classifier, class_data, 17, 8, {"grad_accum": 2}),
    "microbatches": (Classifier, class_data, 23, 9, {"microbatch_size": 2}),
    "out of memory": (lambda: SmallMemory(2), class_data, 23, 9, {"microbatch_size": "auto"}),
    "class weights": (weighted_classifier, class_data, 23, 9, {}),
    "class weights, accumulated": (weighted_classifier, class_data, 23, 9, {"grad_accum": 3}),
    "targets left out": (leaving_out, class_data, 17, 5, {}),
    "tokens": (language_model, token_data, 24, 8, {}),
    "tokens, uneven": (language_model, token_data, 19, 6, {}),
    "tokens, fewer samples than ranks": (language_model, token_data, 17, 8, {}),
    "tokens, accumulated": (language_model, token_data, 19, 6, {"grad_accum": 2}),
    "tokens, microbatches": (language_model, token_data, 17, 8, {"microbatch_size": 1}),
    "windows": (language_model, window_data, 17, 8, {}),
    "windows, declared": (language_model, window_data, 17, 8, {"equal_targets": True}),
    "windows, left out": (language_model, window_data, 17, 8, {"equal_targets": True, "algorithm": LeavingOut}),
    "own training_step": (OwnStep, class_data, 23, 9, {}),
    "own training_step, fewer samples than ranks": (OwnStep, class_data, 17, 8, {"grad_accum": 2}),
    "manual optimization": (StepsItself, class_data, 23, 9, {}),
    "manual optimization, fewer samples than ranks": (StepsItself, class_data, 17, 8, {}),
    "averaged": (Classifier, class_data, 23, 9, {"algorithm": lambda: EMA("5ba")}),
}


def train(name: str) -> dict[str, Any]:
    """Train a case for two epochs, and return its weights, metrics and counts."""
    make_model, make_data, num_samples, batch_size, arguments = CASES[name]
    arguments = dict(arguments)
    if "algorithm" in arguments:
        arguments["algorithms"] = [arguments.pop("algorithm")()]
    data = make_data(num_samples)
    loader = TensorLoader(*data, batch_size=batch_size, shuffle=True)
    loader.equal_targets = arguments.pop("equal_targets", False)
    with Trainer(
        model=make_model(),
        train_dataloader=loader,
        eval_dataloader=TensorLoader(*data, batch_size=batch_size, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=1e-3),
        schedulers=linear(t_warmup="2ba"),
        max_duration="2ep",
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    state = trainer.state
    now = state.timestamp
    return {
        "weights": {key: value.clone() for key, value in state.unwrapped_model.state_dict().items()},
        "metrics": {label: dict(values) for label, values in state.metric_values.items()},
        "counts": [now.epoch, now.batch, now.sample, now.token],
    }


class Everything(Classifier):
    """A classifier with four kinds of metrics: counts, a mean, all values, and a curve."""

    def metrics(self, train):
        if train:
            return {}
        return {
            "accuracy": MulticlassAccuracy(2, average="micro", validate_args=False),
            "kept": torchmetrics.CatMetric(),
            "mean": torchmetrics.MeanMetric(),
            "average_precision": BinaryAveragePrecision(validate_args=False),
        }

    def update_metric(self, batch, outputs, metric):
        if isinstance(metric, MulticlassAccuracy):
            metric.update(outputs, batch[1])
        elif isinstance(metric, BinaryAveragePrecision):
            metric.update(outputs.softmax(1)[:, 1], batch[1])
        else:
            metric.update(batch[0][:, 0])


def evaluate_each_size() -> dict[int, dict[str, Any]]:
    """Return the metric values and sample counts of evaluations of 1 to 17 samples in batches of 4."""
    results = {}
    sizes = range(1, MOST_SAMPLES + 1)
    loaders = {n: TensorLoader(*class_data(n), batch_size=4, shuffle=False) for n in sizes}
    with Trainer(model=Everything(), eval_dataloader=loaders[1], device="cpu") as trainer:
        for n, loader in loaders.items():
            values = dict(trainer.eval(loader)["eval"])
            values["kept"] = torch.atleast_1d(values["kept"]).sort().values
            results[n] = {"values": values, "samples": trainer.state.eval_timestamp.sample}
    return results


def collectives_of(
    model: Model, data: tuple[Tensor, ...], equal_targets: bool = False, **arguments: Any
) -> dict[str, int]:
    """Return the number of collectives in ten batches in mid-epoch, by kind and shape, as counted by torch's profiler.

    The all-reduce of three numbers is left out: the ranks use it once in a while to agree on the time and on signals.
    """
    counts: Counter[str] = Counter()

    class Profile(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == 5:
                kinds = [torch.profiler.ProfilerActivity.CPU]
                self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True, acc_events=True)
                self.profiler.start()
            elif state.timestamp.batch == 15:
                self.profiler.stop()
                names = [f"{event.name} {event.input_shapes}" for event in self.profiler.events() or []]
                counts.update(name for name in names if name.startswith("gloo:") and name != "gloo:all_reduce [[3]]")

    loader = TensorLoader(*data, batch_size=8, shuffle=True)
    loader.equal_targets = equal_targets
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration="20ba",
        callbacks=[Profile()],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return dict(counts)


class Lengthless:
    """An iterable of batches that has no length."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def refusals() -> dict[str, str | None]:
    """Return the error message for each kind of loader from torch on several ranks; None if the loader is accepted."""
    data = TensorDataset(*class_data(12))
    odd = TensorDataset(*class_data(13))
    unsharded = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    sharded = BatchSampler(DistributedSampler(data), 2, drop_last=False)
    loaders: dict[str, dict[str, Any]] = {
        "plain": {"train_dataloader": DataLoader(data, batch_size=2)},
        "shuffled": {"train_dataloader": DataLoader(data, batch_size=2, shuffle=True)},
        "batch sampler": {"train_dataloader": DataLoader(data, batch_sampler=unsharded)},
        "sharded": {"train_dataloader": DataLoader(data, batch_size=2, sampler=DistributedSampler(data))},
        "sharded batch sampler": {"train_dataloader": DataLoader(data, batch_sampler=sharded)},
        "one replica": {"train_dataloader": DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0))},
        "equal parts": {"train_dataloader": DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0))},
        "list": {"train_dataloader": [*DataLoader(data, batch_size=2)]},
        "evaluation": {"eval_dataloader": DataLoader(data, batch_size=2)},
        "evaluation, list": {"eval_dataloader": [*DataLoader(data, batch_size=2)]},
        "evaluation, replicated shares": {
            "eval_dataloader": Replicated(DataLoader(data, batch_size=2, sampler=DistributedSampler(data)))
        },
        "evaluation, sharded": {"eval_dataloader": DataLoader(data, batch_size=2, sampler=DistributedSampler(data))},
        "evaluation, padded": {"eval_dataloader": DataLoader(odd, batch_size=2, sampler=DistributedSampler(odd))},
    }
    for name, is_empty in {"first": get_global_rank() == 0, "second": get_global_rank() == 1}.items():
        batches = [] if is_empty else [*DataLoader(data, batch_size=2)]
        loaders[f"evaluation, {name} empty"] = {"eval_dataloader": Sharded(batches)}
        loaders[f"evaluation without a length, {name} empty"] = {"eval_dataloader": Sharded(Lengthless(batches))}
    messages: dict[str, str | None] = {}
    for name, arguments in loaders.items():
        try:
            Trainer(model=Classifier(), device="cpu", **arguments).close()
            messages[name] = None
        except ValueError as error:
            messages[name] = str(error)
    with Trainer(model=Classifier(), device="cpu") as trainer:
        for name, read in {"eval": trainer.eval, "predict": trainer.predict}.items():
            try:
                read([*DataLoader(data, batch_size=2)])  # type: ignore[operator]
            except ValueError as error:
                messages[name] = str(error)
    return messages


def end_after_seconds(seconds: float) -> tuple[int, float]:
    """Train for a number of seconds on ranks of different speed, and return the batches and seconds trained."""

    class Slow(Callback):
        def batch_start(self, state, logger):
            time.sleep(0.03 if get_global_rank() else 0.02)

    with Trainer(
        model=Classifier(),
        train_dataloader=TensorLoader(*class_data(24), batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration=f"{seconds}s",
        callbacks=[Slow()],
        device="cpu",
    ) as trainer:
        trainer.fit()
    return trainer.state.timestamp.batch, trainer.state.timestamp.total_wct


def end_after_virtual_seconds(seconds: float) -> tuple[int, float]:
    """Do the same on virtual clocks: each rank has its own, which only `time.sleep` advances."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        patch.setattr(time, "sleep", lambda slept: now.append(now.pop() + slept))
        return end_after_seconds(seconds)


def train_with_mixup_and_dropout(seed: int) -> dict[str, Tensor]:
    """Train with algorithms and layers that draw random numbers, and return the weights."""
    with Trainer(
        model=Classifier(nn.Dropout(0.3)),
        train_dataloader=TensorLoader(*class_data(24), batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
        algorithms=[MixUp(alpha=1.0)],
        seed=seed,
        device="cpu",
    ) as trainer:
        trainer.fit()
    return dict(trainer.state.unwrapped_model.state_dict())


def train_out_of_memory() -> list[tuple[int, dict[str, Tensor]]]:
    """Train with automatic microbatches on ranks of which only rank 0 runs out of memory, and with microbatches of two.

    The network has batch norm and dropout, whose results depend on the microbatches.

    Returns:
        The final size of microbatches and the weights, for both runs.
    """
    results = []
    for size in ("auto", 2):
        most = 2 if get_global_rank() == 0 else 100
        with Trainer(
            model=SmallMemory(most, nn.BatchNorm1d(5), nn.Dropout(0.3)),
            train_dataloader=TensorLoader(
                *class_data(16 * get_world_size()), batch_size=8 * get_world_size(), shuffle=True
            ),
            optimizers=lambda params: torch.optim.SGD(params, lr=0.5),
            max_duration="2ep",
            microbatch_size=size,
            device="cpu",
        ) as trainer:
            trainer.fit()
        results.append((trainer.state.samples_per_microbatch, dict(trainer.state.unwrapped_model.state_dict())))
    return results


def train_and_evaluate() -> None:
    """Save the results that must equal those of one process. All ranks."""
    save(
        lambda: {
            "train": {name: train(name) for name in CASES},
            "eval": evaluate_each_size(),
            "mixup": train_with_mixup_and_dropout(0),
            "auto": train_out_of_memory(),
        }
    )


def agree() -> None:
    """Save the results that only exist on several ranks. All ranks."""
    save(
        lambda: {
            "refusals": refusals(),
            "collectives": {
                "samples": collectives_of(Classifier(), class_data(480)),
                "accumulated": collectives_of(Classifier(), class_data(480), grad_accum=2),
                "tokens": collectives_of(language_model(), token_data(480)),
                "windows": collectives_of(language_model(), window_data(480), equal_targets=True),
                "left out": collectives_of(
                    language_model(), window_data(480), equal_targets=True, algorithms=[LeavingOut()]
                ),
            },
            "clock": end_after_seconds(0.5),
            "virtual clock": end_after_virtual_seconds(1.5),
            "any": [any_rank(get_global_rank() == 1), any_rank(False)],
            "object": broadcast_object({"rank": get_global_rank()}),
        }
    )


def save(function: Callable[[], dict[str, Any]]) -> None:
    """Save the result of a function on this rank in the file `rank<N>.pt`."""
    init_process_group(torch.device("cpu"))  # once, because all Trainers in this process use it
    torch.save(function(), f"rank{get_global_rank()}.pt")
    gc.collect()  # ends the threads of DDP, which could otherwise crash the process when the interpreter exits
    destroy_process_group()


def program_of(module: str, function: str) -> str:
    """Return a program for `run_ranks` that calls a function of a module in tests/, such as 'training/test_loop'."""
    support = Path(__file__).resolve().parent
    path = support.parent / module
    folders = [str(support.parent), str(support), str(path.parent)]
    return f"import sys; sys.path += {folders!r}; from {path.name} import {function}; {function}()"
