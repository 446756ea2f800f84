"""Any data set of Hugging Face's library `datasets`: from the Hub, from files, or saved by it.

With `text`, a column of texts, batches are those of :func:`runner.data.text.text_files.load_text_files`: int64
``(inputs, targets)`` of ``(N, context)``, in which each row is a document, and the tokens are kept in `cache`.

With `inputs` and `targets`, two columns, batches are `(inputs, targets)`. Whole numbers, truth values, class labels
and names of classes become int64, other numbers float32, both `(N,)`; lists of equal length have further dimensions.
Images become float32 `(N, 3, H, W)`: red, green and blue, normalized by ImageNet's mean and deviation, resized until
the shorter side has image_size pixels, and cropped to the center. There is no augmentation here.

With one or two columns of texts as `inputs`, and a tokenizer, batches are mappings for models of transformers: int64
`input_ids` and `attention_mask` `(N, T)`, what else the tokenizer makes, and the targets as `labels`. T is the length
of the longest sample in the batch, at most `context`.

`datasets` keeps what it downloads and converts in a folder of its own (`HF_HOME`), and its locks let one process do
that while others wait. Batches are found by their number, so streaming is not possible.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from runner.data.fake import FakeLoader, faked_by
from runner.data.hf.columns import Columns, class_names, fake_batches, is_text
from runner.data.hf.splits import Part, Source, check_text, describe, load_parts, load_split
from runner.data.hf.texts import BatchEncoder, Texts, text_columns
from runner.data.loaders import DatasetLoader, OrderedLoader
from runner.data.text.token_cache import TokenCache
from runner.data.text.tokenizer import BYTES_PER_TOKEN, ByteTokenizer, Tokenizer, load_tokenizer
from runner.data.text.windows import WindowSizes, check_eval_share, check_windows, fake_window_loaders, window_loaders
from runner.distributed.collectives import get_global_rank
from runner.libraries.hugging_face import bars_on_terminals

log = logging.getLogger("runner")


def _fake(
    text: str | None,
    inputs: str | Sequence[str] | None,
    targets: str | None,
    classes: Sequence[str] | None,
    tokenizer: str | None,
    image_size: int | None,
    **arguments: Any,
) -> tuple[FakeLoader, FakeLoader]:
    sizes = WindowSizes(**{key: arguments[key] for key in WindowSizes.__required_keys__})  # pyright: ignore
    eval_split, eval_share, split = (arguments[key] for key in ("eval_split", "eval_share", "split"))
    read = _check(sizes, eval_share if eval_split is None else None, text, inputs, targets, image_size)
    source = Source(*(arguments[key] for key in Source._fields))
    encoder = load_tokenizer(tokenizer) if text is not None else ByteTokenizer()
    with bars_on_terminals("datasets", "huggingface_hub"):
        features, rows, row_sizes = describe(source, {"split": split, "eval_split": eval_split}, eval_share, text)
        if text is not None:
            check_text(features, text)
            size = 1 if tokenizer is None else BYTES_PER_TOKEN
            totals = [count * mean / size for count, mean in zip(rows, row_sizes, strict=True)]
            counts = [max(round(one), 2 * sizes["context"]) for one in totals]
            return fake_window_loaders(counts[0], counts[1], encoder.vocab_size, sizes)

        def first() -> Mapping[str, Any]:
            return load_split(source, "split", split)[0]

        names = classes
        if classes is not None or is_text(features.get(targets)):
            parts = [load_split(source, key, one) for key, one in (("split", split), ("eval_split", eval_split)) if one]
            names = class_names(parts, str(targets), classes)
        if text_columns(features, read, tokenizer):
            columns = {"targets": str(targets)}
            make_labels = fake_batches(features, columns, image_size, first, names)
            encode = BatchEncoder(str(tokenizer), sizes["context"])
            make = encode.fake(len(read), lambda samples: make_labels(samples)[0])
        else:
            columns = {"inputs": read[0], "targets": str(targets)}
            make = fake_batches(features, columns, image_size, first, names)
    return FakeLoader(make, rows[0], sizes["batch_size"]), FakeLoader(make, rows[1], sizes["eval_batch_size"])


@faked_by(_fake)
def load_hf_dataset(
    name: str = "Salesforce/wikitext",
    config: str | None = None,
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
    data_dir: str | None = None,
    split: str = "train",
    eval_split: str | None = "validation",
    eval_share: float = 0.1,
    text: str | None = None,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    classes: Sequence[str] | None = None,
    tokenizer: str | None = None,
    context: int = 128,
    eval_tokens: int | None = None,
    cache: str | None = "~/.cache/experiment-runner/tokens",
    image_size: int | None = None,
    batch_size: int = 8,
    eval_batch_size: int = 64,
    num_workers: int = 2,
    seed: int = 0,
) -> tuple[OrderedLoader, OrderedLoader]:
    """Return a training and an evaluation loader over a data set; the top of this file describes their batches.

    Args:
        name: on the Hub; csv, json, parquet, imagefolder, ... with data_files or data_dir; a folder, also a saved one.
        config: which of the data set's configurations, such as wikitext-2-raw-v1; None is its default one.
        data_files: which files: a path, a list of them, or a dict of them by split.
        data_dir: a folder, of which all files are read.
        split: to train on, such as train or train[:10%].
        eval_split: to evaluate on; None keeps a part of the rows of split for that, drawn by seed.
        eval_share: share of the rows that is kept for evaluation, in (0, 1); not used with an eval_split.
        text: a column of texts, for language modelling.
        inputs: a column of numbers, lists of equal length, images or texts, or two columns of texts.
        targets: a column of numbers, lists of equal length, images, labels, or names of classes.
        classes: of class names in targets: the names in order, also those only in other data; None sorts those found.
        tokenizer: of texts: a folder or a name on the Hub, for transformers' AutoTokenizer; None takes the bytes.
        context: of text: window length, in tokens; of inputs that are texts: tokens in a sample at most.
        eval_tokens: of text: tokens that are evaluated at most; None evaluates all.
        cache: of text: a folder in which tokens are kept; None tokenizes at each start, on each rank.
        image_size: height and width of images, in pixels; None leaves them as they are.
        batch_size: windows or samples in a training batch, all ranks together.
        eval_batch_size: the same for an evaluation batch.
        num_workers: of inputs and targets: processes that read on each rank; 0 reads in this process.
        seed: seed of the order, and of the rows that are kept for evaluation.

    Raises:
        OSError, ModuleNotFoundError, ValueError: data or a library cannot be found, or an argument does not fit them.
    """
    sizes = WindowSizes(
        context=context, batch_size=batch_size, eval_batch_size=eval_batch_size, eval_tokens=eval_tokens
    )
    read = _check(sizes, eval_share if eval_split is None else None, text, inputs, targets, image_size)
    encoder = load_tokenizer(tokenizer if text is not None else None)
    with bars_on_terminals("datasets", "huggingface_hub"):
        parts = load_parts(Source(name, config, data_files, data_dir), split, eval_split, eval_share, seed)
        if text is not None:
            train, evaluation = (_tokenize(part, text, encoder, cache) for part in parts)
            return window_loaders(train, evaluation, seed, sizes)
        return _column_loaders(parts, read, str(targets), classes, tokenizer, image_size, num_workers, seed, sizes)


def _check(
    sizes: WindowSizes,
    eval_share: float | None,
    text: str | None,
    inputs: str | Sequence[str] | None,
    targets: str | None,
    image_size: int | None,
) -> list[str]:
    """Check the arguments, and return the columns of the inputs; there are none if the data is text to continue."""
    check_windows(sizes)
    if eval_share is not None:
        check_eval_share(eval_share)
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size={image_size!r}: must be at least 1 pixel")
    read = [] if inputs is None else [inputs] if isinstance(inputs, str) else [*inputs]
    given = [one for one in (read, targets) if one]
    if len(given) != (2 if text is None else 0):
        raise ValueError(
            f"text={text!r}, inputs={inputs!r}, targets={targets!r}: give text, a column for language modelling, or "
            "both inputs and targets"
        )
    if len(read) > 2:
        raise ValueError(f"inputs={read!r}: must be one column, or two columns of texts")
    return read


def _column_loaders(
    parts: tuple[Part, Part],
    read: list[str],
    targets: str,
    classes: Sequence[str] | None,
    tokenizer: str | None,
    image_size: int | None,
    num_workers: int,
    seed: int,
    sizes: WindowSizes,
) -> tuple[DatasetLoader, DatasetLoader]:
    names = class_names([part.rows for part in parts], targets, classes)
    if names is not None and get_global_rank() == 0:
        log.info("classes: %s", ", ".join(f"{number}={name}" for number, name in enumerate(names)))
    if text_columns(parts[0].rows.features, read, tokenizer):
        encode = BatchEncoder(str(tokenizer), sizes["context"])
        labels = [Columns(part.rows, {"targets": targets}, image_size, names) for part in parts]
        sets: list[Any] = [Texts(part.rows, read, one, encode) for part, one in zip(parts, labels, strict=True)]
    else:
        columns = {"inputs": read[0], "targets": targets}
        sets = [Columns(part.rows, columns, image_size, names) for part in parts]
    train, evaluation = sets
    shared: dict[str, Any] = {"seed": seed, "num_workers": num_workers, "collate_fn": train.stack}
    return (
        DatasetLoader(train, sizes["batch_size"], shuffle=True, **shared),
        DatasetLoader(evaluation, sizes["eval_batch_size"], shuffle=False, **shared),
    )


def _tokenize(part: Part, text: str, encoder: Tokenizer, cache: str | None) -> Any:
    """Return the tokens ``(n,)`` of a column; rows without a text are left out."""
    check_text(part.rows.features, text)

    def documents() -> Iterator[tuple[str, bool]]:
        for batch in part.rows.select_columns([text]).iter(batch_size=1000):
            yield from ((one, True) for one in batch[text] if one is not None)

    make = partial(encoder.encode_all, documents())
    return TokenCache(cache).tokens(["rows", encoder.identity, part.identity, text], encoder.dtype, make)
