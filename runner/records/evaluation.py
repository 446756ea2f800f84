"""Identifies how a run was evaluated: digests of the evaluators' data and of the code of their metrics."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch

from runner.core.state import State
from runner.data.content import count_rows, digest, held_tensors
from runner.data.seeded_batches import SeededBatches
from runner.device.batch import tensors

log = logging.getLogger("runner")

SAMPLES = 8  # samples to read from data that is not in memory, with fixed seeds if transforms are random
LIBRARIES = ("torch", "torchmetrics")  # their classes are identified by name alone


def describe_evaluators(state: State) -> dict[str, str]:
    """Return everything but the weights that an evaluation depends on. Any rank; once, after training.

    Returns:
        For each evaluator, `{label}:data`: a digest of its samples, and `{label}:size`: their number. For each of its
        metrics, `{label}/{name}`: a digest of its code and settings. Runs can be compared if all of these are equal.
    """
    model = state.unwrapped_model
    descriptions = {}
    for evaluator in state.evaluators:
        label = evaluator.label
        rows = count_rows(evaluator.dataloader)
        size = "unknown" if rows is None else str(rows)
        if (batches := evaluator.subset_num_batches) is not None:
            size += f", of which {batches} batches of {getattr(evaluator.dataloader, 'batch_size', 'unknown')}"
        descriptions |= {f"{label}:data": _digest_data(evaluator.dataloader), f"{label}:size": size}
        descriptions[f"{label}/loss"] = _digest_code(model, [inspect.unwrap(type(model).loss)])
        for name, metric in state.eval_metrics.get(label, {}).items():
            descriptions[f"{label}/{name}"] = _digest_code(metric, type(metric).__mro__)
    return descriptions


def warn_of_other_data(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Warn of each evaluator whose data differs between two results of `describe_evaluators`; {} stands for unknown."""
    for label in (key.removesuffix(":data") for key in now if key.endswith(":data")):
        size, data = f"{label}:size", f"{label}:data"
        if before.get(size, now[size]) != now[size]:
            change = f"{before[size]} -> {now[size]} samples"
        elif before.get(data, now[data]) != now[data]:
            change = "different samples"
        else:
            continue
        consequence = "its metrics cannot be compared with earlier ones"
        log.warning("the data of evaluator %r has changed (%s): %s", label, change, consequence)


def _digest_data(loader: Any) -> str:
    """Return a digest of a loader's data: of its tensors, else of evenly spaced samples, else of its class."""
    dataset = getattr(loader, "dataset", loader)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    try:
        content = held_tensors(loader)
    except TypeError:
        content = [torch.tensor([*kind.encode()])]
        rows = count_rows(loader) or 0
        indices = sorted({number * (rows - 1) // (SAMPLES - 1) for number in range(SAMPLES)} if rows else ())
        with suppress(Exception):  # a user's data set may raise anything, and may be iterable only
            content += tensors(SeededBatches(dataset, list, seed=0)[0, 0, indices, False])
    with suppress(TypeError, RuntimeError):  # some tensors have no flat memory
        return digest(content)
    return kind


def _digest_code(thing: Any, parts: Any) -> str:
    """Return a digest of the source of classes or functions, and of the plain attributes of an object."""
    whole = blake2b(digest_size=4)
    for part in parts:
        whole.update(f"{part.__module__}.{part.__qualname__}".encode())
        if part.__module__.partition(".")[0] not in (*LIBRARIES, "builtins"):
            with suppress(OSError, TypeError):  # code typed into a console has no source
                whole.update(inspect.getsource(part).encode())
    settings = {
        name: value
        for name, value in vars(thing).items()
        if isinstance(value, bool | int | float | str | None) and not name.startswith("_") and name != "training"
    }
    whole.update(repr(sorted(settings.items())).encode())
    return whole.hexdigest()
