"""Fills in what a model takes from its data: the number of classes, their names, and their weights.

In the config of a model, `num_classes: null`, `num_labels: null` and `class_weights: balanced` stand for what the
training data has. The config that checkpoints and loggers record has the numbers instead.
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

NUMBERS = ("num_classes", "num_labels")


def needs_data(experiment: Experiment) -> bool:
    """Return whether the model cannot be made before the data has been read."""
    plain = experiment.model.plain
    return plain.get("class_weights") == "balanced" or _lacks_number(plain)


def with_classes(experiment: Experiment, train: Any) -> Experiment:
    """Return an experiment whose model has the number, names and weights of the classes of its training data.

    Raises:
        WrongKey: the data does not say what the model needs, or samples have several classes and the model expects one.
    """
    from runner.data.classes import balanced_weights, is_multi_label, labels_of, names_of_classes
    from runner.data.fake import FakeLoader

    plain = experiment.model.plain
    names = names_of_classes(train)
    number = None if names is None else len(names)
    has_many = is_multi_label(train)
    module = plain.get("module")
    overrides = module.get("overrides") if isinstance(module, Mapping) else None
    if has_many and plain.get("multi_label") is False and "problem_type" not in (overrides or {}):
        reason = "in this data, a sample has any number of classes; give model.multi_label=true"
        raise WrongKey("model.multi_label", reason, "False")
    if plain.get("multi_label") and not has_many and labels_of(train) is not None:
        raise WrongKey(
            "model.multi_label", "in this data, a sample has one class; give model.multi_label=false", "True"
        )
    changes: dict[str, Any] = {}
    if needs_data(experiment):
        labels = labels_of(train)
        if number is None and labels is not None:
            number = labels.shape[1] if has_many else int(labels.max()) + 1
        if number is None and "num_classes" in plain and plain["num_classes"] is None:
            raise WrongKey("model.num_classes", "the data does not say how many classes it has; give a number", "None")
        if plain.get("class_weights") == "balanced":
            number = number if _number_in(plain) is None else _number_in(plain)
            if labels is None or number is None:
                reason = "the classes of the training samples cannot be read apart from them; give numbers"
                raise WrongKey("model.class_weights", reason, "'balanced'")
            try:
                made_up = isinstance(train, FakeLoader)
                weights = [1.0] * number if made_up else balanced_weights(labels, number)
            except ValueError as error:
                raise WrongKey("model.class_weights", str(error), "'balanced'") from error
            if is_rank_zero() and not made_up:
                log.info("class_weights=balanced: %s", ", ".join(f"{weight:.4g}" for weight in weights))
            changes["class_weights"] = weights
        plain = _with_number(plain, number)
    if plain.get("classes") is None and names is not None and _number_in(plain) == len(names) and _takes_names(plain):
        changes["classes"] = names
    return experiment.changed(model={**plain, **changes})


def without_data(experiment: Experiment, recorded: Mapping[str, Any] | None = None) -> Experiment:
    """Return an experiment whose model can be made without data.

    What the data would say comes from the model in a config that a checkpoint has `recorded`, or stands for two
    classes.
    """
    plain = experiment.model.plain
    saved = (recorded or {}).get("model")
    saved = saved if isinstance(saved, Mapping) else {}
    weights = plain.get("class_weights")
    names = plain.get("classes")
    stated = names or (weights if isinstance(weights, list) else None) or [1.0, 1.0]
    number = _number_in(saved) or _number_in(plain) or len(stated)
    if _lacks_number(plain) and (saved == {} or _number_in(saved) is not None):
        plain = _with_number(plain, number)
    changes = {"class_weights": saved.get("class_weights") or [1.0] * number} if weights == "balanced" else {}
    if names is None and isinstance(saved.get("classes"), list) and saved.get("_target_") == plain.get("_target_"):
        changes["classes"] = saved["classes"]
    return experiment.changed(model={**plain, **changes})


def _lacks_number(plain: Mapping[str, Any]) -> bool:
    parts = (plain, plain.get("module"))
    return any(key in part and part[key] is None for part in parts if isinstance(part, Mapping) for key in NUMBERS)


def _takes_names(plain: Mapping[str, Any]) -> bool:
    """Return whether a model has an argument for the names of its classes."""
    return "classes" in inspect.signature(locate("model", plain["_target_"])).parameters


def _number_in(plain: Mapping[str, Any]) -> int | None:
    """Return the number of classes in the config of a model."""
    parts = [part for part in (plain, plain.get("module")) if isinstance(part, Mapping)]
    return next((part[key] for part in parts for key in NUMBERS if part.get(key) is not None), None)


def _with_number(plain: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    """Return the config of a model with a number of classes where it has none."""
    filled: dict[str, Any] = {
        key: number if key in NUMBERS and value is None else value for key, value in plain.items()
    }
    module = plain.get("module")
    return {**filled, "module": _with_number(module, number)} if isinstance(module, Mapping) else filled
