"""Fills in what a model takes from its data: the number of classes, their names, and their weights.

Some values in a model's config are filled in from the training data or, without data, from a recorded config:

    num_classes: null, num_labels: null     the number of classes; these keys may also be in `module`
    class_weights: balanced                 one weight per class, so that all classes count equally
    classes: null, or no such key           the names of the classes, if the data has any and the model takes them

Checkpoints and loggers record the config with these values filled in.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from runner.config.experiment import Experiment
from runner.config.signatures import locate
from runner.distributed.environment import is_rank_zero
from runner.failures.errors import WrongKey

log = logging.getLogger("runner")

BALANCED = "balanced"
NUMBERS = ("num_classes", "num_labels")


def needs_data(experiment: Experiment) -> bool:
    """Return whether the model cannot be made before the data has been read; class names can be set later."""
    plain = experiment.model.plain
    return plain.get("class_weights") == BALANCED or None in _numbers_in(plain)


def with_classes(experiment: Experiment, train: Any, evaluation: Any = None) -> Experiment:
    """Return an experiment whose model has the number, names and weights of the classes of its training data.

    Args:
        experiment: the experiment.
        train: the training data.
        evaluation: the evaluation data, whose labels are checked too, in any form that the Trainer takes.

    Raises:
        ValueError: a label is not a number of one of the classes.
        WrongKey: the data does not say what the model needs, or samples have several classes and the model expects one.
    """
    from runner.data.classes import labels_of, names_of_classes

    plain = experiment.model.plain
    names = names_of_classes(train)
    labels = labels_of(train) if needs_data(experiment) or plain.get("multi_label") else None
    _check_multi_label(plain, train, labels)
    number = _number_in(plain)
    if number is None and names is not None:
        number = len(names)
    elif number is None and labels is not None:
        number = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    _check_labels(experiment, number, train, evaluation)
    if number is None and "num_classes" in plain:
        raise WrongKey("model.num_classes", "the data does not say how many classes it has; give a number", "None")
    weights = _balance(train, labels, number) if plain.get("class_weights") == BALANCED else None
    return experiment.changed(model=_filled(plain, number, weights, names))


def without_data(experiment: Experiment, recorded: Mapping[str, Any] | None = None) -> Experiment:
    """Return an experiment whose model can be made without data.

    Values that the data would fill in come from `recorded`, the config in a checkpoint; without one, the model gets two
    classes.
    """
    plain = experiment.model.plain
    saved = (recorded or {}).get("model")
    saved = saved if isinstance(saved, Mapping) else {}
    stated = plain.get("classes") or plain.get("class_weights")
    number = _number_in(saved) or _number_in(plain) or (len(stated) if isinstance(stated, list) else 2)
    has_classes = not saved or _number_in(saved) is not None  # a recorded regression has none
    weights = saved.get("class_weights") or [1.0] * number
    return experiment.changed(model=_filled(plain, number if has_classes else None, weights, saved.get("classes")))


def _filled(plain: Mapping[str, Any], number: int | None, weights: Any, names: Any) -> dict[str, Any]:
    """Return the config of a model with these values filled in."""

    def fill(part: Mapping[str, Any]) -> dict[str, Any]:
        return {key: number if key in NUMBERS and value is None else value for key, value in part.items()}

    filled = fill(plain)
    if isinstance(module := plain.get("module"), Mapping):
        filled["module"] = fill(module)
    if plain.get("class_weights") == BALANCED:
        filled["class_weights"] = weights
    fits = isinstance(names, list) and len(names) == _number_in(filled) and filled.get("classes") is None
    if fits and "classes" in inspect.signature(locate("model", plain["_target_"])).parameters:
        filled["classes"] = names
    return filled


def _check_multi_label(plain: Mapping[str, Any], train: Any, labels: Any) -> None:
    """Check that the model is multi-label if, and only if, the data is."""
    from runner.data.classes import is_multi_label

    module = plain.get("module")
    overrides = module.get("overrides") if isinstance(module, Mapping) else None
    if is_multi_label(train):
        if plain.get("multi_label") is False and "problem_type" not in (overrides or {}):
            reason = "in this data, a sample can have any number of classes; give model.multi_label=true"
            raise WrongKey("model.multi_label", reason, "False")
    elif plain.get("multi_label") and labels is not None:
        reason = "in this data, a sample has one class; give model.multi_label=false"
        raise WrongKey("model.multi_label", reason, "True")


def _check_labels(experiment: Experiment, number: int | None, train: Any, evaluation: Any) -> None:
    """Check the labels of data sets with `check_labels(number)`, unless a loss of the user's may take others."""
    from runner.data.classes import holder_of
    from runner.training.evaluator import ensure_evaluators

    plain = experiment.model.plain
    numbers = _numbers_in(plain)
    is_classifier = bool(numbers) and number != 1 and not plain.get("multi_label") and plain.get("loss_fn") is None
    if is_classifier:
        for loader in (train, *(part.dataloader for part in ensure_evaluators(evaluation))):
            holder = holder_of(loader, "check_labels")
            if holder is not None:
                with experiment.data.named():
                    holder.check_labels(number)


def _balance(train: Any, labels: Any, number: int | None) -> list[float]:
    """Return the weights that 'balanced' stands for; with fake data, all weights are 1."""
    from runner.data.classes import balanced_weights
    from runner.data.fake import FakeLoader

    if labels is None or number is None:
        reason = "the labels of the training samples cannot be read without their inputs; give numbers"
        raise WrongKey("model.class_weights", reason, repr(BALANCED))
    if isinstance(train, FakeLoader):
        return [1.0] * number
    try:
        weights = balanced_weights(labels, number)
    except ValueError as error:
        raise WrongKey("model.class_weights", str(error), repr(BALANCED)) from error
    if is_rank_zero():
        log.info("class_weights=balanced: %s", ", ".join(f"{weight:.4g}" for weight in weights))
    return weights


def _numbers_in(plain: Mapping[str, Any]) -> list[int | None]:
    """Return the numbers of classes in the config of a model and of its module; None for each that is null."""
    parts = [part for part in (plain, plain.get("module")) if isinstance(part, Mapping)]
    return [part[key] for part in parts for key in NUMBERS if key in part]


def _number_in(plain: Mapping[str, Any]) -> int | None:
    """Return the number of classes in the config of a model."""
    return next((number for number in _numbers_in(plain) if number is not None), None)
