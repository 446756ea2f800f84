"""The table in docs/private_names.md lists exactly the private names of other libraries that are used."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("runner", "callbacks", "algorithms")
# Documented names that begin with an underscore: of the standard library, and keys of Hydra configs.
PUBLIC = {"_exit", "_replace", "_asdict", "_fields", "_target_", "_partial_", "_args_", "_convert_", "_recursive_"}
PUBLIC |= {"_current_frames"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC


def files() -> list[Path]:
    paths = [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in paths if not any(parent.is_symlink() for parent in path.parents)]


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def used_in(tree: ast.AST, here: set[str], anywhere: set[str]) -> Iterator[str]:
    """Yield private names of other libraries: imported ones, and attributes that no class of ours defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in OURS:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in dotted if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in (anywhere if is_own(node.value) else here):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
            if isinstance(name, str) and is_private(name) and name not in here:
                yield name
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name, value = node.slice.value, node.value
            of_object = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "vars"
            if of_object and isinstance(name, str) and is_private(name) and name not in here:
                yield name


def used() -> set[tuple[str, str]]:
    """Return pairs of a file and a private name of another library that it uses."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files()}
    own = {path: defined_in(tree) for path, tree in trees.items()}
    anywhere = set().union(*own.values())
    return {(path, name) for path, tree in trees.items() for name in used_in(tree, own[path], anywhere)}


def listed() -> list[tuple[str, str]]:
    """Return pairs of a file and a pattern of private names, from the table."""
    text = (ROOT / "docs" / "private_names.md").read_text(encoding="utf-8")
    _, _, section = text.partition("\n## Private names of other libraries\n")
    section = section.partition("\n## ")[0]
    pairs = []
    for row in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE):
        names, places, _ = row.split(" | ")
        paths = re.findall(r"`([^`]+\.py)`", places)
        patterns = re.findall(r"`([^`]+)`", names)
        pairs += [(path, pattern) for path in paths for pattern in patterns]
    return pairs


def is_listed(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name; imported names are dotted."""
    return fnmatchcase(name, pattern) or ("." not in name and fnmatchcase(name, pattern.rpartition(".")[2]))


@pytest.mark.slow
def test_every_private_name_is_in_the_table():
    table = listed()
    missing = {(path, name) for path, name in used() if not any(path == p and is_listed(name, q) for p, q in table)}
    assert missing == set()


def test_every_row_of_the_table_is_used():
    assert listed()
    for path, pattern in listed():
        last = re.escape(pattern.rpartition(".")[2]).replace(r"\*", r"\w*")
        assert re.search(rf"\b{last}\b", (ROOT / path).read_text(encoding="utf-8")), f"{path} has no {pattern}"


def test_private_names_are_found_in_imports_attributes_getattr_and_vars():
    tree = ast.parse(
        "import hydra._internal\n"
        "from torch._C import one\n"
        "from torch.nn import _two\n"
        "def _own(): torch._three(_four=torch.five()._six)\n"
        "getattr(source, '_seven', None)\n"
        "vars(source)['_eight'] = torch._own + self._inherited\n"
    )
    here = defined_in(tree)
    names = {*used_in(tree, here, here | {"_inherited"})}
    assert names == {"hydra._internal", "torch._C.one", "torch.nn._two", "_three", "_six", "_seven", "_eight"}
