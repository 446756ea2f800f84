"""The length of training with a budget, before and after the budget is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.config.experiment import Experiment
from runner.failures.errors import WrongKey
from runner.timing.time import Time, TimeUnit, convert
from runner.training.budget import Budget


def check_budget(experiment: Experiment, is_new: bool = True) -> None:
    """Check that the budget of an experiment can be measured.

    A saved run, which is not new, may have a `scale_schedule_ratio` that an earlier budget set.

    Raises:
        WrongKey: another key contradicts the budget.
    """
    if experiment.budget is None or experiment.budget.batches is not None:
        return
    duration = _asked(experiment)
    if duration.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
        reason = "must be in epochs or batches, because the budget scales it"
        raise WrongKey("trainer.max_duration", reason, repr(str(duration)))
    if is_new and (ratio := experiment.trainer.get("scale_schedule_ratio", 1.0)) != 1.0:
        raise WrongKey("trainer.scale_schedule_ratio", "a budget sets it; leave one of them out", repr(ratio))


def check_length(experiment: Experiment, max_duration: Time, batches_per_epoch: int | None) -> None:
    """Check that a run will train the number of batches that its budget was measured to allow.

    Raises:
        WrongKey: it will train more or fewer, because another key or the data has changed since.
    """
    budget = experiment.budget
    if budget is None:
        return
    if (length := convert(max_duration, TimeUnit.BATCH, None, batches_per_epoch)) != budget.batches:
        reason = f"with this trainer.max_duration and this data, the run would now train {int(length):,} batches"
        fix = "give another budget, or budget=null and trainer.scale_schedule_ratio=1.0"
        raise WrongKey("budget", f"{reason}; {fix}", repr(str(budget)))


def fitted(experiment: Experiment, batches: int, batches_per_epoch: int | None) -> Experiment:
    """Return an experiment that trains exactly the measured `batches`, with its schedule scaled to them.

    Raises:
        WrongKey: `trainer.max_duration` is in epochs of unknown length.
    """
    assert experiment.budget is not None
    duration = _asked(experiment)
    try:
        length = convert(duration, TimeUnit.BATCH, None, batches_per_epoch)
    except ValueError:
        reason = "the data does not define the length of an epoch; with a budget, give batches, such as 1000ba"
        raise WrongKey("trainer.max_duration", reason, repr(str(duration))) from None
    ratio = (batches + 0.5) / float(length)  # the Trainer rounds down
    return experiment.changed(budget=str(replace(experiment.budget, batches=batches))).with_trainer(
        scale_schedule_ratio=ratio
    )


def unmeasured(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded config without the values that measuring its budget added; unchanged without a budget."""
    if plain.get("budget") is None:
        return plain
    trainer = {**plain["trainer"], "scale_schedule_ratio": 1.0}
    return {**plain, "budget": Budget.parse(plain["budget"]).limit, "trainer": trainer}


def _asked(experiment: Experiment) -> Time:
    return Time.parse_or_epochs(experiment.trainer.get("max_duration", "1ep"), "max_duration")
