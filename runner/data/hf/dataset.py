"""Any data set of Hugging Face's library `datasets`: from the Hub, from files, or saved by it.

With `text`, a column of texts, batches are those of `runner.data.text.text_files.load_text_files`: int64
`(inputs, targets)` of `(N, context)`, in which each row is a document, and the tokens are kept in `cache`.

With `inputs` and `targets`, two columns, batches are `(inputs, targets)`. Whole numbers, truth values, class labels
and names of classes become int64, other numbers float32, both `(N,)`; lists of equal length have further dimensions.
Images become float32 `(N, 3, H, W)`: red, green and blue, normalized by ImageNet's mean and deviation, resized until
the shorter side has image_size pixels, and cropped to the center. There is no augmentation here.

With columns of texts as `inputs`, and a tokenizer, batches are mappings for models of transformers: int64 `input_ids`
and `attention_mask` `(N, T)`, what else the tokenizer makes, and `labels`. T is the length of the longest sample in the
batch, at most `context`; the labels of padding are -100, which no loss counts. `task` says what the labels are:

- sequence_classification: the targets, `(N,)`; inputs are one text, or two that form a pair.
- token_classification: inputs are lists of words and targets lists of their classes; the first token of a word has the
  word's class, `(N, T)`, the others -100.
- masked_lm: the tokens that are hidden, 15 % as for BERT, `(N, T)`; there are no targets. Which are hidden depends on
  seed, epoch and row alone, and in evaluation on seed and row.
- causal_lm: the tokens themselves, `(N, T)`; there are no targets, and each row is a separate sample.
- seq2seq_lm: the tokens of the text in targets, `(N, T')`.

`datasets` caches its downloads and conversions in its own folder (`HF_HOME`), and its locks let one process do
that while others wait. Batches are found by their number, so streaming is not possible.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from runner.data.fake import FakeLoader, data_function
from runner.data.hf.columns import Columns, class_names, fake_batches, holds_texts, is_text, largest_label, undecoded
from runner.data.hf.splits import Part, Source, Splits, check_text, describe, load_parts, load_split
from runner.data.hf.texts import NAMED, TASKS, Encoder, Texts, check_columns, check_task, text_columns
from runner.data.loaders import DatasetLoader, OrderedLoader
from runner.data.text.packing import document_ends, end_token, packed_loaders
from runner.data.text.token_cache import TokenCache
from runner.data.text.tokenizer import BYTES_PER_TOKEN, Tokenizer, load_tokenizer
from runner.data.text.windows import WindowSizes, check_eval_share, check_windows, fake_window_loaders, window_loaders
from runner.distributed.ranks import get_global_rank
from runner.failures.checks import check_whole, refuse_if
from runner.files.values import HubName, LocalPath
from runner.libraries.hugging_face import bars_on_terminals

log = logging.getLogger("runner")


@dataclass(frozen=True)
class HFDataset(WindowSizes):
    """Return a training, an evaluation and perhaps a test loader; the top of this file describes their batches.

    Args:
        name: on the Hub; csv, json, parquet, imagefolder, ... with data_files or data_dir; a folder, also a saved one.
        config: which of the data set's configurations, such as wikitext-2-raw-v1; None is its default one.
        data_files, data_dir: files: a path, a list of them, or a dict of them by split; or a folder to read whole.
        split, eval_split, test_split: to train, evaluate and test on, such as train or train[:10%]; None keeps a part
            of the rows of split for evaluation, drawn by seed, and there is no test loader.
        eval_share: share of the rows that is kept for evaluation, in (0, 1); not used with an eval_split.
        text: a column of texts, for language modelling.
        inputs, targets: columns of numbers, lists of equal length, images or labels; or of texts, as `task` says.
        classes: names of the classes in order, if targets are names, including those only in other data; None: sorted.
        tokenizer: tokenizer for texts: a folder or a name on the Hub, for transformers' AutoTokenizer; None: bytes.
        pack_documents: whether rows of `text` stay whole, with a tokenizer; see `PackedWindows`.
        task: task of the model, for texts with a tokenizer; None is 'sequence_classification'.
        context: window length for `text`, or maximum length of a sample for inputs that are texts, in tokens.
        eval_tokens: maximum number of tokens of `text` to evaluate; None evaluates all.
        cache: folder in which tokens of `text` are cached; None tokenizes at each start, on each rank.
        image_size: height and width of images, in pixels; None leaves them as they are.
        batch_size, eval_batch_size: windows or samples in a batch to train, or to evaluate and test, of all ranks.
        num_workers: processes that read inputs and targets on each rank; 0 reads in this process.
        seed: seed of the order, and of the rows that are kept for evaluation.

    Raises:
        OSError, ModuleNotFoundError, ValueError: data or a library cannot be found, or an argument does not fit them.
    """

    name: HubName = "Salesforce/wikitext"
    config: str | None = None
    data_files: LocalPath | Sequence[LocalPath] | Mapping[str, Any] | None = None
    data_dir: LocalPath | None = None
    split: str = "train"
    eval_split: str | None = "validation"
    eval_share: float = 0.1
    test_split: str | None = None
    text: str | None = None
    inputs: str | Sequence[str] | None = None
    targets: str | None = None
    classes: Sequence[str] | None = None
    tokenizer: HubName | None = None
    pack_documents: bool = False
    task: str | None = None
    cache: LocalPath | None = "~/.cache/exactrun/tokens"
    image_size: int | None = None
    num_workers: int = 2
    seed: int = 0

    def load(self) -> tuple[OrderedLoader, ...]:
        """Return the loaders."""
        columns, source, splits, encoder = self._check()
        with bars_on_terminals("datasets", "huggingface_hub"):
            parts = load_parts(source, splits, self.eval_share, self.seed)
            if self.text is not None:
                tokens = [_tokenize(part, self.text, encoder, self.cache) for part in parts]
                if not self.pack_documents:
                    return window_loaders(tokens, self.seed, self)
                ends = [document_ends(part, end_token(encoder)) for part in tokens]
                key = [encoder.identity, self.text, [part.identity for part in parts]]
                return packed_loaders(tokens, ends, self, TokenCache(self.cache), key, self.seed)
            train, *others = _data_sets(parts, columns)
        shared: dict[str, Any] = {"seed": self.seed, "num_workers": self.num_workers, "collate_fn": train.stack}
        if isinstance(train, Columns):
            shared["transform"] = train.normalize  # in training on a GPU it runs there
        return (
            DatasetLoader(train, self.batch_size, shuffle=True, **shared),
            *(DatasetLoader(part, self.eval_batch_size, shuffle=False, **shared) for part in others),
        )

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return stand-ins for the loaders, made from the descriptions of the data."""
        columns, source, splits, encoder = self._check()
        with bars_on_terminals("datasets", "huggingface_hub"):
            features, counts, row_sizes = describe(source, splits, self.eval_share, self.text)
            if self.text is not None:
                check_text(features, self.text)
                size = 1 if self.tokenizer is None else BYTES_PER_TOKEN
                totals = (count * mean / size for count, mean in zip(counts, row_sizes, strict=True))
                tokens = [max(round(total), 2 * self.context) for total in totals]
                return fake_window_loaders(tokens, encoder.vocab_size, self, self.pack_documents)
            make = _fake_samples(features, columns, source, splits)
        train, *others = counts
        return FakeLoader(make, train, self.batch_size), *(
            FakeLoader(make, one, self.eval_batch_size) for one in others
        )

    def _check(self) -> tuple[_Columns, Source, Splits, Tokenizer]:
        """Check the arguments before anything is read; the tokenizer is that of text to continue."""
        columns = self._columns()
        check_windows(self)
        if self.eval_split is None:
            check_eval_share(self.eval_share)
        encoder = load_tokenizer(None if self.text is None else self.tokenizer)
        if self.pack_documents:
            end_token(encoder)
        source = Source(self.name, self.config, self.data_files, self.data_dir)
        return columns, source, Splits(self.split, self.eval_split, self.test_split), encoder

    def _columns(self) -> _Columns:
        """Check the arguments that say what a sample is, and return them."""
        check_whole("image_size", self.image_size, 1, "a number of pixels", none="images as they are")
        given = self.inputs
        read = [] if given is None else [given] if isinstance(given, str) else [*given]
        fits = (self.targets or self.task is not None) if read else not self.targets
        if bool(self.text) == bool(read) or not fits:
            raise ValueError(
                f"text={self.text!r}, inputs={given!r}, targets={self.targets!r}: give text, a column for language "
                "modelling, or both inputs and targets"
            )
        refuse_if(len(read) > 2, "inputs", read, "must be one column, or two columns of texts")
        task = TASKS[0] if self.text else check_task(self.task, read, self.targets, self.classes, self.tokenizer)
        return _Columns(read, self.targets, self.classes, self.tokenizer, self.image_size, task, self.context)


load_hf_dataset = data_function("load_hf_dataset", HFDataset)


class _Columns(NamedTuple):
    """What a sample is; of a language model on `text`, `inputs` is empty."""

    inputs: list[str]
    targets: str | None
    classes: Sequence[str] | None
    tokenizer: str | None
    image_size: int | None
    task: str
    context: int


def _fake_samples(features: Mapping[str, Any], columns: _Columns, source: Source, splits: Splits) -> Any:
    """Return `make(n)` -> a batch of n samples that look like those of `_data_sets`."""

    def first() -> Mapping[str, Any]:
        return undecoded(load_split(source, "split", splits.split))[0]

    is_text_data = _is_text_data(features, columns)
    feature = features.get(str(columns.targets))
    names = columns.classes
    if columns.task in NAMED and (names is not None or is_text(feature) or holds_texts(feature)):
        parts = [load_split(source, key, one) for key, one in splits._asdict().items() if one is not None]
        names = _classes(parts, columns)
    whole = {"targets": str(columns.targets)}
    if not is_text_data:
        return fake_batches(features, {"inputs": columns.inputs[0], **whole}, columns.image_size, first, names)
    encode = Encoder(str(columns.tokenizer), columns.context, columns.task)
    if columns.task != TASKS[0]:
        return encode.fake(len(columns.inputs), largest_label(feature, names))
    make_labels = fake_batches(features, whole, None, first, names)
    return encode.fake(len(columns.inputs), lambda samples: make_labels(samples)[0])


def _classes(parts: Sequence[Any], columns: _Columns) -> list[str] | None:
    """Return the names of the classes in order; None if the targets are no names."""
    if columns.task not in NAMED:
        return None
    return class_names(parts, str(columns.targets), columns.classes)


def _is_text_data(features: Mapping[str, Any], columns: _Columns) -> bool:
    """Return whether the inputs are texts, for a tokenizer, after checking that the columns fit the task."""
    if columns.task == TASKS[0]:
        return text_columns(features, columns.inputs, columns.tokenizer)
    check_columns(features, columns.task, columns.inputs, columns.targets)
    return True


def _data_sets(parts: Sequence[Part], columns: _Columns) -> list[Any]:
    """Return the samples of each part."""
    is_text_data = _is_text_data(parts[0].rows.features, columns)
    names = _classes([part.rows for part in parts], columns)
    if names is not None and get_global_rank() == 0:
        log.info("classes: %s", ", ".join(f"{number}={name}" for number, name in enumerate(names)))
    whole = {"targets": str(columns.targets)}
    if not is_text_data:
        both = {"inputs": columns.inputs[0], **whole}
        return [Columns(part.rows, both, columns.image_size, names) for part in parts]
    encode = Encoder(str(columns.tokenizer), columns.context, columns.task, names)
    labeled = columns.task == TASKS[0]
    return [
        Texts(
            part.rows,
            columns.inputs,
            columns.targets,
            encode,
            Columns(part.rows, whole, None, names) if labeled else None,
        )
        for part in parts
    ]


def _tokenize(part: Part, text: str, encoder: Tokenizer, cache: str | None) -> Any:
    """Return the tokens `(n,)` of a column; rows without a text are left out."""
    check_text(part.rows.features, text)

    def documents() -> Iterator[tuple[str, bool]]:
        for batch in part.rows.select_columns([text]).iter(batch_size=1000):
            yield from ((one, True) for one in batch[text] if one is not None)

    make = partial(encoder.encode_all, documents())
    return TokenCache(cache).tokens(["rows", encoder.identity, part.identity, text], encoder.dtype, make)
