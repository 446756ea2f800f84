"""Saves checkpoints of the run, and keeps the newest ones and the best by a metric."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Callback, Interval, Time, Timestamp
from runner.callbacks._checkpoint_folder import CheckpointFolder, check_alone, check_names
from runner.callbacks._mirror_uploads import MirrorUploads
from runner.callbacks._soundness import find_fault
from runner.failures.checks import check_flag, check_number, check_one_of, check_whole, refuse_if
from runner.files.addresses import without_credentials
from runner.files.values import Address, InnerPath
from runner.libraries.remote_files import check_address
from runner.training.metric_choice import MetricChoice, choose_metric

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from runner import Logger, State
    from runner.checkpoints.copies import Copies

log = logging.getLogger("runner")


class CheckpointSaver(Callback):
    """Saves checkpoints at an interval and at the end of training, and keeps the newest and the best.

    A checkpoint is a folder that is either complete or absent; the links `latest` and `best` next to it point to
    complete ones. The last checkpoint of a run is written at FIT_END, with the final metrics. After a signal there is a
    checkpoint of the batch at which training stopped; after an error there is one of the batch before it, unless
    weights, buffers or metrics were already changed. If a callback fails at the end of an epoch, the checkpoint is of
    the last batch, and a resumed run says which callbacks missed that event. A full disk gives a warning, and training
    continues to the next interval; only a failure to write the last checkpoint of the run is an error. No checkpoint is
    written while the loss of its batch or a weight is NaN or infinite, so `latest` and `best` stay as they were.

    Args:
        save_interval: how often to save, as a time string or a number of epochs; 0 saves only at the end.
        folder: folder inside the run's folder; each saver needs its own.
        filename: name of a checkpoint, with any field of `Timestamp` in braces.
        keep: number of newest checkpoints to keep, at least 1 (the disk needs room for one more); -1 keeps all.
        monitor: metric that ranks checkpoints, such as 'MulticlassAccuracy' or, with its label,
            'eval/MulticlassAccuracy'. Only a value measured with the saved weights counts. None means no best
            checkpoint.
        mode: 'min' if lower values are better, 'max' if higher ones are; None means 'min' for losses, errors and
            metrics that declare it.
        keep_best: number of best checkpoints to keep, at least 1.
        weights_only: whether to leave out what only a resumed run needs.
        overwrite: whether a new run may start in a folder that holds another run's checkpoints; a resumed run always
            replaces its own.
        asynchronous: whether to copy to CPU memory and write on a background thread while training continues. The
            memory of the copy is kept for the next save, which then takes a third of the time.
        sharded: whether each rank writes its part of a sharded model to a folder that all ranks share; False lets rank
            0 write the whole model. None shards if the whole model would take more than half of the free memory of
            rank 0's machine.
        mirror: address of a folder, such as 's3://bucket/runs', to which checkpoints are uploaded in the background,
            with the run's record, so that `runner resume s3://bucket/runs/<run_name>` continues the run elsewhere.
            Rank 0 uploads, and reads its uploads back. The mirror also keeps the newest and the best. Training does not
            wait for uploads, and a failed one is only a warning. None means no mirror.
        mirror_timeout: maximum seconds that the end of the run waits for the mirror.

    Raises:
        ValueError: an argument is out of range, another saver has this folder or mirror, or, at FIT_START, the run has
            no metric named `monitor`; or, at AFTER_LOAD, `sharded` is True on several ranks without a sharded model.
        ImportError: the package for the protocol of `mirror` is not installed.
        OSError: at AFTER_LOAD, the folder holds another run's checkpoints, or a file or folder where a link belongs; at
            FIT_END, the last checkpoint cannot be written.
    """

    def __init__(
        self,
        save_interval: str | int | Time = "1ep",
        folder: InnerPath = "checkpoints",
        filename: InnerPath = "ep{epoch}-ba{batch}",
        keep: int = 3,
        monitor: str | None = None,
        mode: str | None = None,
        keep_best: int = 1,
        weights_only: bool = False,
        overwrite: bool = False,
        asynchronous: bool = False,
        sharded: bool | None = None,
        mirror: Address | None = None,
        mirror_timeout: float = 300.0,
    ) -> None:
        refuse_if(keep < 1 and keep != -1, "keep", keep, "must be at least 1, or -1 for all")
        check_one_of("mode", mode, (None, "min", "max"))
        check_whole("keep_best", keep_best, 1)
        check_flag("sharded", sharded, "decides by the memory of rank 0")
        check_names(folder, filename)
        if mirror is not None:
            check_address("mirror", mirror)
        check_number("mirror_timeout", mirror_timeout, "[0, inf]", "a number of seconds")
        self.interval = Interval(save_interval, "save_interval")
        self.folder = folder
        self.filename = filename
        self.monitor = monitor
        self.mode = mode
        self.weights_only = weights_only
        self.overwrite = overwrite
        self.asynchronous = asynchronous
        self.sharded = sharded
        self.mirror = mirror
        self.mirror_timeout = mirror_timeout
        self._uploads: MirrorUploads | None = None
        self._checkpoints = CheckpointFolder(Path(folder), keep, keep_best)
        self._metric: MetricChoice | None = None
        self._last_attempt = Timestamp(batch=-1)
        self._writer: ThreadPoolExecutor | None = None
        self._pending_write: Future[None] | None = None
        self._group: ProcessGroup | None = None  # of the ranks that write in the background
        self._copies: Copies | None = None  # buffers for background writes
        self._failure: OSError | None = None  # why the newest checkpoint was not written
        self._fault: str | None = None  # which of its values was not finite

    @property
    def latest(self) -> Path | None:
        """Path of the newest complete checkpoint; None before the first."""
        return self._checkpoints.latest

    @property
    def best_checkpoint(self) -> Path | None:
        """Path of the best checkpoint by `monitor`; None if no checkpoint has been ranked. Read it on rank 0."""
        best = self._checkpoints.best
        return self._checkpoints.path / best[0][1] if best else None

    @property
    def mirrored_at(self) -> str | None:
        """Address from which the run can be resumed elsewhere, without credentials; None before the first upload."""
        uploads = self._uploads
        return without_credentials(uploads.address) if uploads is not None and uploads.newest is not None else None

    def after_load(self, state: State, logger: Logger) -> None:
        from runner import get_world_size
        from runner.distributed.sharding import is_sharded

        savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
        check_alone(savers)
        if self.sharded and get_world_size() > 1 and not is_sharded(state.unwrapped_model):
            raise ValueError(
                "sharded=True: each rank has the whole model; set trainer.parallel=fsdp, or set sharded=null"
            )
        self._checkpoints.path = state.run_dir / self.folder
        self._checkpoints.check_links()
        if state.resumed_from is None and not self.overwrite and self.latest is not None:
            reason = "holds another run's checkpoints: resume it, or set overwrite to true"
            raise FileExistsError(f"folder={str(self._checkpoints.path)!r} {reason}")
        if self.mirror is not None:
            self._uploads = MirrorUploads(self.mirror, state, self._checkpoints.keep, self.overwrite)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.monitor is not None:
            self._metric = choose_metric(state, self.monitor)
            self.mode = self.mode or ("min" if self._metric.lower_is_better(state) else "max")
        self._checkpoints.forget_missing()
        if state.timestamp.batch < self._last_attempt.batch:  # time was reset
            self._last_attempt = Timestamp(batch=-1)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.is_due(self.interval):
            self._save_before_end(state, logger)

    epoch_checkpoint = iteration_checkpoint = batch_checkpoint

    def fit_end(self, state: State, logger: Logger) -> None:
        # If the end of an epoch stopped training, its last batch may have been saved already, but without the metrics.
        if self._last_attempt != state.timestamp:
            self._save(state, logger)
        self._wait()
        if self._failure is not None:
            raise OSError("the run's last checkpoint was not written: make room, then resume") from self._failure

    def close(self, state: State, logger: Logger) -> None:
        from runner import can_save_on_this_rank

        # After a signal all ranks have stopped after the same batch; after an error others may be anywhere, or gone.
        ranks_agree = state.error is not None and (state.ended_between_batches or can_save_on_this_rank(state))
        try:
            if ranks_agree and self._last_attempt.batch != state.timestamp.batch:
                self._save(state, logger)
        finally:
            self._wait()
            self._copies = None
            if self._uploads is not None:
                self._uploads.finish(self.mirror_timeout)

    def state_dict(self) -> dict[str, Any]:
        return self._checkpoints.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._checkpoints.load_state_dict(state)

    def _save_before_end(self, state: State, logger: Logger) -> None:
        if self._last_attempt.batch == state.timestamp.batch:
            return
        # The last checkpoint is left to FIT_END, where the final metrics are known.
        if not state.stop_requested and state.get_elapsed_duration() < "1dur":
            self._save(state, logger)

    def _save(self, state: State, logger: Logger) -> None:
        from runner import capture
        from runner.checkpoints.copies import Copies
        from runner.distributed.together import make_group

        self._wait()
        logger.flush()  # a resumed run does not repeat what came before, so it must be logged by now
        self._last_attempt = state.timestamp
        name = self.filename.format(**state.timestamp._asdict())
        score = self._metric.score(state, lower_is_better=self.mode == "min") if self._metric is not None else None
        self._checkpoints.add(name, score)
        if self.asynchronous:
            self._copies = self._copies or Copies()
            self._copies.reuse()
        snapshot = capture(state, self.weights_only, self._copies, self.sharded)
        if snapshot is not None:  # rank 0, or all ranks
            if self.asynchronous and "layouts" in snapshot and self._group is None:
                self._group = make_group()
            trained = {key for key, weight in state.unwrapped_model.named_parameters() if weight.requires_grad}
            self._writer = self._writer or _make_writer()
            self._pending_write = self._writer.submit(self._write, snapshot, name, trained, _last_loss(state))
        if not self.asynchronous:
            self._wait()

    def _write(self, snapshot: dict[str, Any], name: str, trained: set[str], loss: float) -> None:
        import torch.distributed as dist

        from runner import get_global_rank
        from runner.distributed.together import gather_objects

        if self.asynchronous and "layouts" in snapshot:
            dist.barrier(self._group)  # the work that follows would slow down ranks that are still copying
        previous_fault = self._fault
        fault = find_fault(snapshot, trained, loss)
        if "layouts" in snapshot:  # each rank has checked its part
            fault = next(filter(None, gather_objects(fault, self._group)), None)
        self._fault = fault
        if fault is not None:
            self._checkpoints.take_back()
            if previous_fault is None and get_global_rank() == 0:
                path = self._checkpoints.path / name
                message = "checkpoint %s was not written: %s; newest checkpoint: %s"
                log.warning(message, path, fault, self.latest or "none")
            return
        previous_failure = self._failure
        self._failure = None
        try:
            self._checkpoints.write(snapshot, name, self._group)
        except OSError as error:
            self._failure = error
            if (previous_failure is None or error.errno != previous_failure.errno) and get_global_rank() == 0:
                log.warning("checkpoint %s was not written: %s", self._checkpoints.path / name, error)
            return
        if self._uploads is not None and get_global_rank() == 0:
            best = [best_name for _, best_name in self._checkpoints.best]
            self._uploads.add(name, self.folder, self._checkpoints.saved, best)

    def _wait(self) -> None:
        if self._pending_write is not None:
            self._pending_write.result()


def _make_writer() -> ThreadPoolExecutor:
    """Return a thread in which torch computes on one core.

    A second team of OpenMP threads makes libgomp put the first to sleep between any two operations: with the default
    experiment on two cores, training took twice as long after the first checkpoint.
    """
    import torch

    writer = ThreadPoolExecutor(1, "checkpoint")
    cores = writer.submit(torch.get_num_threads).result()  # read on that thread, because its first use sets the number
    writer.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(cores)  # for this thread and those that start later
    return writer


def _last_loss(state: State) -> float:
    """Return the loss of the last trained batch, or 0 if it is unknown. The intended host-device sync."""
    belongs_to_a_later_batch = state.error is not None and not state.ended_between_batches
    is_known = not belongs_to_a_later_batch and state.device.type != "meta"
    return float(getattr(state, "total_loss", 0.0)) if is_known else 0.0
