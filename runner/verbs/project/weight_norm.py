"""A callback: a class with a method for each event that it listens to."""

import torch

from runner import Callback, Logger, State


class WeightNorm(Callback):
    """Logs the norm of all weights after each epoch.

    Args:
        order: order of the norm; 2 is the Euclidean norm.
    """

    def __init__(self, order: float = 2.0) -> None:
        self.order = order

    def epoch_end(self, state: State, logger: Logger) -> None:
        weights = [parameter.detach() for parameter in state.unwrapped_model.parameters()]
        logger.log_metrics({"weight_norm": torch.nn.utils.get_total_norm(weights, self.order)})
