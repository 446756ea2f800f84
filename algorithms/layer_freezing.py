"""Layer freezing: early layers stop learning in the course of training."""

from __future__ import annotations

import logging
import math
from typing import Any

from torch import nn

from runner import Algorithm, Logger, State, TimeUnit, get_global_rank
from runner.failures.checks import check_number

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
    """Freezes layers at the ends of epochs, from the first layer on; the last one learns to the end.

    A layer is a module that owns parameters; a parameter that it shares with a layer that still learns keeps learning.
    Frozen parameters get no gradient, so optimizers leave them alone, weight decay included, while batch norm keeps
    updating its running statistics. If no epoch will have a frozen layer, a warning says so when training starts, or
    when it ends if the number of epochs is not known earlier.

    Args:
        freeze_start: fraction of training after which freezing begins, in [0, 1).
        freeze_level: fraction of the layers, not counting the last, that are frozen at the end, in [0, 1].

    Logs:
        layer_freezing/layers_frozen: number of frozen layers, at the end of each epoch.
        layer_freezing/percentage_frozen: fraction of layers frozen by the schedule, in [0, 1].

    Raises:
        ValueError: an argument is out of range; or, when training starts, the model has fewer than two layers.

    Evidence:
        Some: saves a little time for a little accuracy in residual networks (Brock et al. 2017, "FreezeOut",
        arXiv:1706.04983). Freezing at the ends of epochs follows MosaicML Composer.
    """

    def __init__(self, freeze_start: float = 0.5, freeze_level: float = 1.0) -> None:
        check_number("freeze_start", freeze_start, "[0, 1)")
        check_number("freeze_level", freeze_level, "[0, 1]")
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self._count = 0
        self._has_frozen = False
        self._warned = False
        self._learned: list[nn.Parameter] = []

    def before_load(self, state: State, logger: Logger) -> None:
        parameters = state.unwrapped_model.parameters()
        self._learned = [parameter for parameter in parameters if parameter.requires_grad]

    def fit_start(self, state: State, logger: Logger) -> None:
        if len(layers_of(state.unwrapped_model)) < 2:
            raise ValueError("LayerFreezing needs a model with at least two layers: remove LayerFreezing")
        self._freeze(state)
        self._has_frozen |= self._count > 0
        if self._most_frozen(state) == 0:
            self._warn(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._has_frozen |= self._count > 0

    def fit_end(self, state: State, logger: Logger) -> None:
        if not state.stop_requested:
            self._warn(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        elapsed = state.get_elapsed_duration().value
        fraction = frozen_fraction(elapsed, self.freeze_start, self.freeze_level)
        self._count = self._layers_at(state, fraction)
        self._freeze(state)
        logger.log_metrics({"layer_freezing/layers_frozen": self._count, "layer_freezing/percentage_frozen": fraction})

    def close(self, state: State, logger: Logger) -> None:
        for parameter in self._learned:
            parameter.requires_grad_(True)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]

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
