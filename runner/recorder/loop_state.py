"""The state of a training loop other than the Trainer's, as logger destinations and digests read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.checkpoints.digest import LOOP, digest_state, digest_tensors, measure_state
from runner.timing.time import Timestamp


class LoopState:
    """The attributes of `runner.State` that a recorded loop has.

    Args:
        config: the config, as plain values.
        after_batch: number of batches already trained.
    """

    train_metrics: Mapping[str, Any] = {}
    eval_metrics: Mapping[str, Any] = {}
    algorithms: Sequence[Any] = ()

    def __init__(self, config: dict[str, Any], after_batch: int) -> None:
        self.config = config
        self.timestamp = Timestamp(batch=after_batch)
        self.run_dir = Path()
        self.run_name = ""
        self.error: BaseException | None = None
        self.batch: Any = None
        self.total_loss = torch.zeros(())
        self.digest_interval = 0  # batches between two digests; 0 for none

    def watch(self, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, interval: int) -> None:
        """Set what is digested, and how often."""
        self.digest_interval = interval
        self.unwrapped_model = model
        self.optimizers = [] if optimizer is None else [optimizer]
        self.schedulers = [] if scheduler is None else [scheduler]
        self.scaler = scaler
        self.device = next((weight.device for weight in model.parameters()), torch.device("cpu"))

    def digests(self, loss: Tensor | float, batch: Any) -> dict[str, Any]:
        """Return the line of `digests.jsonl` for the last batch. Call it on all ranks if the model is sharded."""
        state: Any = self
        self.batch = batch
        self.total_loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)
        missing = {"algorithms"} if batch is not None else {"algorithms", "content"}
        digests = {name: part for name, part in digest_state(state).items() if name not in missing}
        by_name = {"tensors": digest_tensors(state), "values": measure_state(state)}
        return {"batch": self.timestamp.batch, LOOP: "own", **digests, **by_name}
