"""The README and the pages of docs/, followed from top to bottom in a new folder, as a reader would.

A block with a title is a file that the reader writes; any other block of Python is a program to run. Each line of a
`bash` block is a command. In a block of `text` or `console`, a command follows a prompt; the lines below it in `text`
are its output, in which `...` stands for any lines, and numbers may differ.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from python_process import run_python
from test_readme import PAGES
from tiers import fast

from runner.cli.command import split_verb

NOT_FOR_USERS = {"CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/extending.md", "docs/private_names.md"}
FOLLOWED = sorted({*PAGES} - NOT_FOR_USERS)
NOT_FOLLOWED = {
    "pip ": "is done already",
    "make ": "is done already, or takes an hour",
    ". .venv/bin/activate": "is done already",
    "mlflow ui": "tests/promises/test_records.py",
    "budget=": "tests/trials/test_measure.py",
    "python benchmarks/": "tests/benchmarks/",
    "torchrun --nnodes=2": "needs another machine",
    "submitit_slurm": "needs a cluster",
    "http://host": "needs that server",
    "s3://": "tests/callbacks/test_checkpoint_saver_mirror.py",
    "data.path=my_texts": "as in docs/own_data.md",
    "experiment=image_transfer data.path=pictures callbacks": "tests/callbacks/test_mlflow_image_models.py",
    "mlflow models serve": "tests/callbacks/test_mlflow_text_models.py",
    "curl 127.0.0.1": "tests/callbacks/test_mlflow_text_models.py",
    "model.module.name=./": "tests/models/hf/test_adapter_checkpoints.py",
    "export latest merged/": "tests/models/hf/test_adapter_checkpoints.py",
    "export latest adapter/": "tests/models/hf/test_adapter_checkpoints.py",
    "data=cifar10": "needs a network",
    "data=hf_dataset": "needs a network",
    "experiment=text_classification_csv": "needs a network",
    "results.csv": "tests/verbs/test_foreign_results.py",
    "mlflow:my_experiment": "tests/verbs/test_foreign_results.py",
    "predict latest --data new.csv": "tests/verbs/test_predict_new_rows.py",
    "pretrained=true": "needs a network",
    "experiment=segmentation data.path=FOLDER": "tests/project/test_recipes.py",
    "experiment=instruction_lora": "tests/project/test_recipes.py",
    "model=dpo": "tests/models/test_preference.py",
    "model.module.name=gpt2": "needs a network",
    "sweep=learning_rate seed=0,1,2": "thirty jobs",
    "sweep=ladder": "tests/sweeps/ladder/test_jobs.py",
    "replay crash.zip": "tests/callbacks/test_crash_bundle.py",
    "compare outputs/run outputs/by_hand": "tests/recorder/test_own_loop_digests.py",
    "git bisect": "tests/verbs/test_bisected.py",
    "outputs/common ba270": "tests/sweeps/test_forked_jobs.py",
}
PROCESSES = ("nproc_per_node", "hydra/launcher", "runner prove", "HYDRA_FULL_ERROR")
"""Parts of commands that run in processes of their own."""
EXTRAS = {
    "model=torchvision": "torchvision",
    "experiment=pictures": "torchvision",
    "optuna": "optuna",
    "joblib": "joblib",
}


class Step(NamedTuple):
    """A step of a reader: write a file, or run a command or a program."""

    kind: str
    """`file`, `program` or `command`."""
    text: str
    title: str = ""
    shown: tuple[str, ...] = ()


def steps(page: str) -> Iterator[Step]:
    """Yield the steps of a page in order."""
    blocks = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
    for language, title, text in blocks.findall(page):
        if title:
            yield Step("file", text, title)
        elif language == "python":
            yield Step("program", text)
        elif language == "bash":
            yield from (Step("command", line) for line in text.splitlines())
        elif language in ("text", "console"):
            for lines in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, *shown = lines.splitlines()
                yield Step("command", command, shown=tuple(shown) if language == "text" else ())


def shortened(arguments: list[str], length: str, records: bool) -> list[str]:
    """Return arguments of the runner that train only a few batches.

    Args:
        arguments: the arguments on the page.
        length: the duration of a new run; a continued run ends after batch 10.
        records: whether the run logs to MLflow and draws learning curves, which takes seconds.
    """
    verb, _ = split_verb(arguments)
    if verb.name == "prove":
        return [*arguments, "--kills=1", "--batches=8"]
    if not verb.trains or {"--help", "--version"} & {*arguments}:
        return arguments
    kept = [argument for argument in arguments if not argument.startswith("trainer.max_duration=")]
    if verb.uses_run:  # it keeps its callbacks
        return [*kept, "trainer.max_duration=10ba"]
    chosen = any(argument.startswith("callbacks=") for argument in kept)
    removals = ("~callbacks.mlflow_logger", "~callbacks.learning_curves")
    quiet = [removal for removal in removals if removal not in kept]
    return [*kept, f"trainer.max_duration={length}", *(() if records or chosen else quiet)]


def run(command: str, run_here: Any, length: str, records: bool) -> subprocess.CompletedProcess[str]:
    """Run a command line in the working directory: in this process if it starts no ranks or jobs."""
    words = shlex.split(command, comments=True)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone"]
    words[:1] = {"runner": ["python", "-m", "runner"], "torchrun": torchrun}.get(words[0], words[:1])
    if words[0] != "python" or any(word.startswith(">") for word in words):
        Path(".config/fish/conf.d").mkdir(parents=True, exist_ok=True)
        env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        env["HOME"] = str(Path.cwd())
        return subprocess.run(command, shell=True, env=env, capture_output=True, text=True)
    if "runner" in words:
        place = words.index("runner") + 1
        words[place:] = shortened(words[place:], length, records)
    if words[:3] == ["python", "-m", "runner"] and not any(part in command for part in PROCESSES):
        return subprocess.CompletedProcess(words, *run_here(*words[3:]))
    return run_python(words[1:], env=os.environ | variables)


def alike(line: str) -> str:
    """Return a line of output without the parts that differ from run to run."""
    line = re.sub(r"(\d\d-\d\d-\d\d)-\d+\b", r"\1", line)  # a number follows if two folders are made in one second
    return " ".join(re.sub(r"\d[\d.,:]*(e-\d+)?( ?(ep|ba|ms|s|min|kB|MB|k|M)\b)?", "#", line).split())


@pytest.fixture
def new_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder; modules imported from it are removed from `sys.modules` after the test."""
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.timeout(1200)  # a page is up to forty commands
@pytest.mark.parametrize("name", fast(FOLLOWED, "docs/own_project.md"))
def test_a_page_can_be_followed(name: str, new_folder: Path, run_here: Any):
    for step in steps(PAGES[name]):
        if step.kind == "file":
            Path(step.title).parent.mkdir(parents=True, exist_ok=True)
            Path(step.title).write_text(step.text)
            continue
        if any(part in step.text for part in NOT_FOLLOWED):
            continue
        if any(part in step.text and find_spec(package) is None for part, package in EXTRAS.items()):
            continue
        if step.kind == "program":
            ended = run_python(["-c", re.sub(r'max_duration="\w+"', 'max_duration="6ba"', step.text)])
        else:
            ended = run(
                step.text,
                run_here,
                "2ep" if step.shown or "=2ep" in step.text else "6ba",
                records="mlflow" in name or bool(step.shown),
            )
        refused = any(line.startswith("error: ") for line in step.shown)
        differ = "runner compare" in step.text and ended.returncode == 1  # the page says that digests differ
        assert differ or ended.returncode == (2 if refused else 0), f"{step.text}\n{ended.stdout}\n{ended.stderr}"
        lines = {alike(line) for line in f"{ended.stdout}\n{ended.stderr}".splitlines()}
        missing = [line for line in step.shown if line.strip() not in ("", "...") and alike(line) not in lines]
        assert missing == [], f"{step.text}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.parametrize("name", [page for page in FOLLOWED if page.startswith("docs/") and "/from_" not in page])
def test_a_page_begins_with_code_below_its_title(name: str):
    assert re.match(r"# .+\n\n```(bash|text|python)\n", PAGES[name]), "a title, and then what to type"
