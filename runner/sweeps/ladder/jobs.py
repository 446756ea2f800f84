"""Prepares `sweep=ladder`: the sizes of the model, and the compute with which each is trained."""

from __future__ import annotations

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict, read_write

from runner.failures.errors import WrongKey
from runner.records.result import FOLD, SEED
from runner.sweeps.plan import is_grid, typed_overrides
from runner.training.budget import Budget

BUDGET = "budget"
LEAST = 4
"""The smallest number of rungs: three to fit a law to, and one that is held out."""


def prepare_ladder(config: DictConfig) -> None:
    """Add the default sizes and budgets of the chosen model to the swept keys of a ladder, and check its budgets."""
    if not config.get("ladder"):
        return
    if not is_grid(config):
        chosen = config.hydra.runtime.choices["hydra/sweeper"]
        raise WrongKey("hydra/sweeper", "a ladder trains every combination; leave the sweeper out", repr(chosen))
    model = config.hydra.runtime.choices.get("model")
    known = config.ladder.get(model) or {}
    typed = {override.get_key_element().lstrip("+"): override for override in typed_overrides(config)}
    has_size = any(override.is_sweep_override() and key not in (BUDGET, SEED, FOLD) for key, override in typed.items())
    for key, values in known.items():
        if key not in typed and (key == BUDGET or not has_size):
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.sweeper.params[key] = values
            has_size = has_size or key != BUDGET
    if not has_size:
        reason = f"no known key makes model={model} larger; sweep the one that does"
        raise WrongKey("ladder", f"{reason}, such as model.module.width=8,16,32")
    _check_rungs({override.get_key_element(): override for override in typed_overrides(config)}.get(BUDGET))


def _check_rungs(budget: Override | None) -> None:
    example = "such as budget=1e9flop,2e9flop,4e9flop,8e9flop"
    if budget is None:
        raise WrongKey(BUDGET, f"no compute budgets; give at least {LEAST} budgets, {example}")
    values = [*budget.sweep_string_iterator()] if budget.is_discrete_sweep() else [str(budget.value())]
    flops = [Budget.parse(value).flop for value in values]
    if None in flops:
        reason = f"a ladder needs budgets of compute, in floating-point operations, {example}"
        raise WrongKey(BUDGET, reason, repr(values[flops.index(None)]))
    if len(set(flops)) < LEAST:
        reason = f"a ladder needs at least {LEAST} rungs: three to fit a law to, and one that is held out; {example}"
        raise WrongKey(BUDGET, reason, ",".join(values))
