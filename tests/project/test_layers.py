"""The shape of the code, read from its source: who may import whom, how long things are, what is documented.

Nothing here imports the packages: what happens to be installed or loaded changes no result.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The rooms of runner/ from top to bottom. An import only points down; rooms side by side do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("program",),
    ("verbs",),
    ("sweeps",),
    ("trials",),
    ("history",),
    ("comparing", "recorder"),
    ("records",),
    ("config",),
    ("cli",),
    ("algorithms", "callbacks", "compat"),
    ("training",),
    ("models",),
    ("checkpoints", "data"),
    ("optim",),
    ("core",),
    ("libraries", "pictures", "terminal"),
    ("device", "distributed"),
    ("failures",),
    ("files", "timing"),
)
NAMED_ABOVE = {
    ("runner.callbacks.crash_bundle", "records"),
    ("runner.distributed.fork_server", "data"),
    ("runner.training.arguments", "callbacks"),
    ("runner.training.trainer", "program"),
}
"""Modules that name one of a higher room in a string, and import it when it is needed."""
OF_USERS = ROOT / "runner" / "verbs" / "project"  # what `runner init` copies: it imports as users do
LAYER = {name: layer for layer, names in enumerate(reversed(LAYERS)) for name in names}
PLUGINS = ("callbacks", "algorithms")
PLUGIN_LAYER = LAYER["callbacks"]
CONFIG_LIBRARIES = {"hydra", "omegaconf"}

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ENGINE_CODE_LINES = 3548  # no blank lines, comments, docstrings
# What trains: these rooms without what is only looked at, and these files of other rooms.
ENGINE_ROOMS = ("core", "training")
NO_ENGINE = {
    "core/logged",
    "core/plugins",
    "training/budget",
    "training/final_test",
    "training/fit_result",
    "training/metric_choice",
    "training/metric_direction",
}
ENGINE_IN_OTHER_ROOMS = {
    *("checkpoints/files", "checkpoints/snapshot", "device/batch", "models/loss", "models/model", "models/surgery"),
    *("optim/factories", "optim/scheduled_rates", "optim/steps", "timing/event", "timing/time"),
    *(f"distributed/{name}" for name in ("collectives", "gradients", "ranks", "signals", "store")),
}


@dataclass(frozen=True)
class Source:
    """One parsed file of the project."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Its dotted name; a package's is the folder's."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "runner" else ("runner", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Where a node stands, as editors understand it."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """One name that is imported, wherever in the file that happens."""

    target: str  # 'runner.timing.event.Event' for `from runner.timing.event import Event`
    where: str

    @property
    def top(self) -> str:
        """The package it comes from."""
        return self.target.partition(".")[0]


@functools.cache
def sources(package: str) -> tuple[Source, ...]:
    """Every Python file of a package, by path."""
    files = sorted(file for file in (ROOT / package).rglob("*.py") if not file.is_relative_to(OF_USERS))
    assert files, f"{package}/ has no Python file"
    texts = [(file, file.read_text(encoding="utf-8")) for file in files]
    return tuple(Source(file, text, ast.parse(text, str(file))) for file, text in texts)


def all_sources() -> tuple[Source, ...]:
    """Every Python file of the three packages."""
    return sources("runner") + sources("callbacks") + sources("algorithms")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node` that exists at run time: the body of `if TYPE_CHECKING` does not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from statements(other)
        else:
            yield child
            yield from statements(child)


def imports(source: Source) -> Iterator[Import]:
    """The imports of a file at run time, also in functions and through `import_module` with a constant name."""
    package = source.module if source.path.name == "__init__.py" else source.module.rpartition(".")[0]
    for node in statements(source.tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(name.name, source.at(node)) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""
                origin = ".".join(part for part in (base, module) if part)
                yield from (Import(f"{origin}.{name.name}", source.at(node)) for name in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, source.at(node))


def runner_part(target: str) -> str:
    """The room that an import names; empty for a name of the package itself."""
    part = target.split(".")[1] if "." in target else ""
    return part if part in LAYER or (ROOT / "runner" / part).is_dir() else ""


def layer_of(part: str, where: str) -> int:
    """The layer of a room; an unknown one fails the test."""
    if part not in LAYER:
        pytest.fail(f"{where}: runner/{part} has no layer; place it in LAYERS in {Path(__file__).relative_to(ROOT)}")
    return LAYER[part]


def report(problems: list[str]) -> None:
    """Fails with every problem, one a line."""
    assert not problems, "\n" + "\n".join(problems)


def test_every_room_in_runner_has_a_layer():
    for source in sources("runner"):
        if source.module != "runner":
            layer_of(source.module.split(".")[1], str(source.path.relative_to(ROOT)))
    gone = [
        name
        for name in sorted(LAYER)
        if not (ROOT / "runner" / f"{name}.py").exists() and not (ROOT / "runner" / name).is_dir()
    ]
    assert not gone, f"runner/ has none of {gone}; remove them from LAYERS"


def test_an_import_in_runner_only_points_down():
    problems = []
    for source in sources("runner"):
        if source.module == "runner":
            continue
        own = source.module.split(".")[1]
        for found in imports(source):
            if found.top != "runner" or found.target == "runner.__version__":
                continue
            part = runner_part(found.target)
            if not part:
                problems.append(f"{found.where}: imports {found.target}; name the file that has it")
            elif part != own and layer_of(part, found.where) >= layer_of(own, found.where):
                problems.append(f"{found.where}: layer {LAYER[own]} imports {found.target} of layer {LAYER[part]}")
    report(problems)


def named_modules(source: Source) -> Iterator[Import]:
    """The modules that a file names in strings of code, such as 'runner.data.workers:work'."""
    docstrings = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                if re.fullmatch(r"runner(\.[a-z_]\w*)+(:\w+)?", text):
                    yield Import(text.partition(":")[0], source.at(node))


def exists(module: str) -> bool:
    """Whether a module is a file or a folder of the project."""
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_a_module_that_is_named_in_a_string_exists_and_is_below_or_listed():
    problems = []
    listed = set()
    for source in all_sources():
        own = source.module.split(".")[1] if "." in source.module else ""
        for found in named_modules(source):
            part = runner_part(found.target)
            if found.target.count(".") == 1 and not part:  # a tag of a run, such as runner.parent
                continue
            if not exists(found.target):
                problems.append(f"{found.where}: there is no {found.target}")
            elif part and own and part != own and layer_of(part, found.where) >= LAYER[own]:
                listed.add((source.module, part))
                if (source.module, part) not in NAMED_ABOVE:
                    problems.append(f"{found.where}: names {found.target}, which lies above")
    report(problems)
    assert listed == NAMED_ABOVE


def test_runner_holds_rooms_only():
    files = {path.name for path in (ROOT / "runner").iterdir() if path.is_file()}
    assert files <= {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def test_imports_in_runner_have_no_cycle():
    graph: dict[str, set[str]] = {}
    modules = {source.module for source in sources("runner")}
    for source in sources("runner"):
        targets = {found.target for found in imports(source) if found.top == "runner"}
        named = {target if target in modules else target.rpartition(".")[0] for target in targets}
        graph[source.module] = named - {source.module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_the_package_itself_imports_nothing_of_the_project():
    (init,) = (source for source in sources("runner") if source.module == "runner")
    eager = [found for found in imports(init) if found.top == "runner"]
    report([f"{found.where}: imports {found.target}; load it lazily" for found in eager])


def test_runner_never_imports_callbacks_or_algorithms():
    report(
        [
            f"{found.where}: imports {found.target}; only a _target_ in conf/ knows both"
            for source in sources("runner")
            for found in imports(source)
            if found.target.split(".")[1:2] in [[one] for one in PLUGINS]
        ]
    )


@pytest.mark.parametrize("package", PLUGINS)
def test_callbacks_and_algorithms_import_only_public_names_of_runner(package: str):
    problems = []
    for source in sources(package):
        for found in imports(source):
            parts = found.target.split(".")
            if found.top != "runner":
                continue
            shared = len(parts) > 2 and parts[1] == package and parts[2].startswith("_")
            if parts[1:2] in [[one] for one in PLUGINS] and not shared:
                problems.append(f"{found.where}: imports {found.target}; only {package}/_*.py is shared")
            elif not shared and any(part.startswith("_") for part in parts):
                problems.append(f"{found.where}: imports {found.target}, which is private")
            part = runner_part(found.target)
            if part and layer_of(part, found.where) > PLUGIN_LAYER:
                problems.append(f"{found.where}: imports {found.target} of layer {LAYER[part]}")
    report(problems)


def test_only_the_top_layers_import_the_configuration_libraries():
    above = [["runner", name] for name, layer in LAYER.items() if layer > PLUGIN_LAYER]
    report(
        [
            f"{found.where}: imports {found.target}; only {', '.join(name for _, name in above)} of runner/ may"
            for source in all_sources()
            if source.module.split(".")[:2] not in above
            for found in imports(source)
            if found.top in CONFIG_LIBRARIES
        ]
    )


def test_a_config_is_subscripted_in_its_own_room_only():
    """Everywhere else, an `Experiment` or a `Section` is asked by name."""
    places = [
        f"{source.at(node)}: ask the Experiment"
        for source in all_sources()
        if not source.module.startswith("runner.config.")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and ast.unparse(node.value).rpartition(".")[2] == "config"
    ]
    report(places)


def test_only_sections_call_instantiate():
    places = []
    for source in all_sources():
        if source.module == "runner.config.section":
            continue
        places += [found.where for found in imports(source) if "instantiate" in found.target.split(".")]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == "instantiate":
                places.append(source.at(node))
    report([f"{where}: instantiate belongs to runner/config/section.py" for where in places])


@pytest.mark.parametrize("name", ["failures", "files", "timing"])
def test_the_lowest_rooms_need_the_standard_library_only(name: str):
    allowed = sys.stdlib_module_names | {"runner"}
    found = [one for one in sources("runner") if one.module.split(".")[1:2] == [name]]
    assert found
    report([f"{one.where}: imports {one.target}" for file in found for one in imports(file) if one.top not in allowed])


def test_a_wrong_argument_is_raised_with_its_name_and_value():
    """`wrong_argument` and `refuse_if` keep both as facts, for callers and for `--json`."""
    problems = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Raise) or not isinstance(raised := node.exc, ast.Call):
                continue
            is_plain = ast.unparse(raised.func) in ("ValueError", "TypeError")
            if (
                is_plain
                and raised.args
                and re.match(r"""f["'](\{?)[\w.]+\1=\{[^{}]*!r\}: """, ast.unparse(raised.args[0]))
            ):
                problems.append(f"{source.at(node)}: raise wrong_argument(name, value, reason)")
    rooms_below = ("runner/files/", "runner/timing/")
    report([one for one in problems if not one.startswith(rooms_below)])


def test_all_exceptions_stand_in_one_file():
    (file,) = (source for source in sources("runner") if source.module == "runner.failures.errors")
    ours = tuple(node.name for node in file.tree.body if isinstance(node, ast.ClassDef))
    roots = ("Exception", "Error", "SystemExit", "Interrupt", "Warning", *ours)
    problems = [
        f"{source.at(node)}: {node.name} is an exception; it belongs to runner/failures/errors.py"
        for source in all_sources()
        if source.module != "runner.failures.errors"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(roots) for base in node.bases)
    ]
    report(problems)


@pytest.mark.parametrize("package", ["runner", *PLUGINS])
def test_no_file_is_long(package: str):
    problems = []
    for source in sources(package):
        lines = len(source.text.splitlines())
        if lines > MAX_LINES:
            problems.append(f"{source.path.relative_to(ROOT)}: {lines} lines, at most {MAX_LINES}")
    report(problems)


def test_no_function_is_long():
    problems = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    problems.append(f"{source.at(node)}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    report(problems)


def code_lines(text: str) -> int:
    """The number of lines that hold code: not blank, no comment, no docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone documents what encloses it, or the attribute before it.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_code_lines_counts_code_only():
    documented = '"""Doc."""\n\n# reason\ndef f(\n    a,  # why\n):\n    """Doc.\n\n    More.\n    """\n'
    assert code_lines(documented) == 3
    assert code_lines(documented + '    return """x\n\ny"""\n') == 6
    assert code_lines('class A:\n    x: int\n    """Doc of x,\n    in two lines."""\n') == 2


def test_the_engine_stays_small():
    rooms = {f"{room}/{file.stem}" for room in ENGINE_ROOMS for file in (ROOT / "runner" / room).glob("*.py")}
    names = rooms - NO_ENGINE | ENGINE_IN_OTHER_ROOMS
    counts = {name: code_lines((ROOT / "runner" / f"{name}.py").read_text(encoding="utf-8")) for name in names}
    listing = "\n".join(f"{lines:5} {name}" for name, lines in sorted(counts.items(), key=lambda item: -item[1]))
    assert sum(counts.values()) <= MAX_ENGINE_CODE_LINES, f"{sum(counts.values())} lines of code:\n{listing}"


def test_everything_public_is_documented():
    classes = {
        node.name: node for source in all_sources() for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)
    }
    problems = []
    for source in all_sources():
        if ast.get_docstring(source.tree) is None:
            problems.append(f"{source.path.relative_to(ROOT)}: the file has no docstring")
        for node in source.tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                problems.append(f"{source.at(node)}: {node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                problems += [
                    f"{source.at(method)}: {node.name}.{method.name} has no docstring, nor has a base's"
                    for method in node.body
                    if isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("_")
                    and not is_setter(method)
                    and not is_documented(method.name, node, classes)
                ]
    report(problems)


def is_setter(method: ast.FunctionDef) -> bool:
    """Whether a method only sets the property that its getter documents."""
    return any(isinstance(mark, ast.Attribute) and mark.attr == "setter" for mark in method.decorator_list)


def is_documented(method: str, owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a method has a docstring in `owner` or in a base; bases of other libraries document their own."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == method and ast.get_docstring(node) is not None:
            return True
    silent = {"Enum", "StrEnum", "NamedTuple", "Protocol", "Generic", "ABC", "object"}
    for base in owner.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in silent or name == owner.name:
            continue
        if name not in classes or is_documented(method, classes[name], classes):
            return True
    return False


def test_the_tests_are_no_package():
    packages = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py")]
    assert not packages, f"{packages} would shadow the packages under test"
