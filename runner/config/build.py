"""Builds a Trainer from a resolved config: checks every target first, then makes the objects, the data last."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import hydra.utils
from hydra.errors import InstantiationException

from runner.cli.foreign import about_foreign_value
from runner.cli.nearest import Advice
from runner.config.composed import check_keys, optimizer_sections, section_of, targets
from runner.config.errors import CONFIG_ERRORS
from runner.config.short_steps import use_one_thread_if_short
from runner.config.signatures import check_null, check_signature, locate
from runner.failures.errors import ConstructorFailed, WrongConfig, WrongKey, wrong_argument
from runner.failures.exits import as_failure
from runner.failures.facts import annotate, argument_of, facts_of
from runner.files.addresses import hidden_everywhere
from runner.libraries.targets import find_in_working_directory, prepare_import
from runner.training.budget import check_budget

if TYPE_CHECKING:
    from runner.core.destination import LoggerDestination
    from runner.distributed.launch import Launch
    from runner.training.trainer import Trainer

# Arguments of the Trainer that this file supplies; they may not be set under `trainer`.
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
    "progress_bar",
]


def warm_up(config: Mapping[str, Any]) -> None:
    """Let callbacks start slow helpers before torch is imported; wrong targets are left for `check` to report."""
    for target in callbacks_with(config, "warm_up").values():
        target.warm_up()


def callbacks_with(config: Mapping[str, Any], attribute: str) -> dict[str, Any]:
    """Return the callback classes of a config that have a true attribute, by key; wrong targets are skipped."""
    find_in_working_directory(config.get("callbacks"))
    found = {}
    for key, section in (config.get("callbacks") or {}).items():
        with suppress(Exception):
            target = hydra.utils.get_object(section["_target_"])
            if getattr(target, attribute, None):
                found[str(key)] = target
    return found


def make_launch(config: Mapping[str, Any]) -> Launch:
    """Return the `Launch` of a job, which holds its number of processes.

    Its section is checked before everything else, because the processes start early.
    """
    return _make_launch(json.dumps(section_of(config, "launch")))


@cache
def _make_launch(section: str) -> Launch:
    check_signature("launch", json.loads(section))
    return make("launch", json.loads(section))


def check(config: Mapping[str, Any], passed: set[str] | None = None, is_new: bool = True) -> None:
    """Check that a config can be built: its keys are known, its targets exist, and their arguments fit.

    No data is read, and no object is made but the `Launch`. The jobs of a sweep share `passed`, see `once`.
    `is_new` is false for the config of a saved run.
    """
    passed = set() if passed is None else passed
    check_keys(config)
    once(passed, _check_trainer, config["trainer"], make_launch(config).nproc_per_node)
    check_budget(config, is_new)
    for path, section in targets(config):
        once(passed, check_signature, path, section, _SUPPLIED if path == "trainer" else ())
    if (path := config["trainer"].get("load_path")) is not None:
        checkpoint_of("trainer.load_path", path)


def once(passed: set[str], check: Callable[..., Any], *arguments: Any) -> None:
    """Check parts of a config, unless they have `passed` the same check before."""
    mark = repr((check.__name__, arguments))
    if mark not in passed:
        check(*arguments)
        passed.add(mark)


def build(config: Mapping[str, Any], run_dir: Path, run_name: str, resume: str | None = None) -> Trainer:
    """Return the Trainer that a resolved config describes, to continue from a checkpoint if given one. All ranks.

    The config has passed `check`.

    Raises:
        ValueError, TypeError, ...: a constructor refuses an argument; the facts of the exception name the section.
    """
    parts = make_parts(config)
    model = make_model(config)
    _try_on_model(parts, model, config)
    train_dataloader, eval_dataloader = make_data(config)
    return assemble(
        config,
        run_dir,
        run_name,
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        resume_path=resume,
        **parts,
    )


def make_parts(config: Mapping[str, Any], uploads: bool = True) -> dict[str, Any]:
    """Return the objects of a config other than model and data, by the names of the Trainer's arguments.

    These are callbacks and algorithms, each as a dict by config key, optimizers, and schedulers. With `uploads=False`,
    as in a trial, no checkpoints go to a mirror.
    """
    parts = {
        "callbacks": {key: make(f"callbacks.{key}", one) for key, one in (config.get("callbacks") or {}).items()},
        "algorithms": {key: make(f"algorithms.{key}", one) for key, one in (config.get("algorithms") or {}).items()},
        "optimizers": make_optimizer(config),
        "schedulers": make("scheduler", config.get("scheduler")),
    }
    for one in parts["callbacks"].values():
        if not uploads and hasattr(one, "mirror"):
            one.mirror = None
    return parts


def make_data(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the training and the evaluation data that a config describes; the latter includes its test data."""
    section = config["data"]
    made = make("data", section)
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        kind = f"{type(made).__name__} of {len(made)}" if isinstance(made, tuple | list) else type(made).__name__
        allowed = "(train_loader, eval_loader) or (train_loader, eval_loader, test_loader)"
        text = f"data: {section['_target_']} must return {allowed}, not a {kind}"
        raise TypeError(Advice(text).knowing(key="data"))
    if (folds := make("folds", config.get("folds"))) is not None:
        with _naming("folds", config["folds"]):
            folds.apply(*made[:2])
    if len(made) == 2 or made[2] is None:
        return made[0], made[1]
    from runner.training.evaluator import with_test

    with _naming("data", section):
        return made[0], with_test(made[1], made[2])


def make_model(config: Mapping[str, Any]) -> Any:
    """Return the model, with initial weights that depend only on the run's seed."""
    import torch

    from runner.core.randomness import stream_seed
    from runner.models.by_name import make_by_name

    seed = stream_seed(int(config["seed"]), "model")
    torch.manual_seed(seed)
    by_name = config.get("init_weights") == "by_name"
    made = partial(make, "model", config["model"])
    model = make_by_name(made, seed) if by_name else made()
    if not isinstance(model, torch.nn.Module):
        target = config["model"]["_target_"]
        reason = (
            f"made a {type(model).__name__}, but must make a runner.Model; runner.ClassificationModel wraps a module"
        )
        raise WrongKey("model._target_", reason, repr(target))
    return model


def assemble(config: Mapping[str, Any], run_dir: Path, run_name: str, **parts: Any) -> Trainer:
    """Return the Trainer of a config, given the objects made from its groups by the Trainer's argument names."""
    supplied = {"run_dir": run_dir, "run_name": run_name, "progress_bar": False, "config": hidden_everywhere(config)}
    trainer = make("trainer", config["trainer"], **supplied, **parts)
    use_one_thread_if_short(trainer.state)
    return trainer


def make_destinations(config: Mapping[str, Any]) -> list[LoggerDestination]:
    """Return the logger destinations of a config, for use without a run."""
    from runner.core.destination import LoggerDestination

    sections = {f"callbacks.{key}": section for key, section in (config.get("callbacks") or {}).items()}
    kinds = {path: locate(path, section["_target_"]) for path, section in targets(sections) if path in sections}
    found = [path for path, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, LoggerDestination)]
    return [make(path, sections[path]) for path in found]


def make(path: str, section: Any, **supplied: Any) -> Any:
    """Return the object that a section describes, or None if the section has no target.

    Raises:
        Exception: the constructor fails; the facts of the exception name the section.
    """
    if section is None or "_target_" not in section:
        return None
    find_in_working_directory(section)
    with _naming(path, section, supplied.get("config", {})):
        for _, inner in targets(section):  # on other ranks than 0 nothing has been checked, and so imported, before
            prepare_import(str(inner["_target_"]))
        if supplied:
            return hydra.utils.instantiate({**section, "_partial_": True}, _convert_="all")(**supplied)
        return hydra.utils.instantiate(section, _convert_="all")


@contextmanager
def naming_hooks(config: Mapping[str, Any]) -> Iterator[None]:
    """Add the config section of a callback or algorithm to any exception it raises, as facts and as a note."""
    try:
        yield
    except Exception as error:
        _add_section_of_hook(error, config)
        raise


@contextmanager
def _naming(path: str, section: Mapping[str, Any], config: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    try:
        yield
    except SystemExit as exit:
        if not isinstance(exit.code, str):
            failure = as_failure(exit)  # the exit itself, if a signal asked for the end of the process
            raise failure from failure.__cause__
        raise WrongConfig(f"{path}: {exit.code} ({section['_target_']})", at=path) from exit
    except Exception as error:
        cause = error
        failed = path
        if isinstance(error, InstantiationException):
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            inner = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)  # that of the target, inside the section
            failed = f"{path}.{inner[1]}" if inner else path
        if not isinstance(cause, CONFIG_ERRORS) and path != "trainer":  # the Trainer runs hooks; its bugs stay bugs
            failure = ConstructorFailed(f"{type(cause).__name__}: {cause}".removesuffix(": "))
            failure.__cause__ = cause
            cause = failure
        if not _add_section_of_hook(cause, config):
            _add_section(cause, path, section, config, failed)
        raise cause from cause.__cause__


def _add_section_of_hook(error: BaseException, config: Mapping[str, Any]) -> bool:
    """Add to an exception the section of the callback or algorithm that raised it; return whether there is one."""
    raised_by = facts_of(error).raised_by
    for group in ("callbacks", "algorithms"):
        sections = config.get(group) or {}
        if raised_by in sections:
            _add_section(error, f"{group}.{raised_by}", sections[raised_by], config)
            return True
    if raised_by == "scheduler" and config.get("scheduler"):
        _add_section(error, "scheduler", config["scheduler"], config)
        return True
    return False


def _add_section(
    error: BaseException, path: str, section: Mapping[str, Any], config: Mapping[str, Any], failed: str = ""
) -> None:
    """Add to an exception the section of the config that caused it, both as facts and as a note.

    The section at fault is the one that sets the argument which the exception refuses; it may be in another part of the
    config. If the exception names no argument, it is the section of the target that failed. `failed` is the path of the
    target that failed, if that is inside the section.
    """
    argument = argument_of(error)
    inside = dict(targets(section, path))
    place = failed if failed in inside else path
    owners = [inner for inner, one in [*inside.items(), *targets(config)] if argument.partition(".")[0] in one]
    target = inside[place]["_target_"]
    annotate(error, argument=argument, section=owners[0] if owners else place, target=target)
    if owners:
        annotate(error, key=f"{owners[0]}.{argument}")
    error.add_note(f"in {facts_of(error).key or place} ({target})")


def _check_trainer(section: Mapping[str, Any], ranks: int | str) -> None:
    from runner.training.arguments import check_arguments

    if section["_target_"] == "runner.Trainer":
        for key, value in section.items():
            if (foreign := about_foreign_value(f"trainer.{key}", value)) is not None:
                raise WrongKey(f"trainer.{key}", foreign, repr(value))
        if section.get("device") == "meta":
            raise WrongKey("trainer.device", "holds no values to train on; runner check tries a run there", "'meta'")
        known = inspect.signature(check_arguments).parameters
        check_null("trainer", section, known)
        with _naming("trainer", section):
            plain = {key: value for key, value in section.items() if not isinstance(value, Mapping)}
            check_arguments(**{key: value for key, value in plain.items() if key in known}, ranks=ranks)


def checkpoint_of(key: str, path: str) -> Path:
    """Return the checkpoint to which the value of a config key refers, or the file of weights."""
    from runner.checkpoints.files import find_checkpoint
    from runner.checkpoints.weights import is_weights_file

    if key == "trainer.load_path" and is_weights_file(Path(path)):
        return Path(path).resolve()
    try:
        return find_checkpoint(path)
    except FileNotFoundError as error:
        reason = "no complete checkpoint there" if Path(path).exists() else "no such folder"
        raise WrongKey(key, f"{reason}; give a run's folder, or a checkpoint's", repr(path)) from error


def make_optimizer(config: Mapping[str, Any]) -> Any:
    """Return the optimizer of a config, or a dict of them by submodule; mostly factories.

    A factory of parameters is tried on a tiny model, so that wrong arguments are reported before the model is made.
    """
    import torch

    from runner.optim.param_groups import ParamGroups, takes_model

    made: dict[str, Any] = {}
    for path, section in optimizer_sections(config).items():
        one = make(path, {key: value for key, value in section.items() if key != "param_groups"})
        rules = section.get("param_groups")
        with _naming(path, section):
            if callable(one) and not takes_model(one):
                _try_factory(one, torch.nn.Linear(2, 2))
            made[path.partition(".")[2]] = ParamGroups(cast(Any, one), rules) if rules else one
    return made.get("", made)


def _try_on_model(parts: Mapping[str, Any], model: Any, config: Mapping[str, Any]) -> None:
    """Try factories of the model, before data is read; not where an algorithm may still change the model at INIT."""
    from runner.core.engine import overrides
    from runner.optim.factories import submodule
    from runner.optim.param_groups import takes_model
    from runner.timing.event import Event

    if any(overrides(one, Event.INIT) for one in parts["algorithms"].values()):
        return
    for path, section in optimizer_sections(config).items():
        name = path.partition(".")[2]
        with _naming(path, section):
            part = submodule(model, name) if name else model
            factory = parts["optimizers"][name] if name else parts["optimizers"]
            if callable(factory) and takes_model(factory):
                _try_factory(factory, part)


def _try_factory(factory: Any, model: Any) -> None:
    from runner.optim.factories import make_optimizers

    for group in (group for one in make_optimizers(factory, model) for group in one.param_groups):
        if isinstance(lr := group.get("lr"), str):  # not every optimizer checks its lr
            raise wrong_argument("lr", lr, "must be a number, the learning rate", TypeError)
