"""Save the accumulators of training metrics, merged over all ranks, and restore them on the first of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from runner.core.state import State
from runner.distributed.ranks import get_data_parallel_rank, get_world_size
from runner.libraries.torchmetrics import empty


def metric_states(state: State) -> dict[str, Any]:
    """Return the training metrics' accumulators, merged over all ranks. All ranks."""
    states = {}
    for name, metric in state.train_metrics.items():
        is_shared = get_world_size() > 1 and state.timestamp.batch_in_epoch > 0
        if is_shared:
            metric.sync()
        states[name] = dict(metric.state_dict())
        if is_shared:
            metric.unsync()
    return states


def load_metric_states(state: State, saved: Mapping[str, Any]) -> None:
    """Restore the merged accumulators on the first of the merged ranks; the others start empty."""
    for name, metric in state.train_metrics.items():
        if name not in saved:
            continue
        metric.load_state_dict(saved[name])
        metric.to(state.device)
        for part in metric.modules():
            for key, value in getattr(part, "metric_state", {}).items():
                if isinstance(part._defaults[key], list) and isinstance(value, Tensor):
                    setattr(part, key, [value])  # merging the ranks concatenated the list
        if get_data_parallel_rank() != 0:
            empty(metric)
        metric._update_count = 1  # otherwise compute() warns that the metric was never updated
