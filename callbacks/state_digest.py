"""Writes short hashes of the state after a batch, to find where two runs diverge."""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Callback, Interval, Time, TimeUnit
from runner.checkpoints.digest import (
    DIGESTS,
    append_digests,
    digest_state,
    digest_tensors,
    measure_state,
    truncate_digests,
)
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from runner import Logger, State
    from runner.data.order import SampleOrder

log = logging.getLogger("runner")


class StateDigest(Callback):
    """Writes digests of the state to `digests.jsonl` in the run's folder, so that two runs can be compared bit for bit.

    `runner.first_difference("outputs/a", "outputs/b")` names the first recorded batch after which two runs differ, and
    what differs; with an interval of 1ba it is the first batch that differs at all. The batch that completes
    `max_duration` has a line at any interval, unless `max_duration` is in epochs and the loader has no length. A
    resumed run writes the same file as an uninterrupted one, with one more line if `max_duration` was shorter before.
    The file is logged as an artifact when the run closes. If training ends before the first line, there is a warning.

    A line has `epoch` (from 0), `batch` (from 1), and digests of rank 0's state after that batch was trained:

    - `samples`: indices of the samples in all batches so far, on all ranks and in order, independent of the number of
      ranks. Only for loaders with an `order` (those of `runner.data`), from the first epoch with this callback.
    - `content`: rank 0's share of this batch, as algorithms left it.
    - `randomness`: torch's generators for the CPU and the device. Generators of other libraries are not included,
      because a resume does not restore them.
    - `loss`: the loss of rank 0's share of this batch.
    - `gradients`: the gradients used by the optimizer's step, gathered if they are sharded.
    - `weights`: the model's `state_dict`, gathered if it is sharded.
    - `optimizer`: optimizers, schedules and the fp16 scaler.
    - `algorithms`: state of the algorithms, such as EMA's average.

    It also has, under `values`, the loss and the norms of gradients and weights as numbers. `runner verify` compares
    these if bit-identical results cannot be expected.

    Each line copies all of this to the host and hashes it, which takes one to two seconds per GB. A full disk gives a
    warning, and training continues.

    With `tensors`, a line also has a short digest of each gradient, weight and optimizer state, by name: `runner
    compare` then names the first ones that differ, also for a loop that `runner.Recorder` recorded.

    Args:
        interval: number of batches between two lines, such as '1000ba'; 0 writes no lines, not even for the last batch.
        tensors: whether lines have digests of single tensors. Each is copied to the host on its own.

    Raises:
        ValueError: `interval` is not in batches.
        TypeError: in training, the state holds a value that can neither be digested nor saved in a checkpoint.
    """

    def __init__(self, interval: str | int | Time = "1000ba", tensors: bool = False) -> None:
        self.interval = Interval(interval)
        if self.interval.time.value and self.interval.time.unit is not TimeUnit.BATCH:
            raise wrong_argument(
                "interval", str(self.interval.time), "must be in batches, such as '100ba', or 0 for never"
            )
        self._with_tensors = tensors
        self._is_enabled = False  # whether this rank computes digests
        self._path: Path | None = None  # on rank 0
        self._order: SampleOrder | None = None
        self._epochs = ""  # digest of the samples of completed epochs
        self._hashed = (-1, 0)  # the epoch, and the number of its batches in the hash
        self._hash = blake2b(digest_size=16)
        self._warned = False

    def fit_start(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank
        from runner.data import SampleOrder
        from runner.distributed.sharding import is_sharded

        takes_part = get_global_rank() == 0 or is_sharded(state.unwrapped_model)
        self._is_enabled = self.interval.time.value > 0 and takes_part
        if get_global_rank() != 0 or not self._is_enabled:
            return
        self._path = state.run_dir / DIGESTS
        if self._path.exists():  # after a resume, later batches are trained again
            truncate_digests(self._path, state.timestamp.batch)
        order = getattr(state.train_dataloader, "order", None)
        self._order = order if isinstance(order, SampleOrder) else None

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._is_enabled:
            return
        now = state.timestamp
        if now.batch % self.interval.time.value == 0 or _is_last(state):
            digests = digest_state(state)  # all ranks gather what is sharded
            values = measure_state(state)
            named = {"tensors": digest_tensors(state)} if self._with_tensors else {}
            if self._path is None:
                return
            samples = self._digest_samples(now.epoch, now.batch_in_epoch)
            parts = {"samples": samples} if samples else {}
            line = {"epoch": now.epoch, "batch": now.batch, **parts, **digests, **named, "values": values}
            self._write(self._path, line)

    def epoch_end(self, state: State, logger: Logger) -> None:
        before = state.previous_timestamp
        self._epochs = self._digest_samples(before.epoch, before.batch_in_epoch)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._path is not None and not self._path.exists() and not self._warned:
            log.warning(
                "%s.interval='%s': no digests, as training ended after batch %d; set a shorter one, such as '1ba'",
                self.config_key,
                self.interval.time,
                state.timestamp.batch,
            )

    def close(self, state: State, logger: Logger) -> None:
        if self._path is not None and self._path.exists():
            logger.log_artifact(self._path)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epochs = state["epochs"]

    def _digest_samples(self, epoch: int, batches: int) -> str:
        """Return a digest of the samples in earlier epochs and the first batches of this one; '' without an order."""
        if self._order is None:
            return ""
        hashed_epoch, hashed_batches = self._hashed
        if epoch != hashed_epoch or batches < hashed_batches:
            self._hash = blake2b(self._epochs.encode(), digest_size=16)
            hashed_batches = 0
        size = self._order.batch_size
        self._hash.update(self._order.permutation(epoch)[hashed_batches * size : batches * size].numpy().tobytes())
        self._hashed = epoch, batches
        return self._hash.hexdigest()

    def _write(self, path: Path, entry: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_digests(path, entry)
        except OSError as error:
            if not self._warned:
                log.warning("digests cannot be written to %s (%s): training continues without them", path, error)
            self._warned = True


def _is_last(state: State) -> bool:
    """Return whether the batch just trained completes `max_duration`; cheap, because it is called per batch."""
    now = state.timestamp
    end = state.max_duration
    if end.unit is TimeUnit.EPOCH:  # the epoch is counted only after BATCH_END
        return now.epoch + 1 == end.value and now.batch_in_epoch == state.train_dataloader_len
    return now.count(end.unit) >= end.value
