"""`pyproject.toml` declares exactly the packages that the project imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("runner", "callbacks", "algorithms")
FINDERS = ("find_spec", "import_hf", "import_module", "import_torchvision")
NAMES = {  # the distributions of imports with another name
    "hydra": "hydra-core",
    "PIL": "pillow",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "google_crc32c": "google-crc32c",
    "mlperf_logging": "mlperf-logging",
}
NOT_DECLARED = {
    "IPython": "is installed with notebooks",
    "aiohttp": "comes with fsspec[http]",
    "pandas": "comes with MLflow, whose pyfunc imports it",
}
NOT_IMPORTED = {
    "hydra-joblib-launcher": "Hydra loads it",
    "hydra-submitit-launcher": "Hydra loads it",
    "onnx": "torch.onnx uses it",
    "onnxscript": "torch.onnx uses it",
}


@cache
def imported() -> dict[str, str]:
    """Return the third-party packages that the project imports, each with a file that imports it."""
    files: dict[str, str] = {}
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if name.startswith(("runner/callbacks/", "runner/algorithms/", "runner/verbs/project/")):
                continue  # links, and the project that `runner init` copies
            for package in packages_in(ast.parse(file.read_text())):
                if package not in sys.stdlib_module_names and package not in ROOMS:
                    files.setdefault(package, name)
    return files


def packages_in(tree: ast.AST) -> Iterator[str]:
    """Yield the packages in import statements, and in calls of functions that import or look for a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in FINDERS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.partition(".")[0]


def declared() -> dict[str, list[str]]:
    """Return the declared distributions, each with the extras that have it; '' stands for all users."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    extras_of: dict[str, list[str]] = {}
    for extra, requirements in extras.items():
        if extra not in ("test", "docs", "dev"):
            for requirement in requirements:
                extras_of.setdefault(re.split(r"[\[<>=!~ ]", requirement)[0].lower(), []).append(extra)
    return extras_of


def test_every_imported_package_is_declared():
    known = declared()
    missing = {
        name: file
        for name, file in imported().items()
        if name not in NOT_DECLARED and NAMES.get(name, name).lower() not in known
    }
    assert missing == {}


def test_every_declared_package_is_imported():
    used = {NAMES.get(name, name).lower() for name in imported()}
    assert {name for name in declared() if name not in used and name not in NOT_IMPORTED} == set()


def test_every_exception_is_needed():
    packages = imported()
    used = {NAMES.get(name, name).lower() for name in packages}
    assert {*NOT_DECLARED, *NAMES} <= {*packages}
    assert used.isdisjoint(NOT_IMPORTED) and {*NOT_IMPORTED} <= {*declared()}


def test_the_lock_has_the_versions_of_the_constraints_and_hashes_without_addresses():
    """The lock has all that a run needs except torch, because its build depends on the machine."""
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    text = (ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", text, re.MULTILINE))
    needed = {name for name, extras in declared().items() if "" in extras}
    assert needed - {"torch"} <= {*locked} and "torch" not in locked
    assert {name: version for name, version in locked.items() if pins.get(name, version) != version} == {}
    assert len(re.findall(r"^[a-z0-9-]+==.*\\\n +--hash=sha256:", text, re.MULTILINE)) == len(locked)
    assert "://" not in text


def test_constraints_pin_every_declared_package_within_its_allowed_versions():
    pins = dict(re.findall(r"^([a-z0-9-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
