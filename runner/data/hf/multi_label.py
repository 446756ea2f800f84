"""Samples with any number of classes: the forms that their targets have in files, and one column of truth values."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from runner.data.hf.columns import holds_texts, holds_whole_numbers, is_text, no_such_column, unknown_class
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.libraries.hugging_face import import_hf

COLUMN = "truth value of each class"
"""The column that `with_truth_values` adds."""


def with_truth_values(
    parts: Sequence[Any], targets: str | Sequence[str], classes: Sequence[str] | None, sources: int = 1
) -> tuple[list[Any], list[str] | None] | None:
    """Return the rows of each split with `COLUMN`, and the class names if there are any; None for other targets.

    The targets are several columns of 0 and 1, one for each class; or a column of lists of class names; or a column of
    lists of 0 and 1, equally long. In a csv file, which has no lists, texts such as `['cat', 'dog']` are lists.

    Args:
        parts: the rows of each split, as `datasets.Dataset`.
        targets: the column of the targets, or several.
        classes: class names in order; None: the names of the columns, or the sorted names in the lists.
        sources: see `class_names`.

    Raises:
        ValueError: a column does not exist, a row differs in its form from others, or `classes` do not fit.
    """
    columns = [targets] if isinstance(targets, str) else [*targets]
    for column in columns:
        if column not in parts[0].features:
            raise wrong_argument("targets", column, no_such_column(parts[0]))
    if isinstance(targets, str):
        feature = parts[0].features[targets]
        texts = (value for rows in parts for value in rows[targets]) if is_text(feature) else ()
        is_list = holds_texts(feature) or holds_whole_numbers(feature)
        if not is_list and not any(str(value).lstrip().startswith("[") for value in texts):
            return None
        lists = [_lists(rows[targets], targets) for rows in parts]
    else:
        lists = [[[*values] for values in zip(*(rows[column] for column in columns), strict=True)] for rows in parts]
        classes = columns if classes is None else classes
    rows_of_all = [row for values in lists for row in values]
    if any(isinstance(value, str) for row in rows_of_all for value in row):
        first_lists = [row for values in lists[:sources] for row in values]
        names = sorted({name for row in first_lists for name in row}) if classes is None else [*classes]
        for rows, values in zip(parts, lists, strict=True):
            for number, row in enumerate(values):
                for name in {*row} - {*names}:
                    raise unknown_class(rows, number, targets, name, classes, names)
        lists = [[[name in row for name in names] for row in values] for values in lists]
        classes = names
    elif any(value not in (0, 1) for row in rows_of_all for value in row):
        refuse_if(not isinstance(targets, str), "targets", columns, "each column must hold 0 and 1, or true and false")
        return None
    length = len(lists[0][0])
    if isinstance(targets, str) and any(len(row) != length for values in lists for row in values):
        return None
    reason = f"there are {length} truth values in a row; give one name for each"
    refuse_if(classes is not None and len(classes) != length, "classes", classes, reason)
    datasets = import_hf("datasets")
    feature = datasets.Sequence(datasets.Value("bool"), length=length)
    added = [
        rows.add_column(COLUMN, [[bool(value) for value in row] for row in values], feature=feature)
        for rows, values in zip(parts, lists, strict=True)
    ]
    return added, None if classes is None else [*classes]


def _lists(cells: Sequence[Any], column: str) -> list[list[Any]]:
    """Return the lists in the cells of a column, or in their texts."""
    lists = []
    for number, value in enumerate(cells):
        if isinstance(value, str):
            try:
                value = ast.literal_eval(value.strip())
            except (ValueError, SyntaxError):
                value = ()
        reason = f"row {number} is not a list such as ['cat', 'dog'], unlike others"
        refuse_if(not isinstance(value, list), "targets", column, reason)
        lists.append(value)
    return lists
