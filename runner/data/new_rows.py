"""New rows without labels, from a file or a folder, prepared like the run's evaluation data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.data.classes import holder_of
from runner.data.images.decoding import SUFFIXES, find_images
from runner.data.loaders import DatasetLoader
from runner.failures.errors import WrongKey
from runner.files.printable import printable
from runner.libraries.hugging_face import bars_on_terminals, import_hf

KEY = "--data"
BUILDERS = {".csv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
"""The loaders of `datasets` by the suffix of a file."""


def existing(path: str) -> Path:
    """Return the path of new rows after checking that it exists."""
    if not (found := Path(path).expanduser()).exists():
        raise WrongKey(KEY, "no such file or folder", repr(path))
    return found


def read_new_rows(loader: Any, path: Path) -> Any:
    """Return a loader of new rows like one for evaluation. Its data set has `ids`: file names, or the column `id`.

    The loader's data set has `new_rows(path)`, which returns a data set of such rows; `ids` may be None. Everything
    else stays: the tokenizer, sizes, normalization and batches.

    Raises:
        WrongKey: the data cannot read such rows, or there are none at the path.
    """
    holder = holder_of(loader, "new_rows")
    in_memory = getattr(loader, "in_memory", None)  # of a stream
    if holder is None or not (in_memory or isinstance(loader, DatasetLoader)):
        reason = (
            "the run's data cannot read new rows; data=imagefolder, data=image_masks and data=hf_dataset with inputs "
            "and targets can. In Python, runner.load(RUN).model takes any batch"
        )
        raise WrongKey(KEY, reason, repr(str(path)))
    rows = holder.new_rows(path)
    if in_memory:
        return in_memory(rows)
    loader.read(rows)
    loader.order.resize(len(rows))
    return loader


def images_at(path: Path) -> tuple[list[Path], list[str]]:
    """Return the image files in a folder and below, or the file itself, and their names relative to the folder.

    Raises:
        WrongKey: there is no image.
    """
    files = [*find_images(path)] if path.is_dir() else [path] if path.suffix.lower() in SUFFIXES else []
    if not files:
        reason = f"holds no image; images end in {', '.join(sorted(SUFFIXES))}"
        raise WrongKey(KEY, reason, repr(str(path)))
    return files, [file.relative_to(path if path.is_dir() else path.parent).as_posix() for file in files]


def table_at(path: Path, columns: Sequence[str], features: Any) -> tuple[Any, list[str] | None]:
    """Return the rows of a file as a `datasets.Dataset` with some columns, and their ids.

    A text file has a row in each line. Images may also be files in a folder.

    Args:
        path: the file or folder.
        columns: the columns that the run's model takes.
        features: the types of the columns in the run's own data.

    Raises:
        WrongKey: the file cannot be read, holds no rows or other columns, or a row has no value.
    """
    datasets = import_hf("datasets")
    shown = repr(str(path))
    if len(columns) == 1 and type(features[columns[0]]).__name__ == "Image" and path.suffix.lower() not in BUILDERS:
        files, ids = images_at(path)
        types = datasets.Features({columns[0]: features[columns[0]]})
        return datasets.Dataset.from_dict({columns[0]: [str(file) for file in files]}, features=types), ids
    if path.is_dir() or (builder := BUILDERS.get(path.suffix.lower())) is None:
        raise WrongKey(KEY, f"must be a file that ends in {', '.join(BUILDERS)}", shown)
    verbosity = datasets.logging.get_verbosity()
    try:
        datasets.logging.set_verbosity(logging.CRITICAL)  # it logs the trace of an error that is reported below
        with bars_on_terminals("datasets"):
            rows = datasets.load_dataset(builder, data_files=str(path), split="train")
    except Exception as error:  # of many kinds: pandas', pyarrow's, its own
        reason = " ".join(str(error.__cause__ or error).split())[:300].rstrip(".")
        raise WrongKey(KEY, f"holds no rows that can be read as a {builder} file: {reason}", shown) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    if builder == "text" and len(columns) == 1 and columns[0] != "text":
        rows = rows.rename_column("text", columns[0])
    if missing := [column for column in columns if column not in rows.features]:
        held = ", ".join(map(printable, rows.features))
        raise WrongKey(KEY, f"lacks the column {missing[0]!r}; its columns are {held}", shown)
    if not len(rows):
        raise WrongKey(KEY, "holds no rows", shown)
    for column in columns:
        if rows.data.column(column).null_count:
            number = next(index for index, value in enumerate(rows[column]) if value is None)
            raise WrongKey(KEY, f"row {number} has no value in the column {column!r}", shown)
        try:
            rows = rows.cast_column(column, features[column])
        except Exception as error:  # pyarrow's
            kinds = f"{rows.features[column]}, and that of the run's own data {features[column]}"
            raise WrongKey(KEY, f"the column {column!r} holds {kinds}", shown) from error
    ids = [str(value) for value in rows["id"]] if "id" in rows.features else None
    return rows.select_columns([*columns]), ids
