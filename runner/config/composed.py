"""Turns a composed config into plain containers, and checks its keys and the values outside of sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.cli.catalogue import choices
from runner.cli.foreign import about_foreign
from runner.cli.nearest import Advice, nearest
from runner.failures.errors import WrongKey

GROUPS = ("model", "data", "optimizer", "scheduler", "trainer", "launch", "callbacks", "algorithms")
KEYS = (
    *GROUPS,
    "folds",
    "seed",
    "init_weights",
    "run_name",
    "experiment_name",
    "budget",
    "objective",
    "test",
    "vars",
)


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Return a composed config as plain containers, with interpolations resolved.

    Raises:
        OmegaConfBaseException: a value is missing, or cannot be resolved.
        ValueError: a key that every run needs was removed, or an experiment or sweep file sets a key that nothing
            reads.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    plain.pop("ladder", None)  # concerns the sweep as a whole, see `runner.sweeps.ladder.jobs`
    for group in ("experiment", "sweep"):  # their files set only keys of other sections
        if isinstance(own := plain.pop(group, None), dict) and own:
            raise WrongKey(
                f"{group}.{next(iter(own))}",
                "has no effect; the file that sets it must begin with the line '# @package _global_', so that "
                "its keys are those of the run",
            )
    for key in KEYS:
        if key not in plain and key not in GROUPS:
            raise ValueError(Advice(f"~{key}: a run needs this key; give it a value, or null").with_facts(key=key))
    return plain


def targets(config: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every section that has a `_target_` as (dotted path, section), outer sections first."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield path, config
        for key, value in config.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from targets(value, f"{path}[{index}]")


def section_of(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """Return the section of a group that every run needs."""
    section = config.get(group)
    if not isinstance(section, Mapping) or "_target_" not in section:
        allowed = tuple(choice.name for choice in choices() if choice.group == group)
        if section is None:  # removed with ~, or set to null in a file
            advice = Advice(f"none is chosen, and every run needs one; write {group}=<name>: {', '.join(allowed)}")
            raise WrongKey(group, advice.with_facts(allowed=allowed))
        reason = Advice(f"needs a `_target_`; choose a file of conf/{group}/").with_facts(allowed=allowed)
        raise WrongKey(group, reason, repr(section))
    return section


def optimizer_sections(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the section of the optimizer, or of each submodule's own optimizer, by path."""
    section: Any = config.get("optimizer")
    is_nested = isinstance(section, Mapping) and any(isinstance(value, Mapping) for value in section.values())
    if is_nested and "_target_" not in section:
        for key, value in section.items():
            if not isinstance(value, Mapping) or "_target_" not in value:
                reason = "needs a `_target_`: without one at the top, every key must be the optimizer of a submodule"
                raise WrongKey(f"optimizer.{key}", reason, repr(value))
        return {f"optimizer.{key}": value for key, value in section.items()}
    return {"optimizer": section_of(config, "optimizer")}


def check_keys(config: Mapping[str, Any]) -> None:
    """Check that all keys are known and used, that sections have targets, and that other values are allowed."""
    for key in config:
        if key not in KEYS:
            raise WrongKey(key, f"no such key; {about_foreign(key, config[key]) or about_unknown(key, KEYS)}")
    _check_single_values(config)
    scheduler = config.get("scheduler") or {}
    if not isinstance(scheduler, Mapping):
        raise WrongKey("scheduler", "choose a file of conf/scheduler/", repr(scheduler))
    if scheduler and "_target_" not in scheduler:
        key = next(iter(scheduler))
        reason = "has no effect: no scheduler is selected; choose one with scheduler=<name>"
        raise WrongKey(f"scheduler.{key}", reason)
    for group in ("model", "data", "trainer", "launch"):
        section_of(config, group)
    folds = config.get("folds")
    if folds is not None and not (isinstance(folds, Mapping) and "_target_" in folds):
        raise WrongKey("folds", "has no effect on its own; -m sweep=folds fills it in", repr(folds))
    optimizer_sections(config)
    for group in ("callbacks", "algorithms"):
        if "_target_" in (config.get(group) or {}):
            raise WrongKey(
                f"{group}._target_",
                f"has no name; a file of {group}/ starts with its own name as the key, with the rest indented below",
                repr(config[group]["_target_"]),
            )
        for key, section in (config.get(group) or {}).items():
            if not isinstance(section, Mapping) or "_target_" not in section:
                reason = f"add a built-in one with +{group}=<name>, or remove this one with ~{group}.{key}"
                advice = Advice(f"needs a `_target_`, the class to make; {reason}")
                fix = f"~{group}.{key}" if section is None else ""
                raise WrongKey(f"{group}.{key}", advice.with_facts(fix=fix), repr(section))


def about_unknown(key: str, known: Iterable[str]) -> str:
    """Return advice on an unknown top-level key."""
    near = nearest(key, known, 0, "python -m runner --cfg job lists them.")
    return near + f" A value of your own goes into vars: +vars.{key}=..."


def _check_single_values(config: Mapping[str, Any]) -> None:
    if not isinstance(config["vars"], Mapping):
        reason = "holds values of your own; write +vars.<name>=..., or vars=<name> for a file conf/vars/<name>.yaml"
        raise WrongKey("vars", reason, repr(config["vars"]))
    seed = config["seed"]
    if type(seed) is not int or seed < 0:
        raise WrongKey("seed", "must be a whole number of at least 0", repr(seed))
    for key, kinds in (("run_name", str | int), ("experiment_name", str)):
        if not isinstance(config[key], kinds | None) or isinstance(config[key], bool):
            raise WrongKey(key, "must be a name, or null", repr(config[key]))
    names = [config["objective"]] if isinstance(config["objective"], str) else config["objective"]
    if names is not None and not (names and isinstance(names, list) and all(isinstance(name, str) for name in names)):
        reason = "must be a metric, such as eval/loss, a list of metrics, or null"
        raise WrongKey("objective", reason, repr(config["objective"]))
    if config["test"] not in (None, "best", "last"):
        reason = Advice("must be best or last, the weights to test after training, or null")
        raise WrongKey("test", reason.with_facts(allowed=("best", "last", "null")), repr(config["test"]))
    if config["init_weights"] not in ("in_order", "by_name"):
        reason = Advice("must be in_order (weights are drawn one after another), or by_name (each weight separately)")
        raise WrongKey("init_weights", reason.with_facts(allowed=("in_order", "by_name")), repr(config["init_weights"]))
