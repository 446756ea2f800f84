"""Load the splits of a Hugging Face data set, or describe them before they are downloaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runner.core.randomness import stream_seed
from runner.data.text.token_cache import state_of
from runner.data.text.windows import WindowSizes, check_eval_share, check_windows
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.files.values import HubName, LocalPath
from runner.libraries.hugging_face import import_hf

FROM_FILES = frozenset({"csv", "json", "parquet", "arrow", "text", "xml", "webdataset", "hdf5"})
FROM_FOLDERS = frozenset({"imagefolder", "audiofolder", "videofolder", "pdffolder"})


class Source(NamedTuple):
    """Where a data set comes from: the arguments of `datasets.load_dataset`, with `config` as its `name`."""

    name: str
    config: str | None
    data_files: Any
    data_dir: str | None


class Splits(NamedTuple):
    """The names of the splits to read, by argument."""

    split: str
    eval_split: str | None
    test_split: str | None

    def named(self) -> list[tuple[str, str]]:
        """Return the arguments that name a split, each with the name."""
        return [(key, split) for key, split in self._asdict().items() if split is not None]


@dataclass(frozen=True)
class SplitArguments(WindowSizes):
    """The arguments that say where the rows of a data set are, and how their texts become tokens.

    Args:
        name: a name on the Hub; a folder, such as one that `datasets` saved; or csv, json, parquet, imagefolder, ...
            with data_files or data_dir.
        config: the data set's configuration, such as wikitext-2-raw-v1; None is its default.
        data_files, data_dir: a file, a list of files, or a dict of them by split; or a folder to read whole.
        split, eval_split, test_split: splits to train, evaluate and test on, such as train or train[:10%]. Without an
            eval_split, rows of split are drawn by seed for evaluation; without a test_split there is no test loader.
        eval_share: share of the rows to draw for evaluation, in (0, 1); not used with an eval_split.
        tokenizer: a folder or a name on the Hub, for transformers' AutoTokenizer.
        added_tokens: texts that become tokens of the tokenizer, in this order, unless they already are.
        cache: folder in which tokens are cached; None tokenizes at each start, on each rank.
        seed: seed of the order, and of the rows drawn for evaluation.
    """

    name: HubName
    config: str | None = None
    data_files: LocalPath | Sequence[LocalPath] | Mapping[str, Any] | None = None
    data_dir: LocalPath | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_share: float = 0.1
    test_split: str | None = None
    _: KW_ONLY
    tokenizer: HubName | None = None
    added_tokens: Sequence[str] = ()
    cache: LocalPath | None = "~/.cache/exactrun/tokens"
    seed: int = 0

    def checked_source(self) -> tuple[Source, Splits]:
        """Check the arguments before anything is read, and return where the rows are."""
        check_windows(self)
        if self.eval_split is None:
            check_eval_share(self.eval_share)
        source = Source(self.name, self.config, self.data_files, self.data_dir)
        return source, Splits(self.split, self.eval_split, self.test_split)


class Part(NamedTuple):
    """Rows to train, evaluate or test on."""

    rows: Any
    identity: Any  # everything that the content of the rows depends on, as JSON values
    numbers: list[int] | None = None  # of the rows in their split, for messages; None: all rows, in order


def load_parts(source: Source, splits: Splits, eval_share: float, seed: int) -> list[Part]:
    """Return the rows to train and to evaluate on and, with a `test_split`, to test on.

    Without an `eval_split`, a share of the training rows, in (0, 1), is drawn by seed and held out for evaluation.

    Raises:
        OSError: the data set does not exist, or the Hub cannot be reached.
        ValueError: a split does not exist or has too few rows to hold some out, or `datasets` refuses an argument.
    """
    loaded = [load_split(source, key, split) for key, split in splits.named()]
    files = (state_of(file["filename"] for file in rows.cache_files) for rows in loaded)
    identities = [[rows._fingerprint, len(rows), state] for rows, state in zip(loaded, files, strict=True)]
    train, *held_out = map(Part, loaded, identities)
    return [train, *held_out] if splits.eval_split is not None else [*_divide(train, eval_share, seed), *held_out]


def _divide(part: Part, eval_share: float, seed: int) -> Iterator[Part]:
    """Draw the rows to hold out, and yield the rows to train on and then the held-out ones."""
    rows = part.rows
    count = _count_evaluated(len(rows), eval_share)
    generator = torch.Generator().manual_seed(stream_seed(seed, "eval_share"))
    order = torch.randperm(len(rows), generator=generator)
    for numbers, use in ((order[count:], "train"), (order[:count], "eval")):
        chosen = numbers.sort().values.tolist()
        yield Part(rows.select(chosen), [*part.identity, eval_share, seed, use], chosen)


def _count_evaluated(rows: int, eval_share: float) -> int:
    refuse_if(rows < 2, "eval_share", eval_share, f"the split has {rows} rows, too few to hold some out")
    return min(rows - 1, max(1, round(rows * eval_share)))


def load_split(source: Source, key: str, split: str, streaming: bool = False) -> Any:
    """Return the rows of a split, the argument `key`, after downloading and converting them if needed.

    With `streaming`, they are a `datasets.IterableDataset`, and nothing is downloaded or converted first.
    """
    datasets = import_hf("datasets")
    if is_saved(source.name):
        saved = datasets.load_from_disk(source.name)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise wrong_argument(key, split, f"name={source.name!r} has the splits {', '.join(saved)}")
            return saved[split].with_format(None)
        if key != "split":
            remedy = "eval_split=null takes a part of it" if key == "eval_split" else "leave test_split out"
            raise wrong_argument(key, split, f"name={source.name!r} has only one split; {remedy}")
        return saved.with_format(None)
    _check_files(source)
    with explained(source, key, split):
        return datasets.load_dataset(
            source.name,
            source.config,
            data_dir=source.data_dir,
            data_files=source.data_files,
            split=split,
            streaming=streaming,
        )


def is_saved(name: str) -> bool:
    """Return whether a folder holds a data set that `datasets` saved."""
    return any(Path(name, file).is_file() for file in ("dataset_dict.json", "state.json"))


def _check_files(source: Source) -> None:
    if source.data_files is None and source.data_dir is None and source.name in FROM_FILES | FROM_FOLDERS:
        raise ValueError(f"data_files=None: name={source.name!r} needs data_files=<paths> or data_dir=<folder>")


@contextmanager
def explained(source: Source, key: str, split: str) -> Iterator[None]:
    """Turn errors of `datasets` into one sentence, with the name of a broken file."""
    logged = _LastError(logging.ERROR)  # the exception lacks the name
    logger = logging.getLogger("datasets")
    logger.addHandler(logged)
    try:
        yield
    except Exception as error:  # of many kinds: its own, pyarrow's, the network's
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        reason = " ".join((logged.message or str(cause)).split()) or type(cause).__name__
        reason = "it has no rows" if isinstance(cause, StopIteration) else reason
        if isinstance(error, ValueError) and ("nknown split" in reason or "Bad split" in reason):
            raise wrong_argument(key, split, reason.rstrip(".")) from error
        kind = OSError if isinstance(cause, OSError) else ValueError
        raise kind(f"name={source.name!r}: datasets cannot load it: {reason[:400].rstrip('.')}") from error
    finally:
        logger.removeHandler(logged)


class _LastError(logging.Handler):
    """Keeps the message of the last error that was logged."""

    message = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()


def describe(source: Source, splits: Splits, eval_share: float, text: str | None) -> tuple[Any, list[int], list[float]]:
    """Return (features, numbers of rows, mean sizes of a row in bytes); the lists are for training, evaluation, test.

    The data set is downloaded and converted only if its description lacks any of this; a local data set is read.
    """
    info = None if is_saved(source.name) else _description(source, splits.split)
    names = [name for _, name in splits.named()]
    if info is not None and all(name in info.splits for name in names):
        features = info.features
        counts = [info.splits[name].num_examples for name in names]
        sizes = [info.splits[name].num_bytes / max(1, info.splits[name].num_examples) for name in names]
    else:
        loaded = [load_split(source, key, split) for key, split in splits.named()]
        features = loaded[0].features
        counts = [len(rows) for rows in loaded]
        if text is not None:
            check_text(features, text)
        sizes = [0.0 if text is None else _mean_length(rows.data.column(text)) for rows in loaded]
    if splits.eval_split is None:
        count = _count_evaluated(counts[0], eval_share)
        counts = [counts[0] - count, count, *counts[1:]]
        sizes = [sizes[0], *sizes]
    return features, counts, sizes


def _description(source: Source, split: str) -> Any:
    """Return the description of a data set that has not been downloaded; None if it is downloaded or incomplete."""
    _check_files(source)
    with explained(source, "split", split):
        builder = import_hf("datasets").load_dataset_builder(
            source.name, source.config, data_dir=source.data_dir, data_files=source.data_files
        )
    info = builder.info
    return info if info.features and info.splits and not os.path.isdir(builder.cache_dir) else None


def _mean_length(texts: Any) -> float:
    """Return the mean length of a text in a column, in bytes."""
    compute = import_hf("pyarrow.compute")
    return (compute.sum(compute.binary_length(texts)).as_py() or 0) / max(1, len(texts))


def check_text(features: Mapping[str, Any], text: str) -> None:
    """Raise ValueError if the column `text` does not exist or holds no texts."""
    refuse_if(text not in features, "text", text, f"no such column; the columns are {', '.join(features)}")
    if getattr(features[text], "dtype", None) not in ("string", "large_string"):
        raise wrong_argument("text", text, f"must be a column of texts; this one holds {features[text]}")
