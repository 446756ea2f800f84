"""`runner replay RUN BATCH`: trains one batch of a run again, as the run did, and shows everything that happens in it.

It begins at the run's last checkpoint before that batch and trains the batches in between again; the run itself stays
unchanged. If the run kept digests, they show whether the batches are equal bit for bit. Without BATCH, it trains the
batch in which the run failed, from its crash.zip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli.command import Command, batch_of
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.config.section import Section
from runner.distributed.environment import is_rank_zero
from runner.failures.crash import FACTS, describe_crash
from runner.failures.errors import WrongKey
from runner.files.printable import printable
from runner.files.whole import read_object, write_atomically
from runner.records.job import Job
from runner.terminal.answer import set_fields
from runner.terminal.console import print_block, show_path

if TYPE_CHECKING:
    from runner.training.trainer import Trainer
    from runner.trials.replayed import ReplayedBatch

FORMATS = (".png", ".svg", ".pdf")
NO_BATCH = "must be the number of a batch, counted from 1; only a run that failed and left a crash.zip needs none"
SHOWN = 6  # layers to print norms of
_MORE = 8  # samples in a line


def check(command: Command, experiment: Experiment) -> None:
    """Check the words and options of a replay."""
    options = command.options
    if command.batch is not None and not batch_of(command.batch):
        raise WrongKey("BATCH", NO_BATCH, repr(command.batch))
    if options["worst"] < 0:
        raise WrongKey("--worst", "must be a number of samples, at least 0", repr(options["worst"]))
    if options["picture"] and Path(options["picture"]).suffix not in FORMATS:
        raise WrongKey("--picture", f"must end in {', '.join(FORMATS)}, or be ''", repr(options["picture"]))
    if options["to"] and Path(options["to"]).suffix != ".safetensors":
        raise WrongKey("--to", "must end in .safetensors, or be ''", repr(options["to"]))


def run(job: Job) -> None:
    """Retrain a batch of a run, and print what happened in it. All ranks; rank 0 records and prints.

    Raises:
        WrongConfig: the run has no such batch, or cannot be trained any more.
    """
    from runner.distributed.ranks import get_world_size
    from runner.trials.diagnosis import noting_faults
    from runner.trials.replayed import ReplayedBatch
    from runner.trials.standing import check_reached, standing_before

    options = job.command.options
    source = Path(job.source)
    batch = batch_of(job.command.batch)
    crash = {} if batch else _read_crash(source)
    with config_errors():
        if not batch and not crash:
            raise WrongKey("BATCH", NO_BATCH, "''")
    batch = batch or crash["batch"]
    noted = ReplayedBatch(batch, options["debug"])
    with config_errors():
        if options["debug"] and get_world_size() > 1:
            raise WrongKey("--debug", "stops one process; add launch.nproc_per_node=1")
    without = {*options["without"]} - {crash.get("by")}  # the callback that failed
    experiment = job.experiment.without_callbacks(without)
    key = "" if crash else "BATCH"  # a run may fail after its last batch
    with ExitStack() as stack:
        stack.enter_context(_failing_as(crash, noted))
        with config_errors():
            standing = standing_before(experiment, source, batch, {"replay": noted}, key=key, until=batch)
            trainer = stack.enter_context(standing)
        stack.enter_context(noting_faults(experiment, job.choices))
        trained = trainer.state.timestamp.batch
        if is_rank_zero():
            checkpoint = trainer.state.resumed_from
            start = "the beginning of the run" if checkpoint is None else _show_checkpoint(checkpoint, source)
            print_block(f"batch {batch} of {job.typed_run}", [("from", f"{start}, after batch {trained}")])
        trainer.fit(may_be_over=bool(crash))
        with config_errors():
            check_reached(trainer.state, 0 if crash else batch, "BATCH")
        if is_rank_zero() and noted.is_done:
            _report(job, trainer, noted, trained)
        if is_rank_zero() and crash:
            failure = f"{crash['type']} at {crash['at']}: {crash['message']}"
            print_block("", [("warning crash", f"it did not fail this time; the recorded failure is {failure}")])


def _show_checkpoint(path: Path, run: Path) -> str:
    """Return the path of a checkpoint, relative to the run if it is inside, because that folder may be temporary."""
    inside = path.relative_to(run.resolve()) if path.is_relative_to(run.resolve()) else None
    return f"its {inside}" if inside is not None else show_path(path)


def _read_crash(run: Path) -> dict[str, Any]:
    """Return the facts about the failure of a run in a bundle; empty if they are missing or invalid."""
    facts = read_object(run / FACTS)
    texts = {key: printable(facts.get(key, "")) for key in ("type", "at", "message", "by")}
    batch = facts.get("batch")
    return {**texts, "batch": batch} if type(batch) is int and batch > 0 else {}


@contextmanager
def _failing_as(crash: Mapping[str, Any], noted: ReplayedBatch) -> Iterator[None]:
    """Add a note to a failure that says whether it is the recorded failure of the run."""
    try:
        yield
    except Exception as error:
        if crash:
            batch = 1 if noted.state is None else noted.state.timestamp.batch + 1
            recorded = f"{crash['type']} at {crash['at']}, in batch {crash['batch']}"
            observed = "{type} at {at}, in batch {batch}".format(**describe_crash(error), batch=batch)
            error.add_note(f"{'' if observed == recorded else 'not '}the failure of the run: {recorded}")
        raise


def _report(job: Job, trainer: Trainer, noted: ReplayedBatch, start: int) -> None:
    from runner.models.sample_losses import worst_samples
    from runner.trials.standing import compare_digests

    options = job.command.options
    run = Path(job.source)
    batch = noted.batch
    equal, digests = compare_digests(run, trainer.state.run_dir, start, batch)
    inputs = _joined(noted.microbatches)
    rows = worst_samples(noted.losses, options["worst"]).tolist()
    worst, captions = _describe(noted, inputs, rows, _decoder(job.experiment.data))
    picture = _draw(inputs, rows, captions, _picture_file(job, batch), f"batch {batch} of {run.name}")
    if options["to"]:
        _write(Path(options["to"]), noted)
    set_fields(
        result={
            "run": str(run),
            "batch": batch,
            "epoch": noted.epoch,
            "from_batch": start,
            "equal": equal,
            "loss": noted.loss,
            "samples": [asdict(sample) for sample in noted.samples],
            "worst": worst,
            "gradients": noted.gradients,
            "activations": noted.activations,
            "algorithms": [act._asdict() for act in noted.acts],
            "picture": picture,
            "tensors": options["to"] or None,
        }
    )
    lines = ["; ".join(filter(None, (text, sample["text"]))) for text, sample in zip(captions, worst, strict=True)]
    files = [("picture", show_path(Path(picture)))] if picture else []
    files += [("tensors", show_path(Path(options["to"])))] if options["to"] else []
    print_block("", [digests, *_rows(noted, lines), *files])


def _describe(
    noted: ReplayedBatch, inputs: Any, rows: list[int], decode: Callable[[list[int]], str] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the facts about samples in some rows of the batch, for programs, and captions of these samples."""
    from runner.device.batch import tensors
    from runner.pictures.samples import make_captions, show_text, to_classes

    samples = noted.samples
    parts = [values for values in tensors(inputs) if values.ndim]
    first = parts[0] if parts else None
    targets = parts[1] if len(parts) > 1 else None
    outputs = _joined(noted.outputs)
    classes = {"target": to_classes(targets, len(samples)), "prediction": to_classes(outputs, len(samples))}
    about = make_captions(classes) or [""] * len(samples)
    captions = make_captions({"loss": noted.losses, **classes}, [sample.index for sample in samples])
    described = [
        {
            "index": samples[row].index,
            "loss": samples[row].loss,
            "is": about[row],
            "text": show_text(first, row, decode),
        }
        for row in rows
    ]
    return described, [captions[row] for row in rows]


def _rows(noted: ReplayedBatch, worst: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines about a batch, as labels and texts."""
    rates = ", ".join(dict.fromkeys(f"{rate:.6g}" for rate in noted.rates))
    yield "loss", f"{noted.loss:.6g}, in epoch {noted.epoch + 1}, at the learning rate {rates}"
    known = [sample.index for sample in noted.samples if sample.index is not None] or [
        index for index in noted.indices if index is not None
    ]
    if known:
        more = f" and {len(known) - _MORE} more" if len(known) > _MORE else ""
        yield "samples", f"{', '.join(map(str, known[:_MORE]))}{more}"
    if noted.no_losses:
        yield "worst", f"the loss of a sample is not known: {noted.no_losses}"
    for number, text in enumerate(worst):
        yield "worst" if number == 0 else "", text
    if noted.gradients:
        total = sum(norm * norm for norm in noted.gradients.values()) ** 0.5
        yield "gradients", f"norm {total:.4g}; {_largest(noted.gradients)}"
    if noted.activations:
        yield "activations", f"norms {_largest(noted.activations)}"
    for number, act in enumerate(noted.acts):
        yield "algorithms" if number == 0 else "", f"{act.algorithm} at {act.event}: {'; '.join(act.changed)}"


def _largest(norms: Mapping[str, float]) -> str:
    largest = sorted(norms, key=lambda name: -norms[name])[:SHOWN]
    more = f", and {remaining} smaller one{'s' * (remaining > 1)}" if (remaining := len(norms) - SHOWN) > 0 else ""
    return ", ".join(f"{name} {norms[name]:.4g}" for name in largest) + more


def _decoder(data: Section) -> Callable[[list[int]], str] | None:
    """Return a function from tokens to text, if a Hugging Face tokenizer produced them."""
    from runner.data.text.tokenizer import load_pretrained_tokenizer

    name = data.get("tokenizer") if data.target.startswith("runner.data.") else None
    return load_pretrained_tokenizer(name, data.get("added_tokens", ())).decode if isinstance(name, str) else None


def _joined(parts: list[Any]) -> Any:
    """Join microbatches or their outputs into a batch; return None if they cannot be joined."""
    from torch import Tensor, cat

    if len(parts) < 2:
        return parts[0] if parts else None
    first = parts[0]
    if isinstance(first, Tensor):
        return cat(parts) if first.ndim and len({part.shape[1:] for part in parts}) == 1 else None
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return [_joined([part[index] for part in parts]) for index in range(len(first))]
    return None


def _picture_file(job: Job, batch: int) -> str:
    """Return the path of the picture: a name without a folder is put into the run, unless that is only temporary.

    If the run's folder is read-only, it is put into the working directory.
    """
    name = job.command.options["picture"]
    if not name or "/" in name:
        return name
    run = Path(str(job.command.run))
    # Without a batch, the source is the unpacked crash.zip of the run.
    folder = Path(job.source) if job.command.batch else run
    folder = Path() if run.is_file() or "://" in str(run) or not os.access(folder, os.W_OK) else folder
    return str(folder / "replay" / f"ba{batch}" / name)


def _draw(inputs: Any, rows: list[int], captions: list[str], path: str, title: str) -> str | None:
    """Write a picture of the worst samples if they are images, and return its path."""
    from runner.pictures.samples import draw_images, find_images

    images = find_images(inputs)
    if not (path and rows) or images is None:
        return None
    picture = draw_images(images[rows], captions, title, Path(path).suffix[1:])
    with config_errors():
        write_atomically(Path(path), picture)
    return path


def _write(path: Path, noted: ReplayedBatch) -> None:
    """Write the batch as the model saw it, and its outputs, gradients and losses, into a file."""
    import torch
    from safetensors.torch import save

    tensors = {**dict(_named("batch", _joined(noted.microbatches))), **dict(_named("outputs", _joined(noted.outputs)))}
    tensors |= {f"gradients.{name}": gradient for name, gradient in noted.gradient_values.items()}
    if noted.losses:
        tensors["losses"] = torch.tensor(noted.losses)
    if noted.indices and None not in noted.indices:
        tensors["indices"] = torch.tensor(noted.indices)
    content = save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})
    with config_errors():
        write_atomically(path, content)


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    from torch import Tensor

    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _named(f"{name}.{key}", item)
