"""Console output of runs, compared with files in `screens/`. A missing file is written, and its test fails once."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from screen import on_terminal, screen

SCREENS = Path(__file__).parent / "screens"
SHORT = (
    *("model=mlp", "data.batch_size=400", "data.eval_batch_size=300", "trainer.eval_interval=2ba"),
    "callbacks=[checkpoint_saver,progress_bar,console_summary]",
)
EPOCHS = (*SHORT, "trainer.max_duration=2ep")


def without_numbers(text: str) -> str:
    """Replace values that differ between runs by placeholders of the same width."""

    def placeholder(word: str) -> Any:
        return lambda match: word.rjust(len(match[0]))

    text = re.sub(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", "DATE/TIME", text)
    text = re.sub(r"(trained .*) in \S+(?: s)?$", r"\1 in TIME", text, flags=re.MULTILINE)
    text = re.sub(r"[\d,]+ samples/s in the \S+(?: s)? ", "RATE samples/s in the TIME ", text)
    text = re.sub(r", \d+\.\d s$", ", TIME", text, flags=re.MULTILINE)
    text = re.sub(r"  +(?:\d+\.\d s|\d+:\d\d)(?= |$)", placeholder("TIME"), text, flags=re.MULTILINE)
    text = re.sub(r"  +\d+\.\d\d?(?= |$)", placeholder("RATE"), text, flags=re.MULTILINE)
    text = re.sub(r"\d\.\d{4}", "N.NNNN", text)
    return text.rstrip("\n") + "\n"


def check(name: str, text: str) -> None:
    """Compare a screen with the stored one."""
    text = without_numbers(text)
    assert not re.search(r"[ \t]$", text, re.MULTILINE), f"blanks at the end of a line:\n{text}"
    file = SCREENS / f"{name}.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"{file} is written: look at it")
    assert text == file.read_text()


def widest(text: str) -> int:
    """Return the length of the longest line except commands, which the terminal wraps so that they can be pasted."""
    return max(len(line) for line in text.splitlines() if not line.startswith("python -m runner"))


@pytest.mark.parametrize("columns", [80, *(pytest.param(other, marks=pytest.mark.slow) for other in (60, 120, 200))])
def test_the_screen_of_a_terminal(columns: int, tmp_path: Path):
    code, written = on_terminal(["-m", "runner", *EPOCHS], columns, tmp_path)
    shown = screen(written)
    assert code == 0 and widest(shown) <= columns
    check(f"terminal-{columns}", shown)


def test_the_output_in_a_pipe(run_app: Any):
    """The lines at the end are commands that can be pasted."""
    finished = run_app(*EPOCHS, env={"COLUMNS": None})
    assert "\x1b" not in finished.stdout and widest(finished.stdout) <= 120
    check("pipe", finished.stdout)
    evaluate, longer = finished.stdout.splitlines()[-2:]
    assert "eval/MulticlassAccuracy" in run_app(*evaluate.split()[3:]).stdout.replace("metrics/", "")
    assert "  4/4  12/12 " in run_app(*longer.split()[3:]).stdout


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["NO_COLOR", "CI"])
def test_the_screen_without_color_or_redrawing(variable: str, tmp_path: Path):
    _, written = on_terminal(["-m", "runner", *EPOCHS], 80, tmp_path, {variable: "true"})
    if variable == "CI":
        assert "\u2501" not in written and "\r\x1b" not in written  # nothing is redrawn
    else:
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]", written)  # no color
    check("terminal-80-CI" if variable == "CI" else "terminal-80", screen(written))


@pytest.mark.slow
def test_the_output_of_two_ranks(tmp_path: Path, run_app: Any):
    check("two-ranks", run_app(*EPOCHS, "launch.nproc_per_node=2", env={"COLUMNS": None}).stdout)


@pytest.mark.slow
def test_the_console_log_of_a_sweep_job(tmp_path: Path):
    code, written = on_terminal(["-m", "runner", "-m", *EPOCHS, "seed=7,8"], 80, tmp_path)
    assert code == 0 and widest(screen(written)) <= 80
    (log,) = tmp_path.glob("outputs/sweeps/*/*/seed7-mlp-digits/console.log")
    check("sweep-job", log.read_text())


def test_the_screen_after_ctrl_c(tmp_path: Path):
    """The bar is gone, and the last line is the command to paste."""
    interrupted = []

    def interrupt(written: str, process: Any) -> None:
        if not interrupted and re.search(r" [2-9]/100,000 ", written):
            os.kill(process.pid, signal.SIGINT)
            interrupted.append(process)

    endless = (*SHORT, "trainer.max_duration=100000ep", "trainer.eval_interval=0")
    code, written = on_terminal(["-m", "runner", *endless], 80, tmp_path, react=interrupt)
    shown = screen(written)
    assert code == 130 and "\u2501" not in shown
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is hidden"
    head, *_, outcome, folder, title, command = shown.rstrip("\n").splitlines()
    check("after-ctrl-c", "\n".join([head, re.sub(r"\d+(?=,| b)", "N", outcome), folder, title, command]))
