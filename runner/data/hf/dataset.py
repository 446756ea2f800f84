"""Load any data set with Hugging Face's `datasets`: from the Hub, from files, or saved by the library.

With `text`, a column of texts, batches are those of `runner.data.text.text_files.load_text_files`: int64
`(inputs, targets)` of `(N, context)`. Each row is a document, and the tokens are kept in `cache`.

With `inputs` and `targets`, two columns, batches are `(inputs, targets)`. Integers, booleans, class labels and class
names become int64, other numbers float32, both `(N,)`; lists of equal length add dimensions. Images become float32
`(N, 3, H, W)`, red, green and blue: the shorter side is resized to `image_size` pixels, the center is cropped, and
pixels are normalized by ImageNet's mean and standard deviation. There is no augmentation here.

With columns of texts as `inputs`, and a tokenizer, batches are mappings for transformers models: int64 `input_ids`
and `attention_mask` `(N, T)`, further outputs of the tokenizer, and `labels`. T is the length of the longest sample in
the batch, at most `context`; the labels of padding are -100, which losses ignore. `task` determines the labels:

- sequence_classification: the targets, `(N,)`; inputs are one text, or two texts that form a pair.
  For multi-label targets, truth values `(N, C)`; see `with_truth_values`.
- token_classification: the class of each word at its first token, `(N, T)`, and -100 at its other tokens; inputs are
  lists of words, and targets lists of their classes.
- masked_lm: the masked tokens, 15 % as for BERT, `(N, T)`; there are no targets. The choice depends on seed, epoch and
  row alone; in evaluation, on seed and row.
- causal_lm: the tokens themselves, `(N, T)`; there are no targets, and each row is a separate sample.
- seq2seq_lm: the tokens of the text in `targets`, `(N, T')`.

`datasets` caches its downloads and conversions in its own folder (`HF_HOME`); its locks let one process work while
others wait. With `streaming`, rows are read as they come, and nothing is converted or cached; see `StreamLoader`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from runner.data.fake import FakeLoader, data_function
from runner.data.hf.columns import Columns, class_names, fake_batches, holds_texts, is_text, largest_label, undecoded
from runner.data.hf.multi_label import COLUMN, with_truth_values
from runner.data.hf.splits import Part, Source, SplitArguments, Splits, check_text, describe, load_parts, load_split
from runner.data.hf.streaming import MakeSamples, StreamLoader, open_stream, token_windows
from runner.data.hf.texts import NAMED, TASKS, Encoder, Texts, check_columns, check_task, text_columns
from runner.data.images.normalization import IMAGENET
from runner.data.loaders import DatasetLoader, OrderedLoader
from runner.data.text.packing import document_ends, end_token, packed_loaders
from runner.data.text.token_cache import TokenCache
from runner.data.text.tokenizer import BYTES_PER_TOKEN, Tokenizer, load_tokenizer
from runner.data.text.windows import fake_window_loaders, next_token, window_loaders
from runner.distributed.ranks import get_global_rank
from runner.failures.checks import check_whole, refuse_if
from runner.files.values import HubName
from runner.libraries.hugging_face import bars_on_terminals, import_hf

log = logging.getLogger("runner")

_NEEDS_ALL = "all rows are needed at once: leave streaming out"


@dataclass(frozen=True)
class HFDataset(SplitArguments):
    """Return a training, an evaluation and perhaps a test loader; the top of this file describes their batches.

    Args:
        text: a column of texts, for language modeling.
        inputs, targets: columns of numbers, lists of equal length, images or labels; or of texts, depending on `task`.
            Several targets are columns of 0 and 1, one for each class; see `with_truth_values`.
        classes: class names in order, if targets are names, including any found only in other data; None: the
            sorted names in the rows of `split`.
        tokenizer: tokenizer for texts: a folder or a name on the Hub, for transformers' AutoTokenizer; None: bytes.
        pack_documents: whether rows of `text` stay whole, with a tokenizer; see `PackedWindows`.
        task: task of the model, for texts with a tokenizer; None is 'sequence_classification'.
        context: window length for `text`, or maximum length of a sample for inputs that are texts, in tokens.
        eval_tokens: maximum number of tokens of `text` to evaluate; None evaluates all.
        image_size: height and width of images, in pixels; None leaves images as they are.
        batch_size, eval_batch_size: windows or samples in a training batch, or in an evaluation or test batch, over
            all ranks.
        num_workers: processes that read inputs and targets on each rank; 0 reads in this process.
        streaming: whether to read rows as they come, without loading or converting the data set first.
        shuffle_buffer: with streaming, number of rows that each worker keeps in memory to draw the next from; 0 trains
            in file order.

    For the other arguments see `SplitArguments`.

    Raises:
        OSError, ModuleNotFoundError, ValueError: data or a library is missing, or an argument does not fit the data.
    """

    name: HubName = "Salesforce/wikitext"
    eval_split: str | None = "validation"
    text: str | None = None
    inputs: str | Sequence[str] | None = None
    targets: str | Sequence[str] | None = None
    classes: Sequence[str] | None = None
    pack_documents: bool = False
    task: str | None = None
    image_size: int | None = None
    num_workers: int = 2
    streaming: bool = False
    shuffle_buffer: int = 1000

    def load(self) -> tuple[OrderedLoader, ...] | tuple[StreamLoader, ...]:
        """Return the loaders."""
        columns, source, splits, encoder = self._check()
        if self.streaming:
            return self._load_streams(columns, source, splits, encoder)
        with bars_on_terminals("datasets", "huggingface_hub"):
            parts = load_parts(source, splits, self.eval_share, self.seed)
            if self.text is not None:
                tokens = [_tokenize(part, self.text, encoder, self.cache) for part in parts]
                if not self.pack_documents:
                    return window_loaders(tokens, self.seed, self)
                ends = [document_ends(part, end_token(encoder)) for part in tokens]
                key = [encoder.identity, self.text, [part.identity for part in parts]]
                return packed_loaders(tokens, ends, self, TokenCache(self.cache), key, self.seed)
            train, *held_out = _make_datasets(parts, columns)
        shared: dict[str, Any] = {"seed": self.seed, "num_workers": self.num_workers, "collate_fn": train.stack}
        if isinstance(train, Columns):
            shared["transform"] = train.normalization  # in training on a GPU it runs there
        return (
            DatasetLoader(train, self.batch_size, shuffle=True, **shared),
            *(DatasetLoader(part, self.eval_batch_size, shuffle=False, **shared) for part in held_out),
        )

    def _load_streams(
        self, columns: _Columns, source: Source, splits: Splits, encoder: Tokenizer
    ) -> tuple[StreamLoader, ...]:
        """Return loaders of rows that are read as they come."""
        with bars_on_terminals("datasets", "huggingface_hub"):
            streams = [open_stream(source, key, split) for key, split in splits.named()]
        make: MakeSamples = iter
        if self.text is not None:
            check_text(streams[0].rows.features, self.text)
            make = partial(token_windows, text=self.text, encoder=encoder, context=self.context)
            used, parts, collate, transform = [self.text], [{} for _ in streams], torch.stack, next_token
        else:
            feature = streams[0].rows.features.get(str(columns.targets))
            has_names = columns.task in NAMED and (is_text(feature) or holds_texts(feature))
            reason = "a stream does not know the names in advance; give them all, as in [negative, positive]"
            refuse_if(has_names and self.classes is None, "classes", None, reason)
            used = [*dict.fromkeys((*columns.inputs, *([str(columns.targets)] if columns.targets else [])))]
            parts = _make_datasets([Part(stream.first, None) for stream in streams], columns)
            reason = f"for multi-label targets, {_NEEDS_ALL}"
            refuse_if(parts[0].is_multi_label, "targets", columns.targets, reason)
            collate, transform = parts[0].stack, getattr(parts[0], "normalization", None)
            for part in parts:
                part.read_from({})
        loaders = []
        for stream, part in zip(streams, parts, strict=True):
            size, buffer = (self.eval_batch_size, 0) if loaders else (self.batch_size, self.shuffle_buffer)
            stream = stream._replace(rows=stream.rows.select_columns(used))
            loader = StreamLoader(stream, make, part, collate, size, buffer, self.seed, self.num_workers, transform)
            loaders.append(loader)
        return tuple(loaders)

    def fake(self) -> tuple[FakeLoader, ...] | tuple[StreamLoader, ...]:
        """Return loaders of made-up batches, based on the description of the data; streams are read."""
        columns, source, splits, encoder = self._check()
        if self.streaming:
            return self._load_streams(columns, source, splits, encoder)
        with bars_on_terminals("datasets", "huggingface_hub"):
            features, counts, row_sizes = describe(source, splits, self.eval_share, self.text)
            if self.text is not None:
                check_text(features, self.text)
                bytes_per_token = 1 if self.tokenizer is None else BYTES_PER_TOKEN
                totals = (count * mean / bytes_per_token for count, mean in zip(counts, row_sizes, strict=True))
                tokens = [max(round(total), 2 * self.context) for total in totals]
                return fake_window_loaders(tokens, encoder.vocab_size, self, self.pack_documents)
            make, is_multi_label = _fake_samples(features, columns, source, splits)
        train, *held_out = counts
        batch = make(1)
        has_images = isinstance(batch, tuple) and any(part.dtype == torch.uint8 for part in batch)
        transform = IMAGENET if has_images else None
        loaders = (
            FakeLoader(make, train, self.batch_size, transform),
            *(FakeLoader(make, count, self.eval_batch_size, transform) for count in held_out),
        )
        loaders[0].is_multi_label = is_multi_label
        return loaders

    def new_rows(self) -> tuple[Any, dict[str, Any]] | None:
        """Return a data set without rows and the arguments of its loader; None for numbers and images of any size."""
        columns = self._columns()
        if not columns.inputs or not (columns.tokenizer or columns.image_size):
            return None
        datasets = import_hf("datasets")
        kind = datasets.Value("string") if columns.tokenizer else datasets.Image()
        kind = datasets.Sequence(kind) if columns.task == "token_classification" else kind
        features = datasets.Features(dict.fromkeys(columns.inputs, kind))
        rows = datasets.Dataset.from_dict({column: [] for column in columns.inputs}, features=features)
        (data,) = _make_datasets([Part(rows, None)], columns._replace(targets=None))
        shared = {"collate_fn": data.stack, "transform": getattr(data, "normalization", None)}
        return data, {"batch_size": self.eval_batch_size, "num_workers": self.num_workers, **shared}

    def _check(self) -> tuple[_Columns, Source, Splits, Tokenizer]:
        """Check the arguments before anything is read, and return them; the tokenizer is for `text`."""
        columns = self._columns()
        source, splits = self.checked_source()
        check_whole("shuffle_buffer", self.shuffle_buffer, 0, "a number of rows")
        if self.streaming:
            self._check_streaming()
        encoder = load_tokenizer(None) if self.text is None else load_tokenizer(self.tokenizer, self.added_tokens)
        if self.pack_documents:
            end_token(encoder)
        return columns, source, splits, encoder

    def _check_streaming(self) -> None:
        reason = f"name a split to evaluate on; to draw rows, {_NEEDS_ALL}"
        refuse_if(self.eval_split is None, "eval_split", None, reason)
        refuse_if(self.pack_documents, "pack_documents", True, f"must be False; to pack by best fit, {_NEEDS_ALL}")
        remedy = "leave it out, or name a smaller split to evaluate on"
        refuse_if(self.eval_tokens is not None, "eval_tokens", self.eval_tokens, remedy)
        reason = f"must be one column; for several {_NEEDS_ALL}"
        refuse_if(not isinstance(self.targets, str | None), "targets", self.targets, reason)

    def _columns(self) -> _Columns:
        """Check the arguments that define a sample, and return them."""
        check_whole("image_size", self.image_size, 1, "a number of pixels", none="images as they are")
        inputs = [] if self.inputs is None else [self.inputs] if isinstance(self.inputs, str) else [*self.inputs]
        fits = (self.targets or self.task is not None) if inputs else not self.targets
        if bool(self.text) == bool(inputs) or not fits:
            raise ValueError(
                f"text={self.text!r}, inputs={self.inputs!r}, targets={self.targets!r}: give text, a column for "
                "language modeling, or both inputs and targets"
            )
        refuse_if(len(inputs) > 2, "inputs", inputs, "must be one column, or two columns of texts")
        task = TASKS[0] if self.text else check_task(self.task, inputs, self.targets, self.classes, self.tokenizer)
        return _Columns(
            inputs, self.targets, self.classes, self.tokenizer, self.image_size, task, self.context, self.added_tokens
        )


load_hf_dataset = data_function("load_hf_dataset", HFDataset)


class _Columns(NamedTuple):
    """The arguments that define a sample; `inputs` is empty for language modeling on `text`."""

    inputs: list[str]
    targets: str | Sequence[str] | None
    classes: Sequence[str] | None
    tokenizer: str | None
    image_size: int | None
    task: str
    context: int
    added_tokens: Sequence[str]


def _fake_samples(features: Mapping[str, Any], columns: _Columns, source: Source, splits: Splits) -> tuple[Any, bool]:
    """Return a function `make(n)` that makes a batch like n samples of `_make_datasets`.

    The second value is whether targets are multi-label.
    """

    def first() -> Mapping[str, Any]:
        return undecoded(load_split(source, "split", splits.split))[0]

    is_text_data = _is_text_data(features, columns)
    feature = None if columns.targets is None else features.get(str(columns.targets))
    names = columns.classes
    if columns.task in NAMED and (names is not None or is_text(feature) or hasattr(feature, "feature") or not feature):
        rows = [load_split(source, key, split) for key, split in splits.named()]
        (first_rows, *_), columns, names = _with_classes(rows, columns)
        features = first_rows.features
    targets = {"targets": str(columns.targets)}
    is_multi_label = columns.targets == COLUMN
    if not is_text_data:
        pair = {"inputs": columns.inputs[0], **targets}
        return fake_batches(features, pair, columns.image_size, first, names), is_multi_label
    encode = Encoder(str(columns.tokenizer), columns.context, columns.task, None, columns.added_tokens)
    if columns.task != TASKS[0]:
        return encode.fake(len(columns.inputs), largest_label(feature, names)), is_multi_label
    make_labels = fake_batches(features, targets, None, first, names)
    return encode.fake(len(columns.inputs), lambda samples: make_labels(samples)[0]), is_multi_label


def _with_classes(
    rows: Sequence[Any], columns: _Columns, sources: int = 1
) -> tuple[Sequence[Any], _Columns, list[str] | None]:
    """Return the rows of each split, their columns, and the class names in order; None if the targets are not names.

    Multi-label targets become a column of truth values. For `sources` see `class_names`.
    """
    if columns.task not in NAMED or columns.targets is None:
        return rows, columns, None
    targets, classes = columns.targets, columns.classes
    multi_label = with_truth_values(rows, targets, classes, sources) if columns.task == TASKS[0] else None
    if multi_label is not None:
        return multi_label[0], columns._replace(targets=COLUMN), multi_label[1]
    return rows, columns, class_names(rows, str(targets), classes, sources)


def _is_text_data(features: Mapping[str, Any], columns: _Columns) -> bool:
    """Check that the columns fit the task, and return whether the inputs are texts, for a tokenizer."""
    if columns.task == TASKS[0]:
        return text_columns(features, columns.inputs, columns.tokenizer)
    check_columns(features, columns.task, columns.inputs, columns.targets)
    return True


def _make_datasets(parts: Sequence[Part], columns: _Columns) -> list[Any]:
    """Return a data set of the samples of each part."""
    is_text_data = _is_text_data(parts[0].rows.features, columns)
    drawn = sum(part.numbers is not None for part in parts)  # 2: rows to train and to evaluate on, of one split
    rows, columns, names = _with_classes([part.rows for part in parts], columns, drawn or 1)
    if names is not None and get_global_rank() == 0:
        log.info("classes: %s", ", ".join(f"{number}={name}" for number, name in enumerate(names)))
    targets = {} if columns.targets is None else {"targets": str(columns.targets)}  # new rows have none
    if not is_text_data:
        pair = {"inputs": columns.inputs[0], **targets}
        return [Columns(part, pair, columns.image_size, names) for part in rows]
    encode = Encoder(str(columns.tokenizer), columns.context, columns.task, names, columns.added_tokens)
    is_labeled = columns.task == TASKS[0] and bool(targets)
    labels = [Columns(part, targets, None, names) if is_labeled else None for part in rows]
    pairs = zip(rows, labels, strict=True)
    column = None if columns.targets is None else str(columns.targets)
    return [Texts(part, columns.inputs, column, encode, values) for part, values in pairs]


def _tokenize(part: Part, text: str, encoder: Tokenizer, cache: str | None) -> Any:
    """Return the tokens `(n,)` of a column; rows without a text are left out."""
    check_text(part.rows.features, text)

    def documents() -> Iterator[tuple[str, bool]]:
        for batch in part.rows.select_columns([text]).iter(batch_size=1000):
            yield from ((document, True) for document in batch[text] if document is not None)

    make = partial(encoder.encode_all, documents())
    return TokenCache(cache).tokens(["rows", encoder.identity, part.identity, text], encoder.dtype, make)
