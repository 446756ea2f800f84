"""From a resolved config to a Trainer: every target is bound first, then objects are made, the data last."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.utils

if TYPE_CHECKING:
    from runner.trainer import Trainer

GROUPS = ("model", "data", "optimizer", "scheduler", "trainer", "callbacks", "algorithms")
KEYS = (*GROUPS, "seed", "run_name", "experiment_name", "resume")

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
_HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


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
    for group in ("model", "data", "trainer"):
        if not isinstance(config.get(group), Mapping) or "_target_" not in config[group]:
            raise ValueError(f"{group}={config.get(group)!r}: needs a `_target_`; choose a file of conf/{group}/")
    for group in ("callbacks", "algorithms"):
        for key, section in (config.get(group) or {}).items():
            if not isinstance(section, Mapping) or "_target_" not in section:
                raise ValueError(
                    f"{group}.{key}={section!r}: needs a `_target_`; add one that ships with +{group}={key}"
                )
    for path, section in targets(config):
        supplied = _SUPPLIED if path == "trainer" else ()
        check_signature(path, section, supplied)
    _check_trainer(config["trainer"])


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


def check_signature(path: str, section: Mapping[str, Any], supplied: Any = ()) -> None:
    """Raise where a section's keys do not fit the signature of its target.

    Raises:
        ValueError: the target cannot be imported, a key is no argument of it, or a required one is missing.
    """
    target = locate(path, section["_target_"])
    name = section["_target_"]
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return  # built in C, without a signature: it will speak for itself when it is called
    keys = [key for key in section if key not in _HYDRA_KEYS]
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    named = [key for key, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for key in keys:
        if key in supplied:
            raise ValueError(f"{path}.{key}: is made from the other groups and cannot be set here")
        if key not in named and not open_ended:
            allowed = [one for one in named if one not in supplied]
            raise ValueError(f"{path}.{key}: {name} has no such argument; {nearest(key, allowed)}")
    if section.get("_partial_") or section.get("_args_"):
        return
    for key, one in parameters.items():
        required = one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if required and key not in keys and key not in supplied:
            raise ValueError(f"{path}.{key}: {name} needs this argument; set it with +{path}.{key}=...")


def locate(path: str, target: str) -> Callable[..., Any]:
    """Return the class or function that a `_target_` names.

    Raises:
        ValueError: it cannot be imported, or is not callable.
    """
    try:
        found = hydra.utils.get_object(target)
    except Exception as error:
        cause = error.__cause__ or error
        module, _, name = target.rpartition(".")
        hint = ""
        if module:
            try:
                hint = f" {nearest(name, _public(hydra.utils.get_object(module)))}"
            except Exception:
                hint = ""
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise ValueError(f"{path}._target_={target!r}: cannot be imported ({reason}).{hint}") from None
    if not callable(found):
        raise ValueError(f"{path}._target_={target!r}: is a {type(found).__name__}, not a class or function")
    return found


def nearest(name: str, allowed: Any) -> str:
    """Return a phrase with the nearest allowed name and, where they are few, all of them."""
    allowed = sorted(map(str, allowed))
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}Allowed: {', '.join(allowed)}." if len(allowed) <= 40 else guess


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
    _try_optimizer(optimizers)
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
    try:
        if supplied:
            return hydra.utils.instantiate({**section, "_partial_": True}, _convert_="all")(**supplied)
        return hydra.utils.instantiate(section, _convert_="all")
    except Exception as error:
        cause = error.__cause__ if type(error).__name__ == "InstantiationException" and error.__cause__ else error
        cause.add_note(f"in {path} ({section['_target_']})")
        raise cause from None


def _check_trainer(section: Mapping[str, Any]) -> None:
    from runner.arguments import check_arguments

    if section["_target_"] == "runner.Trainer":
        known = inspect.signature(check_arguments).parameters
        check_arguments(**{key: value for key, value in section.items() if key in known})


def _try_optimizer(factory: Any) -> None:
    """Raise what the optimizer says to its arguments, before data is read."""
    import torch

    if isinstance(factory, type(None)) or not callable(factory):
        return
    try:
        factory([torch.nn.Parameter(torch.zeros(2, 2))])
    except (ValueError, TypeError) as error:
        error.add_note("in optimizer")
        raise


def _public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]
