"""The structure of the code, read from its source: imports between rooms, lengths and docstrings.

Nothing here imports the packages, so results do not depend on what is installed or loaded.
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

# The rooms of runner/ from top to bottom. Imports only point down, and never to a room on the same line.
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
"""Modules that name a higher room in a string, to import it when needed."""
OF_USERS = ROOT / "runner" / "verbs" / "project"  # copied by `runner init`; imports like code of users
LAYER = {name: layer for layer, names in enumerate(reversed(LAYERS)) for name in names}
PLUGINS = ("callbacks", "algorithms")
PLUGIN_LAYER = LAYER["callbacks"]
CONFIG_LIBRARIES = {"hydra", "omegaconf"}

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ENGINE_CODE_LINES = 3585  # no blank lines, comments, docstrings
# The engine: these rooms without the files that do not train, and these files of other rooms.
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
        """The dotted name; an `__init__` has that of its folder."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "runner" else ("runner", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Return the place of a node as file:line."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@dataclass(frozen=True)
class Import:
    """An imported name, and the place of the import."""

    target: str  # 'runner.timing.event.Event' for `from runner.timing.event import Event`
    where: str

    @property
    def top(self) -> str:
        """The top-level package."""
        return self.target.partition(".")[0]


@functools.cache
def sources(package: str) -> tuple[Source, ...]:
    """Return every Python file of a package, sorted by path."""
    files = sorted(file for file in (ROOT / package).rglob("*.py") if not file.is_relative_to(OF_USERS))
    assert files, f"{package}/ has no Python file"
    texts = [(file, file.read_text(encoding="utf-8")) for file in files]
    return tuple(Source(file, text, ast.parse(text, str(file))) for file, text in texts)


def all_sources() -> tuple[Source, ...]:
    """Return every Python file of the three packages."""
    return sources("runner") + sources("callbacks") + sources("algorithms")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below `node` that exists at run time, so without bodies of `if TYPE_CHECKING`."""
    waiting = [*ast.iter_child_nodes(node)]
    for child in waiting:
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += child.orelse
        else:
            yield child
            waiting += ast.iter_child_nodes(child)


@functools.cache
def imports(source: Source) -> tuple[Import, ...]:
    """Return all imports of a file at run time, also in functions and by `import_module` with a constant name."""
    return tuple(find_imports(source))


def find_imports(source: Source) -> Iterator[Import]:
    """Yield the imports for `imports`."""
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
    """Return the room of an import; empty for a name of the package itself."""
    part = target.split(".")[1] if "." in target else ""
    return part if part in LAYER or (ROOT / "runner" / part).is_dir() else ""


def layer_of(part: str, where: str) -> int:
    """Return the layer of a room; an unknown room fails the test."""
    if part not in LAYER:
        pytest.fail(f"{where}: runner/{part} has no layer; place it in LAYERS in {Path(__file__).relative_to(ROOT)}")
    return LAYER[part]


def report(problems: list[str]) -> None:
    """Fail with all problems, one per line."""
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
        for imported in imports(source):
            if imported.top != "runner" or imported.target == "runner.__version__":
                continue
            part = runner_part(imported.target)
            if not part:
                problems.append(f"{imported.where}: imports {imported.target}; name the file that has it")
            elif part != own and layer_of(part, imported.where) >= layer_of(own, imported.where):
                problems.append(
                    f"{imported.where}: layer {LAYER[own]} imports {imported.target} of layer {LAYER[part]}"
                )
    report(problems)


def named_modules(source: Source) -> Iterator[Import]:
    """Yield the modules that a file names in strings, such as 'runner.data.workers:work'; not in docstrings."""
    docstrings = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                if re.fullmatch(r"runner(\.[a-z_]\w*)+(:\w+)?", text):
                    yield Import(text.partition(":")[0], source.at(node))


def exists(module: str) -> bool:
    """Return whether a module is a file or a folder of the project."""
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_a_module_named_in_a_string_exists_and_is_lower_or_listed():
    problems = []
    listed = set()
    for source in all_sources():
        own = source.module.split(".")[1] if "." in source.module else ""
        for imported in named_modules(source):
            part = runner_part(imported.target)
            if imported.target.count(".") == 1 and not part:  # a tag of a run, such as runner.parent
                continue
            if not exists(imported.target):
                problems.append(f"{imported.where}: there is no {imported.target}")
            elif part and own and part != own and layer_of(part, imported.where) >= LAYER[own]:
                listed.add((source.module, part))
                if (source.module, part) not in NAMED_ABOVE:
                    problems.append(f"{imported.where}: names {imported.target}, which is in a higher layer")
    report(problems)
    assert listed == NAMED_ABOVE


def test_runner_has_no_modules_outside_of_rooms():
    files = {path.name for path in (ROOT / "runner").iterdir() if path.is_file()}
    assert files <= {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def test_imports_in_runner_have_no_cycle():
    graph: dict[str, set[str]] = {}
    modules = {source.module for source in sources("runner")}
    for source in sources("runner"):
        targets = {imported.target for imported in imports(source) if imported.top == "runner"}
        named = {target if target in modules else target.rpartition(".")[0] for target in targets}
        graph[source.module] = named - {source.module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_the_package_itself_imports_nothing_of_the_project():
    (init,) = (source for source in sources("runner") if source.module == "runner")
    eager = [imported for imported in imports(init) if imported.top == "runner"]
    report([f"{imported.where}: imports {imported.target}; import it lazily" for imported in eager])


def test_runner_never_imports_callbacks_or_algorithms():
    report(
        [
            f"{imported.where}: imports {imported.target}; only a _target_ in conf/ knows both"
            for source in sources("runner")
            for imported in imports(source)
            if imported.target.split(".")[1:2] in [[package] for package in PLUGINS]
        ]
    )


@pytest.mark.parametrize("package", PLUGINS)
def test_callbacks_and_algorithms_import_only_public_names_of_runner(package: str):
    problems = []
    for source in sources(package):
        for imported in imports(source):
            parts = imported.target.split(".")
            if imported.top != "runner":
                continue
            shared = len(parts) > 2 and parts[1] == package and parts[2].startswith("_")
            if parts[1:2] in [[plugin] for plugin in PLUGINS] and not shared:
                problems.append(f"{imported.where}: imports {imported.target}; only {package}/_*.py is shared")
            elif not shared and any(part.startswith("_") for part in parts):
                problems.append(f"{imported.where}: imports {imported.target}, which is private")
            part = runner_part(imported.target)
            if part and layer_of(part, imported.where) > PLUGIN_LAYER:
                problems.append(f"{imported.where}: imports {imported.target} of layer {LAYER[part]}")
    report(problems)


def test_only_the_top_layers_import_the_configuration_libraries():
    above = [["runner", name] for name, layer in LAYER.items() if layer > PLUGIN_LAYER]
    report(
        [
            f"{imported.where}: imports {imported.target}; only {', '.join(name for _, name in above)} of runner/ may"
            for source in all_sources()
            if source.module.split(".")[:2] not in above
            for imported in imports(source)
            if imported.top in CONFIG_LIBRARIES
        ]
    )


def test_only_the_room_config_subscripts_a_config():
    """Code elsewhere uses the attributes of an `Experiment` or a `Section`."""
    places = [
        f"{source.at(node)}: use an attribute of the Experiment"
        for source in all_sources()
        if not source.module.startswith("runner.config.")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and ast.unparse(node.value).rpartition(".")[2] == "config"
    ]
    report(places)


def test_only_section_py_uses_instantiate():
    places = []
    for source in all_sources():
        if source.module == "runner.config.section":
            continue
        places += [imported.where for imported in imports(source) if "instantiate" in imported.target.split(".")]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == "instantiate":
                places.append(source.at(node))
    report([f"{where}: instantiate belongs to runner/config/section.py" for where in places])


@pytest.mark.parametrize("name", ["failures", "files", "timing"])
def test_the_lowest_rooms_import_only_the_standard_library(name: str):
    allowed = sys.stdlib_module_names | {"runner"}
    files = [source for source in sources("runner") if source.module.split(".")[1:2] == [name]]
    assert files
    foreign = [imported for file in files for imported in imports(file) if imported.top not in allowed]
    report([f"{imported.where}: imports {imported.target}" for imported in foreign])


def test_wrong_arguments_are_raised_by_wrong_argument():
    """`wrong_argument` and `refuse_if` keep both as facts, for callers and for `--json`."""
    problems = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Raise) or not isinstance(raised := node.exc, ast.Call):
                continue
            is_plain = ast.unparse(raised.func) in ("ValueError", "TypeError")
            names_value = re.compile(r"""f["'](\{?)[\w.]+\1=\{[^{}]*!r\}: """)
            if is_plain and raised.args and names_value.match(ast.unparse(raised.args[0])):
                problems.append(f"{source.at(node)}: raise wrong_argument(name, value, reason)")
    rooms_below = ("runner/files/", "runner/timing/")
    report([problem for problem in problems if not problem.startswith(rooms_below)])


def test_all_exceptions_are_defined_in_one_file():
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
def test_no_file_is_too_long(package: str):
    problems = []
    for source in sources(package):
        lines = len(source.text.splitlines())
        if lines > MAX_LINES:
            problems.append(f"{source.path.relative_to(ROOT)}: {lines} lines, at most {MAX_LINES}")
    report(problems)


def test_no_function_is_too_long():
    problems = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    problems.append(f"{source.at(node)}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    report(problems)


def code_lines(text: str) -> int:
    """Count the lines of code: without blank lines, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # A string statement documents its scope, or the attribute above it.
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
                    f"{source.at(method)}: {node.name}.{method.name} has no docstring, and no base has one"
                    for method in node.body
                    if isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("_")
                    and not is_setter(method)
                    and not is_documented(method.name, node, classes)
                ]
    report(problems)


def is_setter(method: ast.FunctionDef) -> bool:
    """Return whether a method is the setter of a property, which the getter documents."""
    return any(isinstance(mark, ast.Attribute) and mark.attr == "setter" for mark in method.decorator_list)


def is_documented(method: str, owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Return whether a method has a docstring in `owner` or a base; bases of other libraries count as documented."""
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


def test_tests_are_no_package():
    packages = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py")]
    assert not packages, f"{packages} would shadow the packages under test"
