"""Commands, links and tables of the README and docs/ are correct."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from composed_configs import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tiers import fast

from runner.cli.command import AT, parse
from runner.cli.command_line import TAKE_VALUES, check_options
from runner.config import build
from runner.config.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
OF_THE_ROOT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md")}
PAGES |= {name: (ROOT / name).read_text(encoding="utf-8") for name in OF_THE_ROOT}
README = PAGES["README.md"]
OF_A_PAGE = (  # need files that the reader writes, as tests/project/test_docs.py does
    "model=two_layers",
    "callbacks=epoch_monitor",
    "callbacks.epoch_monitor",
    "my_callbacks.",
    "experiment=mine",
    "experiment=pictures",
    "experiment=texts",
    "experiment=wine",
    "optimizer.lrr",
    "trainer.max_epochs",
    "_target_=mine.",
    "trainer.load_path=",
    "model.module.name=./moved/llama",
)
HUGGING_FACE = ("data=hf_dataset", "experiment=text_finetune", "experiment=instruction_lora", "data=preferences")
VISION = ("model=timm", "model=torchvision")


def section(title: str, text: str = README) -> str:
    """Return the part of a page under a title."""
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert part, f"no section is called {title!r}"
    return part


def code(text: str, language: str) -> list[str]:
    """Return the code blocks in a language."""
    return re.findall(rf"```{language}(?: title=\S+)?\n(.*?)```", text, re.DOTALL)


def arguments_in(line: str) -> list[str]:
    """Return the arguments of a command that starts the runner."""
    words = shlex.split(line, comments=True)
    ends = [place for place, word in enumerate(words) if word in (">", ">>", "|", "&&")]
    return words[words.index("runner") + 1 : min(ends, default=len(words))]


def commands(pages: Iterable[str]) -> list[str]:
    """Return all command lines of these pages that start the runner: in blocks, after prompts and in tables."""
    lines = []
    for text in (PAGES[page] for page in pages):
        lines += [line for block in code(text, "bash") for line in block.splitlines()]
        lines += re.findall(r"^\$ (.*)$", "\n".join(code(text, "(?:text|console)")), re.MULTILINE)
        lines += re.findall(r"^\|.*`(python -m runner [^`]+)`", text, re.MULTILINE)
    starts = re.compile(r"([A-Z_]+=\S+ )*(.*-m )?runner ")
    arguments = [arguments_in(line) for line in lines if starts.match(f"{line.partition(' # ')[0]} ")]
    answered = {"--help", "-h", "--version", "--cfg"}
    lines = sorted({shlex.join(words) for words in arguments if answered.isdisjoint(words)})
    return [line for line in lines if not any(part in line for part in OF_A_PAGE)]


def anchors(text: str) -> set[str]:
    """Return the anchors of the titles of a page."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_run_leaves_the_files_of_the_table(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(
        "from runner import Callback\n\n\nclass Own(Callback):\n    def fit_end(self, state, logger): ...\n"
    )
    own = ("+callbacks.own._target_=own.Own", "~callbacks.mlflow_logger")
    run_here("model=mlp", "trainer.max_duration=1ep", *own, code=0)
    (run,) = tmp_path.glob("outputs/20*/*")
    heads = re.findall(r"^\| (`.+?) \|", section("What a run leaves", PAGES["docs/runs.md"]), re.MULTILINE)
    listed = {Path(name).stem for head in heads for name in re.findall(r"`([\w.]+)", head)}
    left = {path.stem for path in run.iterdir() if not path.name.startswith(".")}
    assert left - {"git"} == listed - {"git", "mlflow", "replay"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"ep1-ba19", "latest"}


@pytest.mark.parametrize("command", fast(commands(PAGES), *commands(["README.md"])))
def test_a_shown_command_composes_and_fits_its_signatures(command: str):
    typed = parse([word for word in shlex.split(command) if word != "--json"])
    arguments = typed.overrides
    check_options(arguments)
    places = enumerate(arguments)  # without options of Hydra and their values
    keys = [word for n, word in places if not word.startswith("-") and arguments[max(n - 1, 0)] not in TAKE_VALUES]
    overrides = []
    for override in OverridesParser.create().parse_overrides(keys):
        assert override.input_line is not None
        if override.is_sweep_override() and override.is_choice_sweep():
            overrides.append(f"{override.input_line.partition('=')[0]}={next(override.sweep_string_iterator())}")
        elif override.key_or_group != AT and not override.key_or_group.startswith("hydra"):
            overrides.append(override.input_line)
    if any(word in VISION for word in arguments):
        pytest.importorskip("timm")
    if any(word in HUGGING_FACE for word in arguments):
        pytest.importorskip("datasets")
    overrides = [override for override in overrides if override != "sweep=optuna_tpe"]  # needs an extra
    if typed.row.needs_experiment:
        build.check(Experiment(composed(*overrides)))


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_and_anchors_exist(page: str):
    here = (ROOT / page).parent
    pictures = re.findall(r' src(?:set)?="([^"]+)"', PAGES[page])
    for target in [*re.findall(r"\]\(([^)\s]+)\)", PAGES[page]), *pictures]:
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        path = (here / file).resolve() if file else ROOT / page
        assert path.exists(), target
        if path.parent.name == "reference" and anchor:  # generated from the docstrings
            resolve_name(anchor)
        else:
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


def test_the_readme_links_to_each_page():
    assert all(f"]({page})" in README for page in PAGES if page != "README.md")


def test_the_readme_counts_the_algorithms():
    count = len([*ROOT.glob("algorithms/[!_]*.py")])
    assert f"| training methods that can be added | {count} |" in section("Beside other libraries")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_rows_of_tables_have_all_cells(page: str):
    """Each row has as many cells as the head, and only a heading within a table leaves cells empty."""
    head = 0
    for line in PAGES[page].splitlines():
        if not line.startswith("|"):
            head = 0
            continue
        cells = [cell.strip() for cell in re.sub(r"`[^`]*`", "`code`", line).strip("|").split("|")]
        head = head or len(cells)
        assert len(cells) == head, line
        assert all(cells[1:]) or line.startswith(("| **", "| |")), line


def test_every_choice_of_a_group_is_listed():
    table = PAGES["docs/configs.md"].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    cells = {group: {*re.findall(r"`(\w+)`", cell)} for group, cell in rows}
    for group in ("model", "data", "optimizer", "scheduler", "sweep", "trainer", "launch"):
        assert {file.stem for file in (CONF / group).glob("*.yaml")} <= cells[group], group
    recipes = {*re.findall(r"`(\w+)`", section("Recipes", PAGES["docs/configs.md"]))}
    assert {file.stem for file in (CONF / "experiment").glob("*.yaml")} <= recipes


def test_every_top_level_key_is_listed():
    keys = {str(key) for key in OmegaConf.load(CONF / "config.yaml")} - {"defaults", "hydra"}
    assert keys <= {*re.findall(r"`(\w+)`", section("Keys at the top", PAGES["docs/configs.md"]))}
