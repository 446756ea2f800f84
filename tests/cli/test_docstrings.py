"""Docstrings and arguments, read from source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from runner.cli.docstrings import classes_in, find_definition

SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass
from .other import Far as Near

class Plain:
    """Does it.

    More of it.

    Args:
        a: the first,
            in two lines.
        b: the second.

    Raises:
        ValueError: it is wrong.

    Source: a book.
    """

    def __init__(self, a, *, b: int = 3): ...

@dataclass(frozen=True)
class Data:
    """Holds."""

    x: float = 0.5
    y: str = ""

@dataclass(frozen=True)
class More(Data):
    y: str = "b"
    z: int = 2

load_more = function_of("load_more", More)

raise RuntimeError("imported")
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("from mine.main import Plain\n")
    (folder / "main.py").write_text(SOURCE)
    (folder / "other.py").write_text('def Far(n=1):\n    """Goes."""\n')
    (folder / "loop.py").write_text("from mine.loop import It\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_an_import_is_followed_and_nothing_is_imported(package: Path):
    found = find_definition("mine.Plain")
    assert found is not None and found.file == package / "main.py"
    assert found.arguments == {"a": "", "b": "3"}
    assert found.sections[""] == "Does it.\n\nMore of it.\n\nSource: a book."
    assert found.rows("Args") == [("a", "the first, in two lines."), ("b", "the second.")]
    assert found.rows("Raises") == [("ValueError", "it is wrong.")] and found.rows("Logs") == []
    near = find_definition("mine.main.Near")
    assert near is not None and near.text == "Goes." and near.arguments == {"n": "1"}
    assert "mine" not in sys.modules


def test_fields_of_a_dataclass_are_its_arguments(package: Path):
    assert [one.name for one in classes_in(package / "main.py")] == ["Plain", "Data", "More"]
    data = find_definition("mine.main.Data")
    assert data is not None and data.arguments == {"x": "0.5", "y": "''"}
    assert data.annotations == {"x": "float", "y": "str"}


@pytest.mark.parametrize("name", ["More", "load_more"])
def test_arguments_may_be_inherited_or_those_of_a_class_behind_a_function(name: str):
    more = find_definition(f"mine.main.{name}")
    assert more is not None and more.arguments == {"x": "0.5", "y": "'b'", "z": "2"}


@pytest.mark.parametrize("target", ["mine", "mine.absent", "mine.loop.It", "nowhere.X", "", ".", "sys.exit", "mine..x"])
def test_what_has_no_source_is_none(target: str):
    assert find_definition(target) is None


def test_our_lazy_names_are_found():
    for target in (
        "runner.ClassificationModel",
        "runner.callbacks.EMA",
        "runner.algorithms.EMA",
        "runner.optim.schedulers.step",
    ):
        found = find_definition(target)
        assert (found is None) == (target == "runner.callbacks.EMA")
