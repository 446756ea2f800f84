"""Read two columns of a Hugging Face data set as pairs of tensors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.images.decoding import open_image
from runner.data.images.normalization import IMAGENET
from runner.data.images.pixels import Preparation
from runner.data.new_rows import table_at
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.files.printable import printable
from runner.libraries.hugging_face import import_hf

WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FRACTIONS = ("float16", "float32", "float64")

FEW = 10  # names of classes in a message

NO_VALUE = "of its split has no value; fill it in, or leave the row out"
"""The end of the message about a row without a value in one of the columns."""


class Columns(Dataset[tuple[Tensor, ...]]):
    """The rows of a data set as tuples of tensors, one per column; images are bytes until a batch is normalized.

    Args:
        rows: a `datasets.Dataset`.
        columns: the columns by the names of their arguments, for messages.
        image_size: height and width of images, in pixels; None leaves images as they are.
        classes: class names in order, for targets that are texts.

    Attributes:
        classes: names of the classes in order; None if the data has none.
        is_multi_label: whether targets are truth values, one for each class.
        preparation: how images among the inputs are prepared; None if the inputs are numbers.
        normalization: the transform of batches, which normalizes images; None if no column has images.

    Raises:
        ValueError: a column does not exist, cannot become a tensor, has lists of different length, or has samples
            without a label.
    """

    def __init__(
        self, rows: Any, columns: Mapping[str, str], image_size: int | None, classes: Sequence[str] | None = None
    ) -> None:
        for key, column in columns.items():
            check_column(rows.features, key, column)
            _check_values(rows, key, column)
        self.columns = dict(columns)
        self.classes = names_of(rows.features.get(columns.get("targets")), classes)
        self.is_multi_label = "targets" in columns and holds_truth_values(rows.features[columns["targets"]])
        self._numbers = None if classes is None else {name: number for number, name in enumerate(classes)}
        self.ids: list[str] | None = None  # of new rows
        self._features = rows.features
        self.rows = undecoded(rows.select_columns([*dict.fromkeys(columns.values())]))
        self._dtypes = {column: _dtype(rows.features[column]) for column in columns.values()}
        self.normalization = IMAGENET if None in self._dtypes.values() else None
        self._image_size = image_size
        has_images = "inputs" in columns and self._dtypes[columns["inputs"]] is None
        self.preparation = Preparation(image_size, None, IMAGENET.mean, IMAGENET.std) if has_images else None

    def __len__(self) -> int:
        return len(self.rows)

    def read_from(self, rows: Any) -> None:
        """Take samples from other rows by number, such as a dict of the rows of a batch."""
        self.rows = rows

    def new_rows(self, path: Path) -> Columns:
        """Return the rows of a file, or images in a folder, without targets; the attribute `ids` has their ids."""
        new = copy.copy(self)
        new.columns = {key: column for key, column in self.columns.items() if key != "targets"}
        rows, new.ids = table_at(path, [*new.columns.values()], self._features)
        for key, column in new.columns.items():
            _check_values(rows, key, column)
        new.rows = undecoded(rows)
        return new

    def check_labels(self, number: int | None) -> None:
        """Check that whole numbers among the targets are class numbers below `number`, or at least 0 if it is None.

        The rows of a stream are not checked.

        Raises:
            ValueError: a target is no class number, such as -100, which torch's losses ignore but accuracies count.
        """
        column = self.columns.get("targets")
        if (
            column is None
            or isinstance(self.rows, Mapping)
            or getattr(self._features[column], "dtype", "") not in WHOLE[1:]
        ):
            return
        compute = import_hf("pyarrow.compute")
        values = self.rows.data.column(column)
        wrong = compute.less(values, 0)
        if number is not None:
            wrong = compute.or_(wrong, compute.greater_equal(values, number))
        if (row := compute.index(wrong, True).as_py()) >= 0:
            allowed = "at least 0" if number is None else f"from 0 to {number - 1}, as the model has {number} classes"
            reason = f"{row_of(self.rows, row)} has {values[row]}, but class numbers must be {allowed}"
            raise wrong_argument("targets", column, f"{reason}; correct the row, or leave it out")

    @property
    def targets(self) -> Tensor:
        """The targets of all rows, `(rows, ...)`, read without the other columns."""
        column = self.columns["targets"]
        rows = self.rows.select_columns([column])[:]
        return torch.stack([self._tensor("targets", column, value, row) for row, value in enumerate(rows[column])])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        row = self.rows[index]
        return tuple(self._tensor(key, column, row[column], index) for key, column in self.columns.items())

    def stack(self, samples: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return a batch: the tensors of each column, stacked.

        Raises:
            ValueError: the samples have different shapes.
        """
        parts = [*zip(*samples, strict=True)]
        for (key, column), tensors in zip(self.columns.items(), parts, strict=False):  # new rows have no targets
            shapes = sorted({tuple(tensor.shape) for tensor in tensors})
            if len(shapes) > 1:
                is_image = self._dtypes[column] is None
                advice = "give image_size=<pixels>" if is_image else "a batch needs equal ones"
                raise wrong_argument(key, column, f"samples have the shapes {shapes[0]} and {shapes[1]}; {advice}")
        return tuple(torch.stack(tensors) for tensors in parts)

    def _tensor(self, key: str, column: str, value: Any, index: int) -> Tensor:
        dtype = self._dtypes[column]
        if value is None:
            raise wrong_argument(key, column, f"row {index} {NO_VALUE}")
        if isinstance(value, str) and self._numbers is not None:
            if value not in self._numbers:  # only in a stream: other names have been checked
                raise unknown_class(None, index, column, value, self.classes, ())
            return torch.tensor(self._numbers[value])
        try:
            return image_tensor(value, self._image_size) if dtype is None else torch.tensor(value, dtype=dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise wrong_argument(key, column, f"row {index} cannot become a tensor: {error}") from error


def undecoded(rows: Any) -> Any:
    """Return a `datasets.Dataset` whose images are read as bytes instead of being decoded by the library."""
    for column, feature in rows.features.items():
        if _is_image(feature):
            rows = rows.cast_column(column, import_hf("datasets").Image(decode=False))
    return rows


def image_tensor(image: Any, size: int | None) -> Tensor:
    """Return an image as uint8 `(3, H, W)`.

    Args:
        image: the content of a file, a Pillow image, or a dict with `bytes` or a `path`, as `datasets` stores images.
        size: height and width in pixels: the shorter side is resized to it, and the center is cropped; None keeps the
            size.
    """
    if isinstance(image, Mapping):
        image = image["path"] if image["bytes"] is None else image["bytes"]
    return Preparation(size, None, IMAGENET.mean, IMAGENET.std)(open_image(image))


def checked_whole(values: Any) -> Any:
    """Return a numpy array after checking that int64 can hold its values.

    Raises:
        ValueError: a value is too large.
    """
    if values.dtype == numpy.uint64 and values.size and values.max() > numpy.iinfo(numpy.int64).max:
        raise ValueError(f"it holds {values.max()}, which is more than int64 can")
    return values


def class_names(
    parts: Sequence[Any], targets: str, classes: Sequence[str] | None, sources: int = 1
) -> list[str] | None:
    """Return the class names in order if the targets are texts or lists of texts, otherwise None.

    Args:
        parts: the rows of each split.
        targets: the column of targets.
        classes: the class names in order; None: the sorted names in the first parts.
        sources: number of these parts: 2 if rows to evaluate were drawn from those to train on, otherwise 1.

    Raises:
        ValueError: a target is missing, not among `classes`, or only in later parts; or `classes` are given although
            targets are not texts.
    """
    feature = parts[0].features.get(targets)
    if not is_text(feature) and not holds_texts(feature):
        refuse_if(classes is not None, "classes", classes, "is for targets that are texts; leave it out")
        return None
    compute = import_hf("pyarrow.compute")
    columns = [rows.data.column(targets) for rows in parts]
    flat = [compute.list_flatten(column) for column in columns] if holds_texts(feature) else columns
    names = [{*compute.unique(column).to_pylist()} for column in flat]
    all_names = set().union(*names)
    refuse_if(None in all_names, "targets", targets, "some rows have no value; fill them in, or leave the rows out")
    known = sorted(set().union(*names[:sources])) if classes is None else [*classes]
    for unknown in sorted(all_names - {*known})[:1]:
        part = next(number for number, present in enumerate(names) if unknown in present)
        row = compute.index(flat[part], unknown).as_py()
        row = compute.list_parent_indices(columns[part])[row].as_py() if holds_texts(feature) else row
        raise unknown_class(parts[part], row, targets, unknown, classes, known)
    return known


def unknown_class(
    rows: Any, row: int, column: Any, name: str, classes: Sequence[str] | None, known: Sequence[str]
) -> Exception:
    """Return an exception for a class name that is not among the known ones: `classes`, or those of the training rows.

    Args:
        rows: the rows that have the name.
        row: number of the row.
        column: the column of targets, or several.
        name: the name.
        classes: the argument of the user.
        known: the known names.
    """
    known_names = f"{', '.join(map(repr, known[:FEW]))}{', ...' if len(known) > FEW else ''}"
    only = f", but the rows to train on only have {known_names}" if classes is None else ""
    remedy = "correct the row, or give all names" if classes is None else "add it, or correct the row"
    value = None if classes is None else [*classes]
    return wrong_argument("classes", value, f"{row_of(rows, row)} has {name!r} in column {column!r}{only}; {remedy}")


def row_of(rows: Any, row: int) -> str:
    """Return a phrase for a row: its number, and the split if it is known."""
    split = getattr(rows, "split", None)
    return f"row {row} of {'its split' if split is None else f'split {str(split)!r}'}"


def names_of(feature: Any, classes: Sequence[str] | None) -> list[str] | None:
    """Return the class names of a column of targets: those given, or those that the library knows."""
    return [*classes] if classes is not None else getattr(_innermost(feature), "names", None)


def is_text(feature: Any) -> bool:
    """Return whether a column holds texts."""
    return getattr(feature, "dtype", None) in ("string", "large_string")


def holds_texts(feature: Any) -> bool:
    """Return whether a column holds lists of texts."""
    return is_text(getattr(feature, "feature", None))


def holds_whole_numbers(feature: Any) -> bool:
    """Return whether a column holds lists of whole numbers, or of truth values."""
    inner = getattr(feature, "feature", None)
    return getattr(inner, "dtype", None) in WHOLE and not hasattr(inner, "feature")


def holds_truth_values(feature: Any) -> bool:
    """Return whether a column holds lists of truth values."""
    return getattr(getattr(feature, "feature", None), "dtype", None) == "bool"


def largest_label(feature: Any, classes: Sequence[str] | None) -> int:
    """Return the largest class number in a column; 0 if it is unknown."""
    if classes is not None:
        return len(classes) - 1
    return getattr(_innermost(feature), "num_classes", 1) - 1


def check_column(features: Mapping[str, Any], key: str, column: str) -> None:
    """Raise ValueError if a column, chosen by the argument `key`, does not exist or cannot become a tensor.

    Only targets may be texts, which become class numbers.
    """
    if column not in features:
        raise wrong_argument(key, column, f"no such column; the columns are {', '.join(map(printable, features))}")
    feature = features[column]
    if key == "targets" and is_text(feature):
        return
    if not _is_image(feature) and _leaf(feature) not in WHOLE + FRACTIONS:
        raise wrong_argument(
            key, column, f"this column holds {feature}; must be numbers, lists of them, labels or images"
        )


def no_such_column(rows: Any) -> str:
    """Return the reason to refuse a column that does not exist."""
    return f"no such column; the columns are {', '.join(map(printable, rows.features))}{_about_folders(rows)}"


def _about_folders(rows: Any) -> str:
    """Return when `datasets` labels a folder of images, and the files that it found; '' for other data."""
    if rows.info.builder_name != "imagefolder" or not len(rows) or not _is_image(rows.features.get("image")):
        return ""
    paths = [path for path in rows.data.column("image").combine_chunks().field("path").to_pylist() if path]
    by_depth = {path.count(os.sep): printable(path) for path in reversed(paths)}
    examples = " and ".join(by_depth[depth] for depth in sorted(by_depth)[:FEW])
    layout = "all lie in <split>/<class>, equally deep, with 2 classes or more and no metadata file"
    return f"; images have labels only if {layout}, but there is {examples}"


def fake_batches(
    features: Mapping[str, Any],
    columns: Mapping[str, str],
    image_size: int | None,
    first: Callable[[], Mapping[str, Any]],
    classes: Sequence[str] | None = None,
) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a function `make(n)` of batches that look like n samples of `Columns`, with the largest labels.

    Images are not normalized yet.

    `first` reads a row; it is called only if the features lack a column's shape.

    Raises:
        ValueError: a column does not exist, or cannot become a tensor.
    """
    row: Mapping[str, Any] | None = None
    examples: list[Tensor] = []
    for key, column in columns.items():
        check_column(features, key, column)
        feature = features[column]
        shape = _shape(feature, image_size)
        dtype = _dtype(feature)
        largest = largest_label(feature, classes if is_text(feature) else None)
        if shape is None:
            row = first() if row is None else row
            value = row[column]
            shape = image_tensor(value, image_size).shape if dtype is None else torch.tensor(value).shape
        pixels = torch.randint(256, tuple(shape), dtype=torch.uint8)
        examples.append(pixels if dtype is None else torch.full(tuple(shape), largest, dtype=dtype))

    def make(samples: int) -> tuple[Tensor, ...]:
        return tuple(example.expand(samples, *example.shape).clone() for example in examples)

    return make


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"


def _innermost(feature: Any) -> Any:
    while hasattr(feature, "feature"):
        feature = feature.feature
    return feature


def _leaf(feature: Any) -> str | None:
    """Return the type of the values in a column, nested or not; None if its feature has no type."""
    return getattr(_innermost(feature), "dtype", None)


def _dtype(feature: Any) -> torch.dtype | None:
    """Return the type of the tensors that a column becomes; None for images."""
    if _is_image(feature):
        return None
    return torch.int64 if is_text(feature) or _leaf(feature) in WHOLE else torch.float32


def _shape(feature: Any, image_size: int | None) -> tuple[int, ...] | None:
    """Return the shape of a column's samples; None if its feature lacks it."""
    if _is_image(feature):
        return None if image_size is None else (3, image_size, image_size)
    shape: tuple[int, ...] = ()
    while hasattr(feature, "feature"):
        shape += (getattr(feature, "length", -1),)
        feature = feature.feature
    shape += tuple(-1 if size is None else size for size in getattr(feature, "shape", ()))
    return None if -1 in shape else shape


def _check_values(rows: Any, key: str, column: str) -> None:
    """Raise ValueError for lists of different length and for missing labels, as far as a quick check finds them."""
    compute = import_hf("pyarrow.compute")
    feature = rows.features[column]
    values = rows.data.column(column)
    if hasattr(feature, "feature"):
        ends = compute.min_max(compute.list_value_length(values)).as_py()
        if ends["min"] != ends["max"]:
            raise wrong_argument(
                key, column, f"its lists have {ends['min']} to {ends['max']} entries; must be equal in a batch"
            )
    if hasattr(feature, "num_classes") and values.null_count == len(values):
        raise wrong_argument(key, column, f"no row has a label{_about_folders(rows)}")
    if hasattr(feature, "num_classes") and (compute.min(values).as_py() or 0) < 0:
        raise wrong_argument(key, column, "some rows have no label (-1); choose another split")
