"""From a resolved config to a Trainer: every target is bound first, then objects are made, the data last."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import hydra.utils

from runner.signatures import check_signature, nearest

if TYPE_CHECKING:
    from runner.trainer import Trainer

GROUPS = ("model", "data", "optimizer", "scheduler", "trainer", "launch", "callbacks", "algorithms")
SINGLE_VALUES = ("seed", "run_name", "experiment_name", "mode", "resume", "rerun")
KEYS = (*GROUPS, *SINGLE_VALUES, "allow_targets", "skip_finished", "explain", "predict")
MODES = ("train", "check", "explain", "eval", "predict", "sync")

# Arguments of the Trainer that are made here and have no key of their own under `trainer`.
_SUPPLIED = [
    "model",
    "train_dataloader",
    "eval_dataloader",
    "optimizers",
    "schedulers",
    "algorithms",
    "callbacks",
    "loggers",
    "run_dir",
    "config",
    "resume_path",
    "run_name",
]


def warm_up(config: Mapping[str, Any]) -> None:
    """Let callbacks start their slow helpers, before torch is imported; `check` speaks of targets that are wrong."""
    for section in (config.get("callbacks") or {}).values():
        try:
            target = hydra.utils.get_object(section["_target_"])
        except Exception:
            continue
        if hasattr(target, "warm_up"):
            target.warm_up()


def check(config: Mapping[str, Any]) -> None:
    """Raise where the config cannot be built: unknown keys, targets that do not exist, arguments that do not fit.

    Nothing is made and no data is read.

    Raises:
        ValueError: one of them; the message names the key, what is allowed, and the nearest name.
    """
    for key in config:
        if key not in KEYS:
            raise ValueError(f"{key}: no such key; {nearest(key, KEYS)}")
    _check_single_values(config)
    for group in ("model", "data", "optimizer", "trainer", "launch"):
        section = config.get(group)
        if not isinstance(section, Mapping) or "_target_" not in section:
            raise ValueError(f"{group}={section!r}: needs a `_target_`; choose a file of conf/{group}/")
    for group in ("callbacks", "algorithms"):
        for key, section in (config.get(group) or {}).items():
            if not isinstance(section, Mapping) or "_target_" not in section:
                raise ValueError(
                    f"{group}.{key}={section!r}: needs a `_target_`, the class to make; "
                    f"one that ships is added with +{group}=<name> and removed with ~{group}.<name>"
                )
    _check_trainer(config["trainer"])
    for path, section in targets(config):
        check_signature(path, section, _SUPPLIED if path == "trainer" else ())
    _check_checkpoint("resume", config["resume"])
    _check_checkpoint("trainer.load_path", config["trainer"].get("load_path"))


def targets(config: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every section that has a `_target_`, with its dotted path, outer ones first."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield path, config
        for key, value in config.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from targets(value, f"{path}[{index}]")


def build(config: Mapping[str, Any], run_dir: Path, run_name: str) -> Trainer:
    """Return the Trainer that a resolved config describes. All ranks.

    Args:
        config: checked by `check`.
        run_dir: the run's folder.
        run_name: name of the run.

    Raises:
        ValueError, TypeError, ...: what a constructor refuses, naming the section.
    """
    import torch

    from runner.randomness import stream_seed

    seed = int(config["seed"])
    callbacks = {key: make(f"callbacks.{key}", section) for key, section in (config.get("callbacks") or {}).items()}
    algorithms = {key: make(f"algorithms.{key}", section) for key, section in (config.get("algorithms") or {}).items()}
    optimizers, schedulers = make("optimizer", config.get("optimizer")), make("scheduler", config.get("scheduler"))
    torch.manual_seed(stream_seed(seed, "model"))
    model = make("model", config["model"])
    _try_optimizer(optimizers, config["optimizer"])
    train_dataloader, eval_dataloader = make("data", config["data"])
    resume = config.get("resume")
    return make(
        "trainer",
        config["trainer"],
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        optimizers=optimizers,
        schedulers=schedulers,
        callbacks=callbacks,
        algorithms=algorithms,
        resume_path=resume,
        run_dir=run_dir,
        run_name=run_name,
        config=dict(config),
    )


def make(path: str, section: Any, **supplied: Any) -> Any:
    """Return the object of a section, None for one without a target.

    Raises:
        Exception: what its constructor raises, with the section's path in front.
    """
    if section is None or "_target_" not in section:
        return None
    with _naming(path, section, supplied.get("config", {})):
        if supplied:
            return hydra.utils.instantiate({**section, "_partial_": True}, _convert_="all")(**supplied)
        return hydra.utils.instantiate(section, _convert_="all")


@contextmanager
def naming_hooks(config: Mapping[str, Any]) -> Iterator[None]:
    """Inside, an error that a callback or algorithm raises at an event gets a note with its section, as in `make`."""
    try:
        yield
    except Exception as error:
        raised = [
            match[1] for note in getattr(error, "__notes__", []) if (match := re.match(r"raised by '(\w+)'", note))
        ]
        sections = {**(config.get("callbacks") or {}), **(config.get("algorithms") or {})}
        if raised and raised[0] in sections:
            group = "callbacks" if raised[0] in (config.get("callbacks") or {}) else "algorithms"
            _note_section(error, f"{group}.{raised[0]}", sections[raised[0]], {})
        raise


@contextmanager
def _naming(path: str, section: Mapping[str, Any], config: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if type(error).__name__ == "InstantiationException" and error.__cause__ else error
        _note_section(cause, path, section, config)
        raise cause from None


def _note_section(error: BaseException, path: str, section: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Note `in path.key (target)`: the key is the one with which the message begins, in this section or elsewhere."""
    name = str(error).partition("=")[0]
    places = [*targets(section, path), *targets(config)]
    keys = [f"{inner}.{name}" for inner, one in places if name in one]
    error.add_note(f"in {keys[0] if keys else path} ({section['_target_']})")


def _check_single_values(config: Mapping[str, Any]) -> None:
    for key in KEYS:
        if key not in config and key not in GROUPS:
            raise ValueError(f"~{key}: a run needs this key; give it a value, or null")
    if config["mode"] not in MODES:
        raise ValueError(f"mode={config['mode']!r}: no such mode; {nearest(config['mode'], MODES)}")
    seed = config["seed"]
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed={seed!r}: must be a whole number of at least 0")
    for key, kinds in (("run_name", str | int), ("experiment_name", str), ("resume", str)):
        if not isinstance(config[key], kinds | None) or isinstance(config[key], bool):
            raise ValueError(f"{key}={config[key]!r}: must be a {'folder' if key == 'resume' else 'name'}, or null")


def _check_trainer(section: Mapping[str, Any]) -> None:
    from runner.arguments import check_arguments

    if section["_target_"] == "runner.Trainer":
        known = inspect.signature(check_arguments).parameters
        with _naming("trainer", section):
            check_arguments(**{key: value for key, value in section.items() if key in known})


def _check_checkpoint(key: str, path: str | None) -> None:
    from runner.checkpoint_files import find_checkpoint

    if path is not None:
        try:
            find_checkpoint(path)
        except FileNotFoundError as error:
            reason = "no complete checkpoint there" if Path(path).exists() else "no such folder"
            raise ValueError(f"{key}={path!r}: {reason}; give a run's folder, or a checkpoint's") from error


def _try_optimizer(factory: Any, section: Mapping[str, Any]) -> None:
    """Raise what the optimizer says to its arguments, before data is read."""
    import torch

    if callable(factory):
        with _naming("optimizer", section):
            factory([torch.nn.Parameter(torch.zeros(2, 2))])
