"""Where two configs differ, key by key, and which differences a run may be resumed with unasked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.addresses import hidden_everywhere
from runner.config.command_line import key_of
from runner.config.composed import OF_THE_COMMAND
from runner.config.signatures import nearest
from runner.terminal import show_path

# What changes neither the batches, nor the mathematics or randomness of a training step. All else does, or may: the
# model, the data, the optimizer, schedules, algorithms, seeds, and what is of a user's own.
SAFE = (
    "callbacks",  # they watch
    "launch",  # the global batches are the same on any number of ranks
    "run_name",  # it goes on in the same folder and the same MLflow run
    "experiment_name",  # likewise
    "objective",  # sweeps compare by it
    "trainer.max_duration",  # how long, not how; a schedule in fractions of it stretches, which is said
    "trainer.eval_interval",  # an evaluation leaves training as it was
    "trainer.device",  # the same mathematics, up to rounding
)
# Of sections that name something of `runner.data`; each sample is seeded and evaluated alone, whatever is beside it.
SAFE_DATA = ("eval_batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")

ABSENT = object()
"""In place of a value: the key is not there."""
_LONGEST = 60  # characters of a value that are shown


@dataclass(frozen=True)
class Change:
    """One difference: a key with two values, or a section that is of another class, or on one side only.

    Attributes:
        key: dotted path.
        before: value there before.
        after: value there now.
        target: of the nearest section around it, as it is now; empty without one.
    """

    key: str
    before: Any
    after: Any
    target: str = ""

    @property
    def is_safe(self) -> bool:
        """Whether it changes nothing of how training goes on."""
        last = self.key.rpartition(".")[2]
        return is_among(self.key, SAFE) or (self.target.startswith("runner.data.") and last in SAFE_DATA)

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.after)}"


def find_changes(before: Any, after: Any, key: str = "", target: str = "") -> Iterator[Change]:
    """Yield where two configs differ, in the order of the first; keys that say what a command does are left out."""
    if hidden_everywhere(before) == hidden_everywhere(after):  # a record holds no credentials
        return
    both = isinstance(before, Mapping) and isinstance(after, Mapping)
    if not both or before.get("_target_") != after.get("_target_"):
        yield Change(key, before, after, target)
        return
    target = str(after.get("_target_", target))
    for one in [*before, *(one for one in after if one not in before)]:
        if key or one not in OF_THE_COMMAND:
            path = f"{key}.{one}" if key else str(one)
            yield from find_changes(before.get(one, ABSENT), after.get(one, ABSENT), path, target)


def tell_changes(resume: str, before: Mapping[str, Any] | None, after: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Say what a resumed run does otherwise from now on.

    Args:
        resume: the run or the checkpoint.
        before: the config of its record; None without one: the checkpoint's own, where it has one.
        after: the config with which it is to go on.
        typed: overrides, its own and those typed now.

    Raises:
        ValueError: see `check_changes`.
    """
    from runner.checkpoints.files import find_checkpoint, read_config

    try:
        trained = read_config(find_checkpoint(resume))
    except FileNotFoundError:
        trained = None  # it was cut off before there was one
    before = before or trained
    if before:
        for line in check_changes(resume, before, after, typed):
            print(f"INFO: {line}", file=sys.stderr)
    for one in find_changes(trained, before) if trained else ():
        print(f"INFO: {one}, in the run's record since that checkpoint was saved", file=sys.stderr)


def tell_changes_of_rerun(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Say what a run that is made again does otherwise.

    Args:
        before: the config of its record.
        after: the config with which it is made now.
    """
    for one in find_changes(before, after):
        print(f"INFO: {one}", file=sys.stderr)


def check_changes(resume: str, before: Mapping[str, Any], after: Mapping[str, Any], typed: Sequence[str]) -> list[str]:
    """Return a line for each difference between the config that a run was trained with and that of going on.

    Args:
        resume: as in `tell_changes`, and so are the others.
        before: not empty.
        after: its `resume_allow` names keys and sections that may differ.
        typed: these may have removed a key, also the last time.

    Raises:
        ValueError: `resume_allow` names no key of the config; something differs that it should name, of which all is
            listed; or the optimizer is another one, whose state no checkpoint has.
    """
    allowed = [after["resume_allow"]] if isinstance(after["resume_allow"], str) else after["resume_allow"]
    known = {*_paths(before), *_paths(after), *map(key_of, typed)}
    for one in allowed:
        if one not in known:
            raise ValueError(f"resume_allow={one!r}: is no key of this config; {nearest(one, known)}")
    changes = list(find_changes(before, after))
    for one in changes:
        if one.key == "optimizer":
            raise ValueError(
                f"{one}: a run cannot go on with another optimizer; begin a new one from its weights, with "
                f"trainer.load_path={show_path(Path(resume))} in place of resume="
            )
    refused = [one for one in changes if not one.is_safe and not is_among(one.key, allowed)]
    if refused:
        listed = "".join(f"\n  {one}" for one in refused)
        names = ",".join([*allowed, *(one.key for one in refused)])
        raise ValueError(
            f"resume={show_path(Path(resume))}: it was trained otherwise so far:{listed}\n"
            f"If it is to go on with that, add 'resume_allow=[{names}]'"
        )
    return [f"{one}{_remark(one, after)}" for one in changes]


def is_among(key: str, names: Sequence[str]) -> bool:
    """Whether a key, or a section around it, is one of some names."""
    return any(f"{key}.".startswith(f"{one}.") for one in names)


def _remark(change: Change, config: Mapping[str, Any]) -> str:
    """Return what a line about a change has to add."""
    if change.key == "trainer.max_duration":
        parts = {group: config.get(group) for group in ("scheduler", "algorithms")}
        found = [f"{key}={value}" for key, value in _paths(parts).items() if _is_fraction(value)]
        return f"; fractions of it stretch: {', '.join(found)}" if found else ""
    return "" if change.is_safe else " (resume_allow)"


def _is_fraction(value: Any) -> bool:
    """Whether a value is, or holds, a time in fractions of the run other than 0."""
    if isinstance(value, list):
        return any(map(_is_fraction, value))
    return isinstance(value, str) and re.fullmatch(r"[\d.e+-]*[1-9][\d.e+-]*\s*dur", value) is not None


def _paths(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values of a config by dotted path, those of sections too."""
    found = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        found |= {f"{prefix}{key}": value} | _paths(value, f"{prefix}{key}.")
    return found


def _show(value: Any) -> str:
    """Return a value as it would be typed, a section as its class."""
    if value is ABSENT:
        return "(not there)"
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"])
    text = yaml.safe_dump(
        hidden_everywhere(value), default_flow_style=True, width=10_000, sort_keys=False
    ).splitlines()[0]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
