"""Builds a Trainer from an experiment: checks all targets, then makes the objects, with the data last."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import hydra.utils

from runner.cli.foreign import about_foreign_value
from runner.cli.nearest import Advice
from runner.config.classes import needs_data, with_classes, without_data
from runner.config.experiment import Experiment
from runner.config.length import check_budget
from runner.config.section import Section, note_section_of_hook
from runner.config.short_steps import use_one_thread_if_short
from runner.config.signatures import check_null
from runner.failures.errors import WrongKey, wrong_argument
from runner.files.addresses import hidden_everywhere
from runner.libraries.targets import find_in_working_directory

if TYPE_CHECKING:
    from runner.core.destination import LoggerDestination
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


def warm_up(callbacks: Mapping[str, Section]) -> None:
    """Let callbacks start slow helpers before torch is imported; wrong targets are left for `check` to report."""
    for target in classes_with("warm_up", callbacks).values():
        target.warm_up()


def classes_with(attribute: str, callbacks: Mapping[str, Section]) -> dict[str, Any]:
    """Return the classes of callbacks whose `attribute` is true, by key; wrong targets are skipped."""
    classes = {}
    for key, section in callbacks.items():
        find_in_working_directory(section.plain)
        with suppress(Exception):
            target = hydra.utils.get_object(section.target)
            if getattr(target, attribute, None):
                classes[key] = target
    return classes


def check(experiment: Experiment, passed: set[str] | None = None, is_new: bool = True) -> None:
    """Check that an experiment can be built: its targets exist, and their arguments fit.

    No data is read and no object is made. The jobs of a sweep share `passed`; see `once`. `is_new` is False for the
    experiment of a saved run.
    """
    passed = set() if passed is None else passed
    trainer = experiment.trainer
    ranks = experiment.launch.nproc_per_node
    once(passed, ("trainer", trainer, ranks), partial(_check_trainer, trainer, ranks))
    check_budget(experiment, is_new)
    for section in without_data(experiment).sections():
        supplied = _SUPPLIED if section.path == "trainer" else ()
        once(passed, ("bound", section), partial(section.check, supplied))
    if (path := trainer.get("load_path")) is not None:
        checkpoint_of("trainer.load_path", path)


def once(passed: set[str], what: object, check: Callable[[], object]) -> None:
    """Run a check of `what`, unless it has already passed for something with the same `repr`."""
    mark = repr(what)
    if mark not in passed:
        check()
        passed.add(mark)


def build(
    experiment: Experiment, run_dir: Path, run_name: str, resume: str | None = None, new_rows: Any = None
) -> Trainer:
    """Return the Trainer of an experiment that has passed `check`; it continues from `resume` if set. All ranks.

    If `new_rows` is given, this loader replaces the data, which is not read; the model must not need the data.

    Raises:
        ValueError, TypeError, ...: a constructor refuses an argument; the facts of the exception name the section.
    """
    parts = make_parts(experiment)
    if new_rows is not None:
        model, train_dataloader, eval_dataloader = make_model(experiment), None, new_rows
    else:
        experiment, model, (train_dataloader, eval_dataloader) = make_model_and_data(
            experiment, lambda model: _try_on_model(parts, model, experiment)
        )
    return assemble(
        experiment,
        run_dir,
        run_name,
        model=model,
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        resume_path=resume,
        **parts,
    )


def make_parts(experiment: Experiment, uploads: bool = True) -> dict[str, Any]:
    """Return all objects of an experiment except model and data, by the names of the Trainer's arguments.

    Callbacks and algorithms are dicts by config key. With `uploads=False`, for trials, no checkpoints are copied to a
    mirror.
    """
    parts = {
        "callbacks": {key: section.make() for key, section in experiment.callbacks.items()},
        "algorithms": {key: section.make() for key, section in experiment.algorithms.items()},
        "optimizers": make_optimizers(experiment.optimizers),
        "schedulers": None if experiment.scheduler is None else experiment.scheduler.make(),
    }
    for callback in parts["callbacks"].values():
        if not uploads and hasattr(callback, "mirror"):
            callback.mirror = None
    return parts


def make_data(experiment: Experiment) -> tuple[Any, Any]:
    """Return the training data and the evaluation data of an experiment; the latter includes any test data."""
    section = experiment.data
    data = section.make()
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        kind = f"{type(data).__name__} of {len(data)}" if isinstance(data, tuple | list) else type(data).__name__
        allowed = "(train_loader, eval_loader) or (train_loader, eval_loader, test_loader)"
        text = f"data: {section.target} must return {allowed}, not a {kind}"
        raise TypeError(Advice(text).with_facts(key="data"))
    if experiment.folds is not None:
        folds = experiment.folds.make()
        with experiment.folds.named():
            folds.apply(*data[:2])
    if len(data) == 2 or data[2] is None:
        return data[0], data[1]
    from runner.training.evaluator import with_test

    with section.named():
        return data[0], with_test(data[1], data[2])


def make_new_rows(experiment: Experiment, path: Path) -> Any:
    """Return a loader of the rows at a path, prepared as in an evaluation; None if that needs the experiment's data."""
    from runner.data.loaders import DatasetLoader

    section = experiment.data
    is_known = hasattr(section.find_target(), "new_rows")
    made = section.changed(_target_=f"{section.target}.new_rows").make() if is_known else None
    return None if made is None else DatasetLoader(made[0].new_rows(path), shuffle=False, **made[1])


def make_model_and_data(
    experiment: Experiment, try_out: Callable[[Any], None] | None = None
) -> tuple[Experiment, Any, tuple[Any, Any]]:
    """Return the experiment, its model's config filled in from the data; the model; and the data. All ranks.

    The data is read last, after `try_out(model)`, unless the model cannot be made without it.
    """
    import torch

    data = None
    if needs_data(experiment):
        torch.manual_seed(experiment.seed)
        data = make_data(experiment)
        experiment = with_classes(experiment, *data)
    model = make_model(experiment)
    if try_out is not None:
        try_out(model)
    if data is None:
        data = make_data(experiment)
        experiment = with_classes(experiment, *data)
        if isinstance(names := experiment.model.get("classes"), list) and hasattr(model, "name_classes"):
            model.name_classes(names)
    return experiment, model, data


def make_model(experiment: Experiment) -> Any:
    """Return the model, with initial weights that depend only on the run's seed."""
    import torch

    from runner.core.randomness import stream_seed
    from runner.models.by_name import make_by_name

    section = experiment.model
    seed = stream_seed(experiment.seed, "model")
    torch.manual_seed(seed)
    model = make_by_name(section.make, seed) if experiment.init_weights == "by_name" else section.make()
    if not isinstance(model, torch.nn.Module):
        reason = (
            f"made a {type(model).__name__}, but must make a runner.Model; runner.ClassificationModel wraps a module"
        )
        raise WrongKey("model._target_", reason, repr(section.target))
    return model


def assemble(experiment: Experiment, run_dir: Path, run_name: str, **parts: Any) -> Trainer:
    """Return the Trainer of an experiment. `parts` are its objects, named like the Trainer's arguments."""
    config = hidden_everywhere(experiment.plain)
    supplied = {"run_dir": run_dir, "run_name": run_name, "progress_bar": False, "config": config}
    trainer = experiment.trainer.make([*experiment.sections()], **supplied, **parts)
    trainer.warns_of_divergence = False
    use_one_thread_if_short(trainer.state)
    return trainer


def make_destinations(callbacks: Mapping[str, Section]) -> list[LoggerDestination]:
    """Make and return the logger destinations among some callbacks, for use without a run."""
    from runner.core.destination import LoggerDestination

    kinds = [(section, section.find_target()) for section in callbacks.values()]
    return [section.make() for section, kind in kinds if isinstance(kind, type) and issubclass(kind, LoggerDestination)]


@contextmanager
def naming_hooks(experiment: Experiment) -> Iterator[None]:
    """When a callback or algorithm raises, add its config section to the exception, as facts and as a note."""
    try:
        yield
    except Exception as error:
        note_section_of_hook(error, [*experiment.sections()])
        raise


def _check_trainer(section: Section, ranks: int | str) -> None:
    from runner.training.arguments import check_arguments

    if section.target == "runner.Trainer":
        for key, value in section.plain.items():
            if (foreign := about_foreign_value(f"trainer.{key}", value)) is not None:
                raise WrongKey(f"trainer.{key}", foreign, repr(value))
        if section.get("device") == "meta":
            raise WrongKey("trainer.device", "holds no values to train; runner check tries a run there", "'meta'")
        known = inspect.signature(check_arguments).parameters
        check_null("trainer", section.plain, known)
        with section.named():
            plain = {key: value for key, value in section.plain.items() if not isinstance(value, Mapping)}
            check_arguments(**{key: value for key, value in plain.items() if key in known}, ranks=ranks)


def checkpoint_of(key: str, path: str) -> Path:
    """Return the checkpoint or weights file that the value of a config key refers to."""
    from runner.checkpoints.files import find_checkpoint
    from runner.checkpoints.weights import is_weights_file

    if key == "trainer.load_path" and is_weights_file(Path(path)):
        return Path(path).resolve()
    try:
        return find_checkpoint(path)
    except FileNotFoundError as error:
        reason = "no complete checkpoint there" if Path(path).exists() else "no such folder"
        raise WrongKey(key, f"{reason}; give a run's folder, or a checkpoint's", repr(path)) from error


def make_optimizers(sections: Mapping[str, Section]) -> Any:
    """Return the optimizer of an experiment, usually a factory, or a dict of optimizers by submodule.

    A factory that takes parameters is tried on a tiny model, to report wrong arguments before the model is made.
    """
    import torch

    from runner.optim.param_groups import ParamGroups, takes_model

    optimizers: dict[str, Any] = {}
    for name, section in sections.items():
        optimizer = section.without("param_groups").make()
        rules = section.get("param_groups")
        with section.named():
            if callable(optimizer) and not takes_model(optimizer):
                _try_factory(optimizer, torch.nn.Linear(2, 2))
            optimizers[name] = ParamGroups(cast(Any, optimizer), rules) if rules else optimizer
    return optimizers.get("", optimizers)


def _try_on_model(parts: Mapping[str, Any], model: Any, experiment: Experiment) -> None:
    """Before data is read, try factories that take the model, unless an algorithm may still change it at INIT."""
    from runner.core.engine import overrides
    from runner.optim.factories import submodule
    from runner.optim.param_groups import takes_model
    from runner.timing.event import Event

    if any(overrides(algorithm, Event.INIT) for algorithm in parts["algorithms"].values()):
        return
    for name, section in experiment.optimizers.items():
        with section.named():
            part = submodule(model, name) if name else model
            factory = parts["optimizers"][name] if name else parts["optimizers"]
            if callable(factory) and takes_model(factory):
                _try_factory(factory, part)


def _try_factory(factory: Any, model: Any) -> None:
    from runner.optim.factories import make_optimizers

    for group in (group for optimizer in make_optimizers(factory, model) for group in optimizer.param_groups):
        if isinstance(lr := group.get("lr"), str):  # not every optimizer checks its lr
            raise wrong_argument("lr", lr, "must be a number, the learning rate", TypeError)
