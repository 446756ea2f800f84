"""The commands, links and tables of the README and docs/ are right."""

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
OF_A_PAGE = (  # what a page has the reader write, which tests/project/test_docs.py does
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
    """The part of a page under a title."""
    found = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, f"no section is called {title!r}"
    return found


def code(text: str, language: str) -> list[str]:
    """The blocks of code in a language."""
    return re.findall(rf"```{language}(?: title=\S+)?\n(.*?)```", text, re.DOTALL)


def arguments_in(line: str) -> list[str]:
    """The arguments of a command that starts the runner."""
    words = shlex.split(line, comments=True)
    ends = [place for place, word in enumerate(words) if word in (">", ">>", "|", "&&")]
    return words[words.index("runner") + 1 : min(ends, default=len(words))]


def commands(pages: Iterable[str]) -> list[str]:
    """Every command line of these pages that starts the runner: in a block of commands, after a prompt, in a table."""
    lines = []
    for text in (PAGES[page] for page in pages):
        lines += [line for block in code(text, "bash") for line in block.splitlines()]
        lines += re.findall(r"^\$ (.*)$", "\n".join(code(text, "(?:text|console)")), re.MULTILINE)
        lines += re.findall(r"^\|.*`(python -m runner [^`]+)`", text, re.MULTILINE)
    starts = re.compile(r"([A-Z_]+=\S+ )*(.*-m )?runner ")
    found = [arguments_in(line) for line in lines if starts.match(f"{line.partition(' # ')[0]} ")]
    answered = {"--help", "-h", "--version", "--cfg"}
    lines = sorted({shlex.join(words) for words in found if answered.isdisjoint(words)})
    return [line for line in lines if not any(part in line for part in OF_A_PAGE)]


def anchors(text: str) -> set[str]:
    """What links to the titles of a page end with."""
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
    found = {path.stem for path in run.iterdir() if not path.name.startswith(".")}
    assert found - {"git"} == listed - {"git", "mlflow", "replay"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"ep1-ba19", "latest"}


@pytest.mark.parametrize("command", fast(commands(PAGES), *commands(["README.md"])))
def test_a_command_that_is_shown_composes_and_binds(command: str):
    typed = parse([word for word in shlex.split(command) if word != "--json"])
    arguments = typed.overrides
    check_options(arguments)
    places = enumerate(arguments)  # neither Hydra's options nor their values
    keys = [word for n, word in places if not word.startswith("-") and arguments[max(n - 1, 0)] not in TAKE_VALUES]
    overrides = []
    for one in OverridesParser.create().parse_overrides(keys):
        assert one.input_line is not None
        if one.is_sweep_override() and one.is_choice_sweep():
            overrides.append(f"{one.input_line.partition('=')[0]}={next(one.sweep_string_iterator())}")
        elif one.key_or_group != AT and not one.key_or_group.startswith("hydra"):
            overrides.append(one.input_line)
    if any(word in VISION for word in arguments):
        pytest.importorskip("timm")
    if any(word in HUGGING_FACE for word in arguments):
        pytest.importorskip("datasets")
    overrides = [one for one in overrides if one != "sweep=optuna_tpe"]  # has Optuna's sweeper, an extra
    if typed.row.needs_experiment:
        build.check(Experiment(composed(*overrides)))


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page: str):
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
def test_rows_of_tables_are_complete(page: str):
    """Each row has as many cells as its head, and only a heading within a table leaves one empty."""
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


def test_every_key_at_the_top_is_listed():
    keys = {str(key) for key in OmegaConf.load(CONF / "config.yaml")} - {"defaults", "hydra"}
    assert keys <= {*re.findall(r"`(\w+)`", section("Keys at the top", PAGES["docs/configs.md"]))}
