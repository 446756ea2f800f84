"""A model whose evaluations follow a script."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchmetrics import MeanMetric

from runner import Model


class Scripted(Model):
    """A model that learns nothing, with scripted values in place of results.

    The loss of an evaluation batch is the next value of `script`, and its metric is minus that value. The metric of a
    training batch is the next value of `train_script`.
    """

    def __init__(self, script: Sequence[float], train_script: Sequence[float] = ()):
        super().__init__()
        self.script = list(script)
        self.train_script = list(train_script)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * batch

    def eval_forward(self, batch, outputs=None):
        self.value = self.script.pop(0)
        return batch

    def loss(self, outputs, batch):
        return outputs.sum() * 0 if self.training else torch.tensor(self.value)

    def metrics(self, train):
        return {"Mean": MeanMetric(nan_strategy="disable")} if self.train_script or not train else {}

    def update_metric(self, batch, outputs, metric):
        metric.update(self.train_script.pop(0) if self.training else -self.value)
