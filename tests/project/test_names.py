"""Every callback and algorithm has one name for its class, file, config, test and entry in docs/."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from runner.core.ordering import snake_case

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PACKAGES = ("callbacks", "algorithms")
PLUGINS = [
    (package, file.stem) for package in PACKAGES for file in sorted((ROOT / package).glob("[!_]*.py")) if file.is_file()
]
CONFIGS = sorted(CONF.rglob("*.yaml"))


def public_class(package: str, name: str) -> str:
    """Return the name of the only public class of a file."""
    tree = ast.parse((ROOT / package / f"{name}.py").read_text(encoding="utf-8"))
    (name,) = (node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    return name


def plain(value: Any) -> Any:
    """Return a default as plain values of YAML."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("SpeedMonitor", "speed_monitor"),
        ("LRMonitor", "lr_monitor"),
        ("JSONLinesLogger", "json_lines_logger"),
        ("InMemoryLogger", "in_memory_logger"),
        ("OOMObserver", "oom_observer"),
        ("MLflowLogger", "mlflow_logger"),
        ("MLPerfCallback", "mlperf_callback"),
        ("NaNMonitor", "nan_monitor"),
        ("WandBLogger", "wandb_logger"),
        ("MixUp", "mixup"),
        ("CutMix", "cutmix"),
        ("EMA", "ema"),
        ("QKNorm", "qk_norm"),
        ("NGramEmbedding", "ngram_embedding"),
    ],
)
def test_snake_case_keeps_acronyms_together(name: str, file: str):
    assert snake_case(name) == file


@pytest.mark.parametrize(("package", "name"), PLUGINS)
def test_a_file_has_the_name_of_its_class(package: str, name: str):
    assert snake_case(public_class(package, name)) == name


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_the_class_of_each_file(package: str):
    exported = importlib.import_module(f"runner.{package}")
    classes = {public_class(package, name) for owner, name in PLUGINS if owner == package}
    assert set(exported.__all__) == classes
    assert {getattr(exported, name).__name__ for name in classes} == classes
    assert classes <= set(dir(exported))


def stub_of(package: str) -> str:
    """Return the stub of a package with one class per file, in the order of ruff."""
    plugins = importlib.import_module(f"runner.{package}").plugins
    pairs = [(file, name) for file in sorted(plugins.files.values()) for name in plugins.classes_of(file)]
    imports = "".join(f"from runner.{package}.{file} import {name}\n" for file, name in pairs)
    exported = sorted(plugins.names(), key=lambda name: (not name.isupper(), name))
    return f"{imports}\n__all__ = [\n{''.join(f'    {name!r},{chr(10)}' for name in exported)}]\n".replace("'", '"')


@pytest.mark.parametrize("package", PACKAGES)
def test_editors_know_the_class_of_each_file(package: str):
    """The stub is generated from the files; if it is out of date, the test rewrites it, to be committed."""
    stub = ROOT / package / "__init__.pyi"
    expected = stub_of(package)
    current = stub.read_text(encoding="utf-8")
    stub.write_text(expected, encoding="utf-8")
    assert current == expected, f"{stub} was not current; it is now"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_only_below_runner(package: str):
    with pytest.raises(ImportError, match=f"is imported as runner.{package}"):
        importlib.import_module(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_config_has_the_name_of_a_file(package: str):
    names = {name for owner, name in PLUGINS if owner == package}
    assert {file.stem for file in (CONF / package).glob("*.yaml")} == names | {"none"}
    assert OmegaConf.load(CONF / package / "none.yaml") == {}


@pytest.mark.parametrize(("package", "name"), PLUGINS)
def test_a_config_has_the_arguments_and_defaults_of_its_class(package: str, name: str):
    class_name = public_class(package, name)
    content = OmegaConf.to_container(OmegaConf.load(CONF / package / f"{name}.yaml"))
    assert isinstance(content, dict)
    assert list(content) == [name]
    assert content[name].pop("_target_") == f"runner.{package}.{class_name}"

    parameters = inspect.signature(getattr(importlib.import_module(f"runner.{package}"), class_name)).parameters
    assert list(content[name]) == list(parameters)
    for key, value in content[name].items():
        interpolated = isinstance(value, str) and value.startswith("${")
        if parameters[key].default is not inspect.Parameter.empty and not interpolated:
            assert value == plain(parameters[key].default), key


@pytest.mark.parametrize(("package", "name"), PLUGINS)
def test_a_test_has_the_name_of_a_file(package: str, name: str):
    assert (ROOT / "tests" / package / f"test_{name}.py").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_page_of_the_documentation_lists_each(package: str):
    """The test adds missing rows from docstrings; move them to the right place, and commit them."""
    page = ROOT / "docs" / f"{package}.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    names = {name: public_class(package, name) for owner, name in PLUGINS if owner == package}
    heads = {name: f"| [`{name}`](reference/{package}.md#runner.{package}.{names[name]}) |" for name in names}
    listed = [name for line in lines for name, head in heads.items() if line.startswith(head)]
    assert len(listed) == len({*listed})
    missing = [name for name in names if name not in listed]
    last = max(number for number, line in enumerate(lines) if line.startswith(heads[listed[-1]]))
    lines[last + 1 : last + 1] = [f"{heads[name]} {what_it_does(package, names[name])} |" for name in missing]
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert missing == [], f"{page} was not current; it is now"


def what_it_does(package: str, class_name: str) -> str:
    """Return the first sentence of a class's docstring, as a cell of a table."""
    docstring = inspect.getdoc(getattr(importlib.import_module(f"runner.{package}"), class_name)) or ""
    sentence = " ".join(docstring.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def uncommented_keys(text: str) -> list[str]:
    """Return keys with a value but no comment: beside them, at the end of the value, or on the line above."""
    lines = text.splitlines()
    keys: list[str] = []
    pending = [yaml.compose(text)]
    while pending:
        node = pending.pop()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(value, yaml.MappingNode) and value.value:
                pending.append(value)
            elif not key.value.startswith("_") and key.value != "defaults":
                first, last = int(key.start_mark.line), int(value.end_mark.line)
                near = "\n".join([lines[first], *lines[last : last + 1]])
                if " #" not in near and not (first and lines[first - 1].lstrip().startswith("#")):
                    keys.append(f"line {first + 1}: {key.value}")
    return keys


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(CONF)))
def test_a_config_explains_its_keys(file: Path):
    text = file.read_text(encoding="utf-8")
    assert "#" in text, "a config begins with a comment that says what it is"
    if file.parent.name == "experiment":  # its keys are explained in the files that define them
        header = re.match(r"(#.*\n)+", text)
        assert header, "a recipe begins with a comment"
        assert f"python -m runner experiment={file.stem}" in header[0], "the comment of a recipe has its command"
    else:
        assert uncommented_keys(text) == []


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(CONF)))
def test_only_experiments_and_sweeps_choose_their_package(file: Path):
    assert file.parent.name in ("experiment", "sweep") or "@package" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["runner", *(f"runner.{package}" for package in PACKAGES)])
def test_importing_a_package_imports_no_slow_library(package: str):
    slow = {"torch", "mlflow", "torchmetrics", "hydra", "matplotlib", "sklearn", "pandas"}
    program = f"import sys, {package}; print(*sorted({slow!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_callbacks_are_imported_without_torch():
    """The main process of a sweep makes destinations from their classes without importing torch."""
    classes = ", ".join(public_class("callbacks", name) for package, name in PLUGINS if package == "callbacks")
    program = f"import sys\nfrom runner.callbacks import {classes}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_pages_list_the_defaults_as_core(package: str):
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    (names,) = (entry[package] for entry in defaults if package in entry)
    page = (ROOT / "docs" / "reference" / f"{package}.md").read_text()
    core = page.partition(" belong to the core")[0].rpartition("\n\n")[2]
    assert re.findall(r"`(\w+)`", core) == [public_class(package, name) for name in names]
