"""The models of this project: plain modules."""

from torch import Tensor, nn


class TwoLayers(nn.Module):
    """Two linear layers.

    Args:
        in_features: numbers in one input.
        width: units between the two layers.
        num_classes: classes.
    """

    def __init__(self, in_features: int = 2, width: int = 32, num_classes: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits `(N, num_classes)` of inputs `(N, in_features)`."""
        return self.layers(inputs)
