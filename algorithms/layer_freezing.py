"""Layer freezing: early layers stop learning in the course of training, or some parameters start to learn later."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from runner import Algorithm, Logger, State, Time, TimeUnit, get_global_rank
from runner.failures.checks import check_list, check_number, refuse_if
from runner.optim.name_patterns import select_names

log = logging.getLogger("runner")


def frozen_fraction(elapsed: float, freeze_start: float, freeze_level: float) -> float:
    """Return the fraction of layers to freeze: 0 until `freeze_start`, then rising linearly to `freeze_level`.

    Args:
        elapsed: fraction of training that has passed, in [0, 1].
        freeze_start: fraction of training after which freezing begins, in [0, 1).
        freeze_level: fraction of layers that are frozen at the end, in [0, 1].
    """
    return freeze_level * max(0.0, elapsed - freeze_start) / (1 - freeze_start)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that own parameters, in the order of the model."""
    return [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]


class LayerFreezing(Algorithm):
    """Freezes layers at the ends of epochs, beginning with the first; the last one is never frozen.

    A layer is a module that owns parameters; a parameter that it shares with a layer that still learns keeps learning.
    Frozen parameters get no gradient, so optimizers leave them alone, weight decay included, while batch norm keeps
    updating its running statistics. If no epoch will have a frozen layer, a warning says so when training starts, or
    when it ends if the number of epochs is not known earlier.

    With `names`, these parameters are frozen from the start instead, until an epoch starts at or after `until`. A
    shared parameter is frozen if all of its names are selected.

    Args:
        freeze_start: fraction of training after which freezing begins, in [0, 1).
        freeze_level: fraction of the layers, not counting the last, that are frozen at the end, in [0, 1].
        names: shell patterns for full names of parameters to freeze from the start, in place of the schedule. A later
            pattern wins, and `!` excludes, as in ['*', '!*.head.*']. None freezes by the schedule.
        until: with `names`, the time after which the parameters learn, such as '1ep'; None freezes them to the end.

    Logs:
        layer_freezing/layers_frozen: number of frozen layers, at the end of each epoch.
        layer_freezing/percentage_frozen: fraction of layers frozen by the schedule, in [0, 1].

    Raises:
        ValueError: an argument is out of range, or cannot be combined with another; or, when training starts, the model
            has fewer than two layers, a pattern matches no parameter, or `names` selects none or all that learn.

    Evidence:
        Some: saves a little time for a little accuracy in residual networks (Brock et al. 2017, "FreezeOut",
        arXiv:1706.04983). Freezing at the ends of epochs follows MosaicML Composer.
    """

    def __init__(
        self,
        freeze_start: float = 0.5,
        freeze_level: float = 1.0,
        names: Sequence[str] | None = None,
        until: str | Time | None = None,
    ) -> None:
        check_number("freeze_start", freeze_start, "[0, 1)")
        check_number("freeze_level", freeze_level, "[0, 1]")
        check_list("names", names, "patterns")
        all_texts = names is None or all(isinstance(name, str) for name in names)
        refuse_if(not all_texts, "names", names, "must be a list of patterns", TypeError)
        has_schedule = (freeze_start, freeze_level) != (0.5, 1.0)
        refuse_if(names is not None and has_schedule, "names", names, "replaces freeze_start and freeze_level: remove")
        refuse_if(names is None and until is not None, "until", until, "is for names: list them, such as ['*.0.*']")
        self.names = None if names is None else list(names)
        self.until = None if until is None else Time.parse(until, "until")
        in_seconds = self.until is not None and self.until.unit == TimeUnit.SECOND
        refuse_if(in_seconds, "until", until, "differs from run to run; count epochs or batches, such as '1ep'")
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self._count = 0
        self._has_frozen = False
        self._warned = False
        self._learned: list[nn.Parameter] = []

    def before_load(self, state: State, logger: Logger) -> None:
        parameters = state.unwrapped_model.parameters()
        self._learned = [parameter for parameter in parameters if parameter.requires_grad]
        if self.names is not None:
            self._freeze_named(state.unwrapped_model, self.names)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.names is not None:
            return
        if len(layers_of(state.unwrapped_model)) < 2:
            raise ValueError("LayerFreezing needs a model with at least two layers: remove LayerFreezing")
        self._freeze(state)
        self._has_frozen |= self._count > 0
        if self._most_frozen(state) == 0:
            self._warn(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        if self.until is not None and state.progress.elapsed_in(self.until.unit) >= self.until.value:
            self._unfreeze()
        self._has_frozen |= self._count > 0

    def fit_end(self, state: State, logger: Logger) -> None:
        is_late = self.until is not None and not all(parameter.requires_grad for parameter in self._learned)
        if is_late and not state.stop_requested and get_global_rank() == 0:
            log.warning(
                "%s.until=%r: no epoch started at or after it, so nothing was unfrozen",
                self.config_key,
                str(self.until),
            )
        if self.names is None and not state.stop_requested:
            self._warn(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self.names is not None:
            return
        elapsed = state.get_elapsed_duration().value
        fraction = frozen_fraction(elapsed, self.freeze_start, self.freeze_level)
        self._count = self._layers_at(state, fraction)
        self._freeze(state)
        logger.log_metrics({"layer_freezing/layers_frozen": self._count, "layer_freezing/percentage_frozen": fraction})

    def close(self, state: State, logger: Logger) -> None:
        self._unfreeze()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]

    def _freeze_named(self, model: nn.Module, patterns: Sequence[str]) -> None:
        named = dict(model.named_parameters(remove_duplicate=False))
        selected = select_names("names", patterns, list(named))
        learning = {id(parameter) for name, parameter in named.items() if name not in selected}
        frozen = [parameter for parameter in self._learned if id(parameter) not in learning]
        refuse_if(not frozen, "names", patterns, "selects no parameter that learns; add a pattern")
        refuse_if(len(frozen) == len(self._learned), "names", patterns, "freezes all: exclude some, as in '!*.head.*'")
        for parameter in frozen:
            parameter.requires_grad_(False)
        if get_global_rank() == 0:
            end = "the end" if self.until is None else f"the first epoch from {self.until} on"
            log.info("%s: %d of %d tensors frozen until %s", self.config_key, len(frozen), len(self._learned), end)

    def _unfreeze(self) -> None:
        for parameter in self._learned:
            parameter.requires_grad_(True)

    def _layers_at(self, state: State, fraction: float) -> int:
        return int(fraction * (len(layers_of(state.unwrapped_model)) - 1))

    def _most_frozen(self, state: State) -> int | None:
        """Return the number of frozen layers in the last epoch, or None if the number of epochs is not known."""
        try:
            epochs = state.progress.convert(state.max_duration, TimeUnit.EPOCH)
        except ValueError:
            return None
        elapsed = (math.ceil(epochs) - 1) / epochs
        return self._layers_at(state, frozen_fraction(elapsed, self.freeze_start, self.freeze_level))

    def _warn(self, state: State) -> None:
        """Warn, once and on rank 0, that no batch is trained with frozen layers; the run may still continue."""
        if not self._has_frozen and not self._warned and get_global_rank() == 0:
            log.warning(
                "%s freezes nothing: layers freeze between epochs, and with freeze_start=%r and freeze_level=%r no "
                "epoch of max_duration=%r has a frozen layer",
                *(self.config_key, self.freeze_start, self.freeze_level, str(state.max_duration)),
            )
        self._warned = True

    def _freeze(self, state: State) -> None:
        layers = layers_of(state.unwrapped_model)
        learning = {id(weight) for layer in layers[self._count :] for weight in layer.parameters(recurse=False)}
        frozen = [weight for layer in layers[: self._count] for weight in layer.parameters(recurse=False)]
        for parameter in frozen:
            if id(parameter) not in learning:
                parameter.requires_grad_(False)
