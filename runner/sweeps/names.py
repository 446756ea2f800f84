"""The names of sweeps, jobs and swept values in folders, tables and pictures."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.composed import GROUPS
from runner.config.composing import parse_override

LONGEST = 100  # characters in a name


def name_job(
    overrides: Sequence[str], run_name: Any, fixed: Sequence[str], choices: Mapping[str, Any], number: int = 1
) -> str:
    """Return the name of a job, such as `lr0.01-seed1-mlp-digits`: its swept values, then the name that all jobs share.

    Args:
        overrides: the overrides of the job.
        run_name: the config's `run_name`, if any.
        fixed: keys that are the same for all jobs.
        choices: the choices of config groups.
        number: distinguishes sweeps whose jobs would otherwise have the same names.
    """
    values = swept_values(overrides, fixed)
    shorts = short_names([*values])
    parts = [_labeled("" if key in (*GROUPS, "run_name") else shorts[key], values[key]) for key in sorted(values)]
    name = "-".join(filter(None, [*parts, common_name([*values], run_name, choices, number)]))
    name = re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "job"
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 7]}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"
    return name


def common_name(swept: Sequence[str], run_name: Any, choices: Mapping[str, Any], number: int) -> str:
    """Return the end of all jobs' names: the run's name, or its model and data, without those that are swept."""
    names = {"run_name": run_name} if run_name else {key: choices.get(key) or f"own-{key}" for key in ("model", "data")}
    shared = [str(name) for key, name in names.items() if key not in swept]
    return "-".join(shared if number == 1 else [*shared, str(number)])


def describe(values: Mapping[str, Any]) -> str:
    """Return values by key as text, such as `lr=0.01 seed=1`."""
    return " ".join(f"{short}={show_value(values[key])}" for key, short in short_names(sorted(values)).items())


def swept_values(overrides: Sequence[str], fixed: Sequence[str]) -> dict[str, Any]:
    """Return the values that are specific to a job, by key without `+` and `~`."""
    parsed = map(parse_override, own_overrides(overrides, fixed))
    return {override.get_key_element().lstrip("+~"): override.value() for override in parsed}


def own_overrides(overrides: Sequence[str], fixed: Sequence[str]) -> list[str]:
    """Return the overrides that are specific to a job, including the batch at which it is forked."""
    return [override for override in overrides if override.partition("=")[0] not in fixed]


def show_value(value: Any) -> str:
    """Return a value as text for names, tables and pictures: 0.01, true, null, a+b; without control characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "+".join(map(show_value, value)) or "none"
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", str(value))


def _labeled(label: str, value: Any) -> str:
    text = show_value(value)
    return f"{label}_{text}" if label and not re.match(r"[-+.\d]", text) else f"{label}{text}"


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return for each dotted key the fewest of its last parts that distinguish it from the others."""
    plain = {key: key.lstrip("+~") for key in keys}
    parts = {key: name.split(".") for key, name in plain.items()}

    def name(key: str) -> str:
        for depth in itertools.count(1):
            short = ".".join(parts[key][-depth:])
            other_names = (plain[other] for other in keys if plain[other] != plain[key])
            if depth == len(parts[key]) or not any(f".{other}".endswith(f".{short}") for other in other_names):
                return short
        raise AssertionError

    return {key: name(key) for key in keys}
