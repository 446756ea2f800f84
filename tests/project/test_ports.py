"""The table in docs/questions.md counts the lines that a user writes for each kind of project."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from test_layers import code_lines

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "runner" / "verbs" / "project"
KINDS = "support/batch_kinds.py"
OPTIMIZERS = "config/test_optimizers.py"

# Code in the tests that a user would write: data, model with loss and metric, and factories; or whole files.
PORTS: dict[str, list[Any]] = {
    "`runner init`: model, data, callback": [PROJECT / f"{name}.py" for name in ("models", "data", "weight_norm")],
    "GAN with alternating steps": [(OPTIMIZERS, "GAN")],
    "detection": [(KINDS, "Pooled"), (KINDS, "Detector")],
    "batches of graphs": [(KINDS, "Pooled"), (KINDS, "GraphModel"), (KINDS, "GraphBatch"), (KINDS, "join")],
    "two views": [(KINDS, "Pooled"), (KINDS, "Views")],
    "pairs of texts": [(KINDS, "Pooled"), (KINDS, "TextPairs")],
    "tabular regression": [(KINDS, "Pooled"), (KINDS, "Regression")],
    "endless loader": [(KINDS, "Pooled"), (KINDS, "Plain"), (KINDS, "Endless"), (KINDS, "load_endless")],
    "nanoGPT's `configure_optimizers`": [(OPTIMIZERS, "configure_optimizers")],
}


def source(part: Any) -> str:
    if isinstance(part, Path):
        return part.read_text(encoding="utf-8")
    file, name = part
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    (node,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def test_the_table_counts_the_code_in_the_tests():
    page = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
    shown = {name: int(lines) for name, lines in re.findall(r"^\| ([^|]+) \| (\d+) \| trained by", page, re.MULTILINE)}
    counted = {name: sum(code_lines(source(part)) for part in parts) for name, parts in PORTS.items()}
    assert shown == counted
