"""Changes to the settings of optimizers between a checkpoint and a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runner.runs.changes import ABSENT, find_changes
from runner.terminal import show_path

if TYPE_CHECKING:
    from runner.state import State

_SCHEDULES = "runner.schedulers."


def change_optimizers(state: State, config: Mapping[str, Any]) -> None:
    """Apply to the optimizers of a resumed run the settings that have changed in its config. All ranks.

    Without this they would continue with the values saved in the checkpoint.

    Args:
        state: the run, after its checkpoint was loaded; if the checkpoint has no config, nothing is changed.
        config: the config of the run as it is now.

    Raises:
        ValueError: the change cannot be applied, because it concerns the optimizer's state, a value that differs
            between parameter groups, or a schedule of torch's own, which derives each rate from the previous one.
    """
    from runner.checkpoints.files import read_config

    if state.resumed_from is None or not (before := read_config(state.resumed_from)):
        return
    schedules = [str((one.get("scheduler") or {}).get("_target_", _SCHEDULES)) for one in (before, config)]
    is_function = all(one.startswith(_SCHEDULES) for one in schedules)  # of time, so a checkpoint holds no state of it
    groups = [group for one in state.optimizers for group in one.param_groups]
    for change in find_changes(before, config):
        section, _, name = change.key.partition(".")
        if section not in ("optimizer", "scheduler") or (section == "scheduler" and is_function):
            continue
        names = [name, "initial_lr"] if name == "lr" and "initial_lr" in groups[0] else [name]
        saved = [group.get(names[-1], ABSENT) for group in groups]
        if not is_function or change.after is ABSENT or any(one is ABSENT or one != saved[0] for one in saved):
            weights = show_path(state.resumed_from)
            raise ValueError(
                f"{change}: cannot be applied to a checkpoint; start from its weights with trainer.load_path={weights}"
            )
        for group in groups:
            group |= dict.fromkeys(names, change.after)  # schedules multiply initial_lr
