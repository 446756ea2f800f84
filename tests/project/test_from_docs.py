"""Pages for users of other libraries: keys compose, names exist, hooks are events, programs run."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from hydra import compose
from test_readme import CONF, PAGES, code
from tiers import fast

from runner import State
from runner.config import build
from runner.config.composed import to_plain
from runner.config.composing import initialized
from runner.config.experiment import Experiment
from runner.core.hooks import Hooks
from runner.libraries.foreign_hooks import HOOKS_HERE

FROM = sorted(page for page in PAGES if page.startswith("docs/from_"))
OVERRIDE = re.compile(r"(-m )?[+~]?[a-z_]+(\.\w+)*=")
NEEDS = {"wandb_logger": "wandb", "tensorboard_logger": "tensorboard", "optuna": "optuna", "hf_": "transformers"}
SEQUENCES = ("sweep=",)  # choices for commands with -m


def rows(page: str) -> Iterator[tuple[list[str], list[str], str]]:
    """Yield the code in the first and last cell of each table row of a page, and the head of the last column."""
    head = ""
    for line in PAGES[page].splitlines():
        if not line.startswith("|"):
            head = ""
            continue
        if {*line} <= {*"|-"}:
            continue
        first, *_, last = line.strip("| ").split(" | ")
        if not head:
            head = last
        else:
            yield re.findall(r"`([^`]+)`", first), re.findall(r"`([^`]+)`", last), head


@pytest.mark.parametrize("page", fast(FROM, "docs/from_composer.md"))
def test_keys_compose_and_fit_their_signatures(page: str):
    spans = [span for _, here, _ in rows(page) for span in here if OVERRIDE.match(span) and " = " not in span]
    assert len(spans) > 20
    with initialized(CONF):
        for span in dict.fromkeys(spans):
            for name, package in NEEDS.items():
                if name in span:
                    pytest.importorskip(package)
            words = [word for word in shlex.split(span) if word != "-m" and not word.startswith(SEQUENCES)]
            words = [word.partition(",")[0] if "-m" in span else word for word in words]
            words = [word for word in words if not word.startswith("trainer.load_path=")]
            overrides = [word for word in words if not word.startswith("hydra.")]
            build.check(Experiment(to_plain(compose("config", overrides))))


def test_each_flow_composes_and_names_an_existing_test():
    """A flow without a verb or model is composed with a model of transformers."""
    flows = PAGES["docs/from_transformers.md"].partition("| proved by |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    with initialized(CONF):
        for line in flows.splitlines():
            _, here, _, proof = line.strip("| ").split(" | ")
            words = shlex.split(here.strip("`"))
            if words[0] != "runner":
                model = [] if any(word.startswith("model=") for word in words) else ["model=hf_model"]
                compose("config", [*model, *words])
            assert (CONF.parent / re.findall(r"`(tests/[^`]+)`", proof)[0]).is_file(), line


@pytest.mark.parametrize("page", FROM)
def test_named_objects_exist(page: str):
    fields = {*(field.name for field in dataclasses.fields(State)), *dir(State)}
    for _, here, _ in rows(page):
        for span in here:
            if match := re.match(r"runner((?:\.\w+)+)", span):
                resolve_name(f"runner{match[1]}")
            elif match := re.match(r"state\.(\w+)", span):
                assert match[1] in fields, span


@pytest.mark.parametrize("page", FROM)
def test_hooks_have_the_names_of_the_table(page: str):
    listed = [(theirs, here) for theirs, here, head in rows(page) if head == "hook here"]
    pairs = [pair for theirs, here in listed for pair in zip(theirs, here, strict=True)]
    assert pairs or page == "docs/from_composer.md"
    for theirs, here in pairs:
        assert HOOKS_HERE.get(theirs, theirs.removeprefix("on_")) == here
        assert hasattr(Hooks, here)


def test_the_callbacks_of_the_composer_page_run(tmp_path: Path, run_here: Any):
    page = PAGES["docs/from_composer.md"]
    (program,) = code(page, "python")
    assert "Saved as `mine.py`" in page
    (tmp_path / "mine.py").write_text(program)
    train, explain = (line.partition("runner ")[2].split() for line in code(page, "bash")[0].splitlines())
    short = ["trainer.max_duration=1ep", "callbacks=json_lines_logger", "hydra.run.dir=run", "model=mlp"]
    run_here(*short, *train, code=0)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert ["lr" in line.get("metrics", {}) for line in lines].count(True) == 1
    assert "algorithm" in run_here(*explain, code=0).out
    sys.modules.pop("mine", None)
