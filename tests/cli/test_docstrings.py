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
    """The folder of an importable package `mine`."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("from mine.main import Plain\n")
    (folder / "main.py").write_text(SOURCE)
    (folder / "other.py").write_text('def Far(n=1):\n    """Goes."""\n')
    (folder / "loop.py").write_text("from mine.loop import It\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_definitions_are_found_through_imports_without_importing(package: Path):
    plain = find_definition("mine.Plain")
    assert plain is not None and plain.file == package / "main.py"
    assert plain.arguments == {"a": "", "b": "3"}
    assert plain.sections[""] == "Does it.\n\nMore of it.\n\nSource: a book."
    assert plain.rows("Args") == [("a", "the first, in two lines."), ("b", "the second.")]
    assert plain.rows("Raises") == [("ValueError", "it is wrong.")] and plain.rows("Logs") == []
    near = find_definition("mine.main.Near")
    assert near is not None and near.text == "Goes." and near.arguments == {"n": "1"}
    assert "mine" not in sys.modules


def test_the_arguments_of_a_dataclass_are_its_fields(package: Path):
    assert [definition.name for definition in classes_in(package / "main.py")] == ["Plain", "Data", "More"]
    data = find_definition("mine.main.Data")
    assert data is not None and data.arguments == {"x": "0.5", "y": "''"}
    assert data.annotations == {"x": "float", "y": "str"}


@pytest.mark.parametrize("name", ["More", "load_more"])
def test_arguments_are_inherited_and_taken_from_the_class_of_a_function(name: str):
    more = find_definition(f"mine.main.{name}")
    assert more is not None and more.arguments == {"x": "0.5", "y": "'b'", "z": "2"}


@pytest.mark.parametrize("target", ["mine", "mine.absent", "mine.loop.It", "nowhere.X", "", ".", "sys.exit", "mine..x"])
def test_targets_without_source_are_none(target: str):
    assert find_definition(target) is None


def test_lazily_imported_names_of_the_runner_are_found():
    for target in ("runner.ClassificationModel", "runner.algorithms.EMA", "runner.optim.schedulers.step"):
        assert find_definition(target) is not None, target
    assert find_definition("runner.callbacks.EMA") is None
