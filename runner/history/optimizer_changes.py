"""Applies changed optimizer settings when a run resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

from runner.comparing.changes import ABSENT, find_changes
from runner.terminal.console import show_path

if TYPE_CHECKING:
    from runner.core.state import State

_TORCH_SCHEDULERS = "torch."
"""Prefix of the targets of torch's schedulers, which compute each learning rate from the previous one."""


def change_optimizers(state: State, config: Mapping[str, Any]) -> None:
    """Apply settings that have changed in the config to the optimizers of a resumed run. All ranks.

    Otherwise they would keep the values saved in the checkpoint. Changes nothing if the checkpoint has no config.
    """
    from runner.checkpoints.files import read_config

    if state.resumed_from is None or not (before := read_config(state.resumed_from)):
        return
    targets = [str((section.get("scheduler") or {}).get("_target_", "")) for section in (before, config)]
    can_change = not any(target.startswith(_TORCH_SCHEDULERS) for target in targets)  # others multiply initial_lr
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    for change in find_changes(before, config):
        section, _, name = change.key.partition(".")
        if section not in ("optimizer", "scheduler") or (section == "scheduler" and can_change):
            continue
        names = [name, "initial_lr"] if name == "lr" and "initial_lr" in groups[0] else [name]
        scales = [group.get("lr_scale", 1.0) if name == "lr" else 1.0 for group in groups]  # param_groups sets it
        if not can_change or change.after is ABSENT or not _is_shared(groups, names[-1], scales):
            weights = show_path(state.resumed_from)
            raise ValueError(
                f"{change}: cannot be applied to a resumed run; start a new run from its weights with "
                f"trainer.load_path={weights}"
            )
        for group, scale in zip(groups, scales, strict=True):
            value = change.after if scale == 1 else change.after * scale
            group |= dict.fromkeys(names, value)  # schedules multiply initial_lr


def _is_shared(groups: Sequence[Mapping[str, Any]], name: str, scales: Sequence[float]) -> bool:
    """Return whether all groups have a setting, with values that differ at most by the groups' scales."""
    if not all(name in group for group in groups):
        return False
    first = groups[0][name]
    if all(scale == 1 for scale in scales):
        return all(group[name] == first for group in groups)
    return all(isclose(group[name] * scales[0], first * scale) for group, scale in zip(groups, scales, strict=True))
