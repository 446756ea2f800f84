"""Keeps the loss of every sample, to find samples that are learned late, forgotten, or mislabeled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.callbacks._disk import disk_errors_reported
from runner.callbacks._texts import Bytes, check_tokenizer
from runner.failures.checks import check_number, check_whole
from runner.files.whole import write_atomically
from runner.libraries.extras import require

if TYPE_CHECKING:
    from torch import Tensor

    from runner import Logger, State
    from runner.callbacks._sample_history import History
    from runner.data.order import SampleOrder

COLUMNS = ("sample", "label", "prediction", "mean_loss", "last_loss", "learned", "forgotten", "text")
MAX_ROWS = 1000  # of the table; the files have all samples
BLENDS = {"MixUp", "CutMix"}  # no loss belongs to a single sample


class SampleLedger(Callback):
    """Keeps the loss of every training sample in every epoch, and names the samples that are likely mislabeled.

    Losses are measured in training, before each batch's step, with augmentation and the true targets, by computing the
    model's loss once more. A sample is identified by its index in the training data, on any number of ranks and after
    any resume. The device keeps 12 bytes per sample for the current epoch, the host 36 for all epochs; the host waits
    for the device once per epoch.

    Files go to a folder named after the config key, in the run's folder: `epoch-0001.parquet` and so on have the loss
    of each sample in an epoch and, for classes, its prediction. `samples.parquet`, written at the end, has a row for
    each sample with its mean and last loss and, for classes, the epoch in which it was first predicted correctly
    (`learned`, from 1; 0 means never) and how often a correct prediction was wrong in the next epoch (`forgotten`). A
    low mean loss means that a sample was learned fast. The samples with the highest mean loss are the suspects: they
    are mislabeled, or hard.

    Args:
        suspects: share of the samples to name as suspects, in (0, 1].
        num_shown: number of suspects whose picture or text is logged, at least 0.
        tokenizer: object with `encode(text) -> list of int` and `decode(list of int) -> text`; None takes bytes as
            tokens.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: an argument is out of range; or, at FIT_START, the train dataloader has no `order`, an algorithm
            blends or leaves out samples, or the checkpoint belongs to other data; or, in training, a batch has more or
            fewer samples than the order says.

    Logs:
        sample_ledger: a table of the first 1000 suspects, most suspect first; named after the config key.
        sample_ledger/suspects: pictures of the first `num_shown` suspects with their labels and predictions, if
            the data has images.
    """

    def __init__(self, suspects: float = 0.02, num_shown: int = 16, tokenizer: Any = None) -> None:
        check_number("suspects", suspects, "(0, 1]", "a share of the samples")
        check_whole("num_shown", num_shown, 0)
        check_tokenizer(tokenizer)
        require("SampleLedger", None, "pyarrow")
        self.suspects = suspects
        self.num_shown = num_shown
        self.tokenizer = tokenizer or Bytes()
        self._history: History = {}
        # For this epoch, by position in its order: the loss; the prediction + 1, or 0 if not seen; the label.
        self._losses: Any = None
        self._classes: Any = None
        self._gathered: tuple[Tensor, Tensor] | None = None
        self._predicts: bool | None = None  # whether the model predicts classes; None before the first batch

    def fit_start(self, state: State, logger: Logger) -> None:
        import torch

        from runner.callbacks._sample_history import new_history

        self._order = _get_order(state)
        count = self._order.num_samples
        if not self._history:
            self._history = new_history(count)
            self._losses = torch.zeros(count)
            self._classes = torch.zeros(2, count, dtype=torch.int32)
        if len(self._losses) != count:
            raise ValueError(
                f"SampleLedger: the checkpoint has losses of {len(self._losses)} samples, but the data have {count}; "
                "resume with the same data"
            )
        self._losses = self._losses.to(state.device)
        self._classes = self._classes.to(state.device)

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._losses.zero_()
        self._classes.zero_()

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._first, end = self._order.span(state.timestamp.batch_in_epoch)
        if (num_samples := state.unwrapped_model.num_samples(state.batch)) != end - self._first:
            raise ValueError(
                f"SampleLedger: the batch has {num_samples} samples instead of {end - self._first}, so an "
                "algorithm split them differently; remove one of the two"
            )

    def after_loss(self, state: State, logger: Logger) -> None:
        if state.batch_is_padding:
            return
        import torch

        from runner.models.sample_losses import sample_losses

        model = state.unwrapped_model
        with torch.no_grad():
            measure = state.precision.autocast(state.device)(sample_losses)
            losses = measure(model, state.outputs, state.microbatch)
            first = self._first + state.microbatch_start
            positions = slice(first, first + len(losses))
            self._losses[positions] = losses
            self._classes[0, positions] = 1
            if self._predicts is not False:
                classes = _predicted_and_true_classes(model, state)
                self._predicts = classes is not None
                if classes is not None:
                    self._classes[0, positions] += classes[0]
                    self._classes[1, positions] = classes[1]

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._close_epoch(state, state.timestamp.epoch - 1)

    def fit_end(self, state: State, logger: Logger) -> None:
        from runner import get_global_rank

        completed_epochs = self._history
        if state.timestamp.batch_in_epoch:  # training may continue in this epoch, so it counts for this table only
            self._close_epoch(state, state.timestamp.epoch)
        if get_global_rank() == 0 and bool((self._history["epochs"] > 0).any()):
            self._report(state, logger)
        self._history = completed_epochs if state.timestamp.batch_in_epoch else self._history

    def gather_state(self) -> None:
        self._gathered = None if self._losses is None else self._sum_over_ranks()

    def state_dict(self) -> dict[str, Any]:
        if self._losses is None:
            return {}
        losses, classes = self._gathered or (self._losses, self._classes)
        self._gathered = None
        return {"history": self._history, "losses": losses, "classes": classes, "predicts": self._predicts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import torch

        from runner import get_global_rank

        self._history = state["history"]
        self._losses = state["losses"]
        self._classes = state["classes"]
        self._predicts = state["predicts"]
        if get_global_rank() != 0:  # rank 0 has the sums over all ranks, and they are summed again
            self._losses = torch.zeros_like(self._losses)
            self._classes = torch.zeros_like(self._classes)

    def _sum_over_ranks(self) -> tuple[Tensor, Tensor]:
        """Return the losses and classes of this epoch, each sample from the rank that saw it. Call it on all ranks."""
        from runner.distributed.collectives import all_reduce_sum

        return all_reduce_sum(self._losses.clone()), all_reduce_sum(self._classes.clone())

    def _close_epoch(self, state: State, epoch: int) -> None:
        """Add an epoch, numbered from 0, to the history, and write its file. Call it on all ranks."""
        import torch

        from runner import get_global_rank
        from runner.callbacks._sample_history import add_epoch

        sums = self._sum_over_ranks()
        losses, classes = (values.cpu() for values in sums)  # the intended host-device sync, once per epoch
        positions = self._order.permutation(epoch).argsort()
        losses = losses[positions]
        classes = classes[:, positions]
        seen = classes[0] > 0
        classes[0] -= 1
        self._history = add_epoch(self._history, losses, classes if self._predicts else None, seen, epoch + 1)
        if get_global_rank() == 0:
            columns = {"sample": torch.arange(len(losses)), "loss": losses}
            columns |= {"prediction": classes[0]} if self._predicts else {}
            with disk_errors_reported(self.config_key):
                path = self._folder(state) / f"epoch-{epoch + 1:04}.parquet"
                write_atomically(path, _as_parquet({name: column[seen] for name, column in columns.items()}))

    def _report(self, state: State, logger: Logger) -> None:
        """Write and log the findings from the history. Rank 0."""
        import torch

        from runner.callbacks._sample_history import find_suspects, mean_losses
        from runner.pictures.samples import find_images, make_captions, to_pictures

        history = self._history
        class_columns = ("label", "prediction", "learned", "forgotten") if self._predicts else ()
        columns = {"sample": torch.arange(len(history["epochs"])), "mean_loss": mean_losses(history)}
        columns |= {"last_loss": history["last"], **{name: history[name] for name in class_columns}}
        with disk_errors_reported(self.config_key):
            path = self._folder(state) / "samples.parquet"
            write_atomically(path, _as_parquet(columns | {"epochs": history["epochs"]}))
            logger.log_artifact(path, self.config_key)
        suspects = find_suspects(history, self.suspects)
        named = suspects[:MAX_ROWS]
        rows = {name: column[named].tolist() for name, column in columns.items()}
        shown = named[: self.num_shown]
        loader: Any = state.train_dataloader
        if len(shown) and hasattr(loader, "pick"):
            batch = loader.pick(shown)
            if (images := find_images(batch)) is not None:
                captions = make_captions({name: rows[name] for name in class_columns[:2]}, rows["sample"])
                pictures = to_pictures(images)
                logger.log_images(pictures, f"{self.config_key}/suspects", captions=captions[: len(shown)])
            elif (texts := _texts(batch, self.tokenizer)) is not None:
                rows["text"] = texts + [""] * (len(named) - len(texts))
        names = [name for name in COLUMNS if name in rows]
        logger.log_table(names, [[*row] for row in zip(*(rows[name] for name in names), strict=True)], self.config_key)

    def _folder(self, state: State) -> Path:
        return state.run_dir / self.config_key


def _get_order(state: State) -> SampleOrder:
    """Return the order of the training samples, each of which must have its own loss."""
    order = getattr(state.train_dataloader, "order", None)
    if order is None:
        raise ValueError(
            f"SampleLedger needs to know which samples make up a batch, but the train dataloader "
            f"({type(state.train_dataloader).__name__}) has no `order`: use one of runner.data, such as DatasetLoader"
        )
    for algorithm in state.algorithms:
        if algorithm.picks_samples or type(algorithm).__name__ in BLENDS:
            does = "leaves out samples" if algorithm.picks_samples else "blends samples"
            name = type(algorithm).__name__
            raise ValueError(f"SampleLedger needs the loss of each sample, but {name} {does}: remove one")
    return order


def _predicted_and_true_classes(model: Any, state: State) -> tuple[Tensor, Tensor] | None:
    """Return the predicted class and the label (n,) of each sample of the microbatch; None if there are no classes."""
    try:
        predictions = model.predictions(state.microbatch, state.outputs)
    except (TypeError, ValueError, LookupError):
        return None
    pair = predictions.get("prediction"), predictions.get("target")
    if any(classes is None or classes.ndim != 1 or classes.is_floating_point() for classes in pair):
        return None
    return pair


def _as_parquet(columns: dict[str, Tensor]) -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    sink = pyarrow.BufferOutputStream()
    write_table(pyarrow.table({name: column.numpy() for name, column in columns.items()}), sink)
    return sink.getvalue().to_pybytes()


def _texts(batch: Any, tokenizer: Any) -> list[str] | None:
    """Return the texts of a batch's first tensor of tokens (N, T); None if it has no tokens."""
    from runner.device.batch import tensors

    candidates = (tensor for tensor in tensors(batch) if tensor.ndim == 2 and not tensor.is_floating_point())
    tokens = next(candidates, None)
    return None if tokens is None else [tokenizer.decode(sequence) for sequence in tokens.tolist()]
