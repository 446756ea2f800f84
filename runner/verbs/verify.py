"""`runner verify RUN`: trains batches of a run again with the current code, and compares digests with those recorded.

This makes a run a regression test: a failure names the first batch and part that differ, and lists everything that has
changed since: versions, hardware, commit and uncommitted code. Its exit code suits `git bisect run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from runner.checkpoints.digest import MEASURED, PARTS, read_digests
from runner.cli.catalogue import CONF
from runner.cli.command import Command
from runner.cli.command_line import key_of
from runner.comparing.changes import find_changes
from runner.config.errors import config_errors
from runner.config.experiment import Experiment
from runner.config.section import Section
from runner.distributed.environment import is_rank_zero
from runner.failures.errors import WrongConfig, WrongKey
from runner.files.names import PATCH
from runner.files.printable import printable
from runner.records.environment import AFFECTING, affecting, environment, packages_of
from runner.records.job import Job
from runner.records.kept_code import changed_modules
from runner.records.patch import patch
from runner.records.record import RUN_NAME, Record, forked_after
from runner.records.run_files import write_pin
from runner.records.secrets import without_secrets
from runner.terminal.answer import set_fields
from runner.terminal.console import print_block, show_path

if TYPE_CHECKING:
    from runner.core.hooks import Callback

TARGET = "runner.callbacks.StateDigest"
MEANING = {
    "samples": "the order of samples",
    "content": "the data, or what algorithms make of a batch",
    "randomness": "how often random numbers are drawn",
    "loss": "the forward pass: the model, or a kernel",
    "gradients": "the backward pass, or what algorithms do to gradients",
    "weights": "the optimizer's step",
    "optimizer": "the optimizer or the schedule",
    "algorithms": "the state of an algorithm",
}
"""The code that computes each part; the first part that differs points to the cause."""


class Finding(NamedTuple):
    """How far retrained batches agree with those of the run."""

    agreed: int
    """The last batch up to which they agree; 0 if they never do."""
    batch: int | None
    """The first batch after which they differ; None if they never do."""
    parts: tuple[str, ...]
    """The parts that differ after that batch, causes first."""
    compared: int
    """The number of compared batches."""


def check(command: Command, experiment: Experiment) -> None:
    """Check the options of a verification."""
    options = command.options
    for key in ("batch", "batches"):
        if options[key] < 1:
            raise WrongKey(f"--{key}", "must be a whole number of at least 1", repr(options[key]))
    if not 0 <= options["tolerance"] < 1:
        reason = "must be a relative difference such as 1e-4, at least 0 and below 1"
        raise WrongKey("--tolerance", reason, repr(options["tolerance"]))
    if options["pin"] and options["batch"] != 1:
        raise WrongKey("--pin", "a pin holds the first batches; leave out --batch", repr(options["pin"]))


def run(job: Job) -> None:
    """Retrain batches of a run, compare their digests, and print what differs. All ranks; rank 0 compares.

    Raises:
        SystemExit: they differ; the exit code is 1.
        WrongConfig: the run has kept no digests of these batches, or can no longer be trained.
    """
    from runner.trials.diagnosis import noting_faults
    from runner.trials.standing import standing_before

    options = job.command.options
    source = Path(job.source)
    first = max(options["batch"], forked_after(source) + 1)
    last = first + options["batches"] - 1
    with config_errors():
        if options["pin"] and first > 1:
            raise WrongKey(
                "--pin", "a pin holds the first batches of a run, and a fork has none of them", repr(options["pin"])
            )
        kept = [line for line in _lines(source) if first <= line["batch"] <= last]
        if not kept and not options["pin"]:
            raise WrongConfig(
                f"RUN={job.typed_run!r}: has no digests of batches {first} to {last}, so there is nothing to "
                "compare; to record them, add +callbacks=state_digest callbacks.state_digest.interval=10ba",
                at="RUN",
            )
        key, digests = _make_digests(job.experiment)
    until = kept[-1]["batch"] if kept else last
    with ExitStack() as stack:
        with config_errors():
            standing = standing_before(
                job.experiment, source, first, {key: digests}, key="--batch", until=until, watched=False
            )
            trainer = stack.enter_context(standing)
        stack.enter_context(noting_faults(job.experiment, job.choices))
        start = trainer.state.timestamp.batch  # of the checkpoint, perhaps before `first`
        trainer.fit()
        if is_rank_zero():
            kept = [line for line in _lines(source) if start < line["batch"] <= until]
            again = read_digests(trainer.state.run_dir)
            _report(job, kept, again, [*_changed_since(Record.of_batch(source, first))])


def compare(
    kept: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], parts: Sequence[str], tolerance: float
) -> Finding:
    """Compare lines of digests.

    Losses and norms count as equal up to the relative difference `tolerance`; 0 compares all parts bit for bit.
    """
    now = {line["batch"]: line for line in again}
    agreed = count = 0
    for line in kept:
        if (other := now.get(line["batch"])) is None:
            continue
        count += 1
        if differing := tuple(part for part in parts if not _is_equal(part, line, other, tolerance)):
            return Finding(agreed, line["batch"], differing, count)
        agreed = line["batch"]
    return Finding(agreed, None, (), count)


def _is_equal(part: str, a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> bool:
    if not tolerance or part == "samples":
        return a.get(part) == b.get(part)
    if part not in MEASURED:
        return True
    first, second = (float((line.get("values") or {}).get(part, math.nan)) for line in (a, b))
    return math.isclose(first, second, rel_tol=tolerance) or repr(first) == repr(second) == "nan"


def _report(
    job: Job, kept: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], changed: Sequence[str]
) -> None:
    from runner.distributed.ranks import get_world_size
    from runner.trials.standing import ranks_of

    options = job.command.options
    source = Path(job.source)
    ranks = ranks_of(source, options["batch"])
    parts = PARTS if ranks == get_world_size() else ("samples",)
    with config_errors():
        if options["tolerance"] and kept and not all(isinstance(line.get("values"), dict) for line in kept):
            reason = "the digests of this run contain no values, so only bits can be compared"
            raise WrongKey("--tolerance", reason, repr(options["tolerance"]))
        finding = compare(kept, again, parts, options["tolerance"])
        if kept and not finding.compared:
            raise WrongConfig(
                f"RUN={job.typed_run!r}: no batch with digests was reached: the run ended earlier", at="RUN"
            )
    how = f"up to {options['tolerance']:g}" if options["tolerance"] else "bit for bit"
    only = "" if len(parts) > 1 else f", in the order of samples only: the run had {ranks} ranks"
    result = {"equal": finding.batch is None, "batch": finding.batch, "parts": [*finding.parts]}
    set_fields(result={**result, "agreed": finding.agreed, "compared": finding.compared, "changed": [*changed]})
    rows = [("run", job.typed_run), *(("changed", text) for text in changed)]
    if finding.batch is None:
        if kept:
            count = f"{finding.compared} digests compared"
            rows.append(("ok verify", f"equal {how} up to batch {finding.agreed}; {count}{only}"))
        else:
            rows.append(("warning verify", "the run has kept no digests: the new ones are pinned"))
        if options["pin"]:
            _pin(job, kept or again)
            rows.append(("pinned", show_path(Path(options["pin"]))))
        print_block("", rows)
        return
    if not Record.of_batch(source, options["batch"]).is_own:
        rows.append(("changed", "the record: you did not make it, or it was edited later"))
    known = f"equal {how} up to batch {finding.agreed}" if finding.agreed else "the first that was compared"
    rows.append(("different", f"at batch {finding.batch}, in {', '.join(finding.parts)}; {known}{only}"))
    rows.append(("first", f"{finding.parts[0]}: {MEANING[finding.parts[0]]}"))
    print_block("", rows)
    set_fields(reason=f"different at batch {finding.batch}, in {', '.join(finding.parts)}")
    raise SystemExit(1)


def _lines(run: Path) -> list[dict[str, Any]]:
    try:
        return sorted(read_digests(run), key=lambda line: line["batch"])
    except (OSError, ValueError):
        return []


def _make_digests(experiment: Experiment) -> tuple[str, Callback]:
    """Return a callback that writes digests of the same batches as the run, and its key in checkpoints."""
    section = next((callback for callback in experiment.callbacks.values() if callback.target == TARGET), None)
    if section is None:
        shipped = yaml.safe_load((CONF / "callbacks" / "state_digest.yaml").read_text())["state_digest"]
        section = Section("callbacks.state_digest", shipped).changed(interval="1ba")
    return section.key, section.make()


def _changed_since(record: Record) -> Iterator[str]:
    """Yield changes since a run was made that may affect its numbers."""
    packages = record.environment.get("packages")
    now = environment(packages) if isinstance(packages, dict) else environment()
    for change in find_changes(affecting(record.environment), affecting(now)):
        yield printable(change)
    if changed := changed_modules(record.code):
        yield f"code: {', '.join(sorted(changed))}"
    if record.patch and record.patch != without_secrets(patch())[0]:
        yield f"uncommitted changes, see {PATCH} of the run"


def _pin(job: Job, digests: Sequence[Mapping[str, Any]]) -> None:
    """Write a pin with everything needed to train a run's first batches; keep only callbacks that load weights."""
    from runner.core.engine import overrides

    source = Path(job.source)
    loading = [key for key, callback in job.experiment.callbacks.items() if overrides(callback.make(), "before_load")]
    config = job.experiment.with_callbacks(loading).plain
    typed = [override for override in job.overrides if key_of(override).partition(".")[0] not in ("callbacks", "hydra")]
    made_in = Record.of_batch(source, 1).environment if _lines(source) else environment(packages_of(config))
    kept = {key: made_in[key] for key in (RUN_NAME, *AFFECTING) if key in made_in}
    write_pin(Path(job.command.options["pin"]), config, [*typed, "callbacks=none"], kept, digests)
