"""Differences between two configs, key by key, and whether a run can be resumed with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runner.cli.command_line import key_of
from runner.cli.nearest import Advice, nearest
from runner.failures.errors import WrongKey
from runner.files.addresses import hidden_everywhere
from runner.terminal.console import show_path

# Keys that change neither the batches nor the mathematics or randomness of a training step. All others do, or may: the
# model, the data, the optimizer, schedules, algorithms, seeds, and a user's own keys.
SAFE = (
    "callbacks",  # they only watch
    "launch",  # the global batches are the same on any number of ranks
    "run_name",  # the run continues in the same folder and the same MLflow run
    "experiment_name",  # the run continues in the same MLflow run
    "objective",  # only sweeps use it, to compare their jobs
    "vars",  # the keys that use these values are checked themselves
    "test",  # it happens after training
    "budget",  # a schedule stretches with it, as with trainer.max_duration
    "init_weights",  # a resumed run loads the weights of its checkpoint
    "trainer.max_duration",  # a schedule given in fractions of it stretches, which is reported
    "trainer.eval_interval",  # evaluating does not change training
    "trainer.session",  # the run stops between two batches, and continues
    "trainer.device",  # the same mathematics, up to rounding
    "trainer.parallel",  # the same mathematics, and any layout reads any checkpoint
    "trainer.shard_size",
    "trainer.tensor_parallel",
)
# In sections whose class is in `runner.data`: each sample is seeded and evaluated independently of its neighbors.
SAFE_DATA = ("eval_batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")

ABSENT = object()
"""Stands for the value of a key that is missing."""
_LONGEST = 60  # characters of a value to show


@dataclass(frozen=True)
class Change:
    """A difference: a key with two values, or a section whose class differs or that only one config has.

    Attributes:
        key: dotted path of the key or section.
        before: old value of the key, or `ABSENT`.
        after: new value of the key, or `ABSENT`.
        target: `_target_` of the nearest enclosing section in the new config; empty without one.
    """

    key: str
    before: Any
    after: Any
    target: str = ""

    @property
    def is_safe(self) -> bool:
        """Whether training continues in the same way despite this difference."""
        section, _, last = self.key.rpartition(".")
        if not section and self.after is ABSENT:  # a whole part of the config is gone
            return False
        return is_among(self.key, SAFE) or (self.target.startswith("runner.data.") and last in SAFE_DATA)

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.after)}"


def find_changes(before: Any, after: Any, key: str = "", target: str = "") -> Iterator[Change]:
    """Yield the differences of two configs, in the order of the first."""
    if hidden_everywhere(before) == hidden_everywhere(after):  # without credentials, which records leave out
        return
    are_sections = isinstance(before, Mapping) and isinstance(after, Mapping)
    if not are_sections or before.get("_target_") != after.get("_target_"):
        yield Change(key, before, after, target)
        return
    target = str(after.get("_target_", target))
    for name in [*before, *(name for name in after if name not in before)]:
        path = f"{key}.{name}" if key else str(name)
        yield from find_changes(before.get(name, ABSENT), after.get(name, ABSENT), path, target)


def changes_of_resume(
    resume: str,
    recorded: Mapping[str, Any] | None,
    is_own: bool,
    after: Mapping[str, Any],
    typed: Sequence[str],
    allowed: Sequence[str],
) -> Iterator[str]:
    """Yield a line for each change in what a resumed run does from now on.

    Args:
        resume: the run or checkpoint to resume.
        recorded: the recorded config of the run, if there is one.
        is_own: whether this user made the record, and nobody has changed it since. Otherwise the config in the
            checkpoint says what the run was trained with.
        after: the config to continue with.
        typed: the overrides that were typed.
        allowed: the keys and sections that may change, see `check_changes`.
    """
    trained = _config_of_checkpoint(resume)
    before = recorded or trained if is_own else trained or recorded
    if before:
        yield from check_changes(resume, before, after, typed, allowed)
    for change in find_changes(trained, before) if trained else ():
        yield f"{change}, in the run's record since that checkpoint was saved"


def _config_of_checkpoint(resume: str) -> dict[str, Any] | None:
    from runner.checkpoints.files import find_checkpoint, read_config

    try:
        return read_config(find_checkpoint(resume))
    except FileNotFoundError:
        return None  # the run was interrupted before its first checkpoint


def changes_of_fork(
    at: str, resume: str, recorded: Mapping[str, Any], is_own: bool, after: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each difference of a fork from its parent; everything but the optimizer may change."""
    before = recorded if is_own else _config_of_checkpoint(resume) or recorded
    changes = [*find_changes(before, after)]
    _check_optimizer(changes, resume)
    yield f"fork at {at} of {show_path(Path(resume))}"
    yield from map(str, changes)


def _check_optimizer(changes: Sequence[Change], resume: str) -> None:
    for change in changes:
        if change.key == "optimizer":
            raise ValueError(
                f"{change}: a run cannot continue with another optimizer; start a new run from its weights, with "
                f"trainer.load_path={show_path(Path(resume))} instead of resuming"
            )


def check_changes(
    resume: str, before: Mapping[str, Any], after: Mapping[str, Any], typed: Sequence[str], allowed: Sequence[str] = ()
) -> list[str]:
    """Return a line for each difference between the config that a run was trained with and the one to continue with.

    `allowed` are keys and sections that may differ, and keys that `typed` overrides removed.
    """
    known = {*_paths(before), *_paths(after), *map(key_of, typed)}
    for key in allowed:
        if key not in known:
            reason = "this config has no such key; " + nearest(key, known).with_facts(meant="")
            raise WrongKey("--allow-changes", reason, repr(key))
    changes = list(find_changes(before, after))
    _check_optimizer(changes, resume)
    refused = [change for change in changes if not change.is_safe and not is_among(change.key, allowed)]
    if refused:
        listed = "".join(f"\n  {change}" for change in refused)
        names = ",".join([*allowed, *(change.key for change in refused)])
        fix = f"--allow-changes {names}"
        text = f"RUN={show_path(Path(resume))!r}: the run was trained with a different config so far:{listed}\n"
        raise ValueError(Advice(f"{text}To continue with these changes, add {fix}").with_facts(key="RUN", fix=fix))
    return [f"{change}{_remark(change, after)}" for change in changes]


def is_among(key: str, names: Sequence[str]) -> bool:
    """Return whether a key, or a section that contains it, is among some names."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def _remark(change: Change, config: Mapping[str, Any]) -> str:
    """Return the remark to append to a line about a change."""
    if change.key == "trainer.max_duration":
        parts = {group: config.get(group) for group in ("scheduler", "algorithms")}
        fractions = [f"{key}={value}" for key, value in _paths(parts).items() if _is_fraction(value)]
        return f"; settings in fractions of it stretch: {', '.join(fractions)}" if fractions else ""
    return "" if change.is_safe else " (--allow-changes)"


def _is_fraction(value: Any) -> bool:
    """Return whether a value is, or contains, a nonzero time in fractions of the run."""
    if isinstance(value, list):
        return any(map(_is_fraction, value))
    return isinstance(value, str) and re.fullmatch(r"[\d.e+-]*[1-9][\d.e+-]*\s*dur", value) is not None


def _paths(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return all values and sections of a config by dotted path."""
    values = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        values |= {f"{prefix}{key}": value} | _paths(value, f"{prefix}{key}.")
    return values


def _show(value: Any) -> str:
    """Return a value as text for the command line; for a section, its class."""
    if value is ABSENT:
        return "(missing)"
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"])
    text = yaml.safe_dump(
        hidden_everywhere(value), default_flow_style=True, width=10_000, sort_keys=False
    ).splitlines()[0]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
