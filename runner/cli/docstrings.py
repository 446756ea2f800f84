"""The docstring and the arguments of a `_target_`, read from its source. Nothing is imported, torch least of all."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from runner.files.whole import read_bounded

INIT = "__init__.py"
LARGEST = 2_000_000  # bytes of a source file to read
MOST_LINKS = 8  # imports of a name to follow, from one module to the next


@dataclass(frozen=True)
class Definition:
    """A class or function as its source defines it.

    Defaults and annotations are as written; missing defaults, annotations and docstrings are empty.
    """

    name: str
    file: Path
    text: str
    arguments: dict[str, str] = field(default_factory=dict)
    """The default of each argument."""
    annotations: dict[str, str] = field(default_factory=dict)
    """The annotation of each argument."""
    is_dataclass: bool = False

    @property
    def sections(self) -> dict[str, str]:
        """The docstring by section, such as 'Args'; the text before the first section has an empty name."""
        texts = {"": ""}
        title = ""
        for line in self.text.splitlines():
            if re.fullmatch(r"(Args|Raises|Logs|Returns|Yields|Attributes):", line):
                title = line[:-1]
                texts[title] = ""
                continue
            if re.match(r"\S", line):  # a section is indented below its title
                title = ""
            texts[title] += f"{line}\n"
        return {title: inspect.cleandoc(text) for title, text in texts.items()}

    def rows(self, title: str) -> list[tuple[str, str]]:
        """Return the entries of a section, such as its arguments, as pairs of name and text."""
        entries: list[tuple[str, str]] = []
        for line in self.sections.get(title, "").splitlines():
            entry = re.match(r"([^\s:][^:]*): (.*)", line)
            if entry:
                entries.append((entry[1], entry[2]))
            elif entries:
                entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}".strip())
        return entries


def find_definition(target: str) -> Definition | None:
    """Return the class or function with a dotted path; None if its source cannot be found."""
    package, *parts = target.split(".")
    try:
        module = _top_module(package)
        return None if module is None or not parts else _find_in(module, parts, MOST_LINKS)
    except (OSError, ImportError, SyntaxError, ValueError, RecursionError):
        return None


def classes_in(file: Path) -> list[Definition]:
    """Return the public classes of a file; an empty list if it cannot be read."""
    try:
        body = ast.parse(read_bounded(file, LARGEST)).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return [_define(node, file) for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def _find_in(module: Path, parts: list[str], links: int) -> Definition | None:
    """Return the definition that `parts` name in a module's file, following imports of the name."""
    while len(parts) > 1 and module.name == INIT and (below := _submodule(module.parent, parts[0])):
        module = below
        parts = parts[1:]
    name = parts[0]
    stub = module.with_suffix(".pyi")
    for file in (stub, module) if stub.exists() else (module,):
        for node in ast.walk(ast.parse(read_bounded(file, LARGEST))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and len(parts) == 1:
                return _with_inherited(_define(node, file), node, module, links)
            if isinstance(node, ast.Assign) and links and (made_from := _made_from(node, name)):
                return _find_in(module, [made_from], links - 1)
            if isinstance(node, ast.ImportFrom) and links:
                for alias in node.names:
                    if name == (alias.asname or alias.name) and (origin := _module_of(node, module)):
                        return _find_in(origin, [alias.name, *parts[1:]], links - 1)
    return None


def _made_from(node: ast.Assign, name: str) -> str:
    """Return the class that a function is made from, as in `load = data_function("load", Text)`, or ''."""
    is_named = any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    last = node.value.args[-1] if is_named and isinstance(node.value, ast.Call) and node.value.args else None
    return last.id if isinstance(last, ast.Name) else ""


def _with_inherited(definition: Definition, node: ast.AST, module: Path, links: int) -> Definition:
    """Return a definition; if it is a dataclass, its inherited arguments come first."""
    if not (isinstance(node, ast.ClassDef) and definition.is_dataclass and links):
        return definition
    for base in node.bases:
        above = _find_in(module, [base.id], links - 1) if isinstance(base, ast.Name) else None
        if above is not None:
            arguments = above.arguments | definition.arguments
            annotations = above.annotations | definition.annotations
            definition = replace(definition, arguments=arguments, annotations=annotations)
    return definition


def _module_of(node: ast.ImportFrom, module: Path) -> Path | None:
    """Return the file of the module that an import names."""
    names = node.module.split(".") if node.module else []
    if node.level:
        file: Path | None = module.parents[node.level - 1] / INIT
    else:
        file = _top_module(names[0])
        names = names[1:]
    for name in names:
        file = None if file is None else _submodule(file.parent, name)
    return file


def _top_module(name: str) -> Path | None:
    """Return the file of a top-level module or package; for a namespace package, the file that it would have."""
    spec = PathFinder.find_spec(name, [*sys.path, os.getcwd()])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))) / INIT
    return None if spec.origin is None else Path(spec.origin)


def _submodule(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name / INIT, folder / f"{name}.py") if path.is_file()), None)


def _define(node: ast.ClassDef | ast.FunctionDef, file: Path) -> Definition:
    function = node
    if isinstance(node, ast.ClassDef):
        methods = [statement for statement in node.body if isinstance(statement, ast.FunctionDef)]
        function = next((method for method in methods if method.name == "__init__"), node)
    arguments = _fields(function) if isinstance(function, ast.ClassDef) else _parameters(function)
    defaults = {name: _as_written(default) for name, (default, _) in arguments.items()}
    annotations = {name: _as_written(annotation) for name, (_, annotation) in arguments.items()}
    is_dataclass = isinstance(function, ast.ClassDef) and _is_dataclass(function)
    return Definition(node.name, file, ast.get_docstring(node) or "", defaults, annotations, is_dataclass)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _fields(node: ast.ClassDef) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
    """Return the default and the annotation of each field of a dataclass, by name."""
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return {ast.unparse(field.target): (field.value, field.annotation) for field in fields if _is_dataclass(node)}


def _parameters(node: ast.FunctionDef) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
    """Return the default and the annotation of each parameter of a function, by name."""
    named = node.args
    positional = [*named.posonlyargs, *named.args]
    defaults = [None] * (len(positional) - len(named.defaults)) + list(named.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(named.kwonlyargs, named.kw_defaults, strict=True)]
    return {argument.arg: (default, argument.annotation) for argument, default in pairs if argument.arg != "self"}


def _as_written(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)
