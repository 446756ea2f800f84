from __future__ import annotations

import logging
import os
import pty
import re
import select
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from python_process import run_python

from runner import Timestamp
from runner.terminal.console import (
    Unpadded,
    announce,
    describe_time,
    epoch_number,
    make_console,
    print_block,
    print_title,
    take_back_title,
)
from runner.terminal.live_line import live_line
from runner.terminal.output import lasting_output, output_to


@pytest.mark.parametrize(
    ("epoch", "batch", "in_epoch", "number", "described"),
    [
        (0, 0, 0, 1, "in epoch 1, after 0 batches"),
        (0, 1, 1, 1, "in epoch 1, after 1 batch"),
        (1, 4, 0, 1, "after epoch 1 (4 batches)"),
        (1, 5, 1, 2, "in epoch 2, after 5 batches"),
    ],
)
def test_people_count_epochs_from_one(epoch: int, batch: int, in_epoch: int, number: int, described: str):
    now = Timestamp(epoch=epoch, batch=batch, batch_in_epoch=in_epoch)
    assert epoch_number(now) == number and describe_time(now) == described


def test_what_is_printed_and_logged_goes_to_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    console = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(console)
    path = tmp_path / "console.log"
    path.write_text("earlier\n")
    try:
        with lasting_output(), output_to(str(path)):  # as in a job: `sys.stderr` is not the stream of the handler
            print("printed")
            assert path.read_text().endswith("printed\n")  # at once, for those who follow it
            print_block("title", [("label", "text")])
            logging.getLogger("runner").warning("logged")
            print("told", file=sys.stderr)
            print("no end", end="")
            assert not make_console().is_terminal
        print("after")
        logging.getLogger("runner").warning("logged after")
    finally:
        logging.getLogger().removeHandler(console)
    texts = ["earlier", "printed", "title", "label  text", "logged", "told", "no end"]
    assert path.read_text().splitlines() == texts
    assert capsys.readouterr() == ("after\n", "logged after\n")


def test_what_is_printed_can_go_to_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    console = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(console)
    try:
        with lasting_output(), output_to(str(tmp_path / "console.log"), is_printed=True):
            print("printed")
            logging.getLogger("runner").warning("logged")
            print("told", file=sys.stderr)
    finally:
        logging.getLogger().removeHandler(console)
    assert (tmp_path / "console.log").read_text() == "printed\nlogged\ntold\n"
    assert capsys.readouterr() == ("printed\n", "logged\ntold\n")


def test_without_a_file_the_terminal_stays():
    stream = sys.stdout
    with output_to(""):
        assert sys.stdout is stream


def test_a_full_disk_is_said_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]):
    with output_to("/dev/full"):
        print("lost")
        print("lost, too", end="")
    written = capsys.readouterr()
    assert written.out == "" and written.err.count("full cannot be written") == 1


def test_lines_end_with_their_text(capsys: pytest.CaptureFixture[str]):
    print_block("title", [("label", "text " * 40), ("another", "short")])
    make_console().print(Unpadded(f"padded{' ' * 20}"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines] and lines[-1] == "padded"
    assert lines[1].startswith("label    text") and max(map(len, lines)) <= 120


def test_a_console_is_as_wide_as_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width == 120
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console().width == 60


def test_a_run_in_a_pipe_has_its_title_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/2026-01-02/03-04-05"
    announce("refused", folder)
    take_back_title()
    assert capsys.readouterr().out == ""
    print_title("03-04-05-mlp-digits-2026-01-02", folder)
    print_title("mine", folder)
    print_title("lr1", tmp_path / "sweep/lr1")
    titles = ["mlp-digits  outputs/2026-01-02/03-04-05", "mine  outputs/2026-01-02/03-04-05", "sweep/lr1"]
    assert capsys.readouterr().out.splitlines() == titles


@pytest.mark.parametrize("printed", [False, True])
def test_on_a_terminal_the_title_comes_early_and_goes_when_the_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: bool
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "run"
    name = "a-name-of-more-than-forty-characters-on-two-lines"
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with lasting_output():
            announce(name, folder)
            print_title(name, folder)
            announce("refused", Path("there"))
            if printed:
                print("WARNING: something")
            take_back_title()
            announce(name, Path("there"))
            take_back_title()
    shown = ""
    with suppress(OSError):  # at the end of what was written
        while more := os.read(ours, 65536).decode():
            shown += more
    os.close(ours)
    assert shown.count(name) == 2
    assert ("there\x1b[0m\r\n\x1b[1A\x1b[J" in shown) != printed
    assert shown.endswith("\x1b[2A\x1b[J")


@pytest.mark.parametrize("stderr_is_a_file", [False, True])
def test_what_is_logged_below_a_live_line_has_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr_is_a_file: bool
):
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, (tmp_path / "errors").open("w") as file:
        stderr = file if stderr_is_a_file else terminal
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = logging.StreamHandler(stderr)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        shown = b""

        def wait_for(text: bytes) -> bytes:
            seen = b""
            while text not in seen:
                assert select.select([ours], [], [], 60)[0], seen
                seen += os.read(ours, 65536)
            return seen

        for _ in range(2):
            with live_line(make_console(), lambda: "the live line", interval=0.01):
                shown += wait_for(b"the live line")
                logging.getLogger("runner").warning("it is told")
                shown += wait_for(b"the live line")
            assert handler.stream is sys.stderr is stderr
        terminal.write("the end")
        terminal.flush()
        shown += wait_for(b"the end")
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()
    assert lines.count("the live line") >= 4
    assert lines.count("it is told") == (0 if stderr_is_a_file else 2)
    assert {*lines} <= {"the live line", "it is told", "the end", ""}
    assert (tmp_path / "errors").read_text() == ("it is told\n" * 2 if stderr_is_a_file else "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_a_full_disk_does_not_take_is_lost_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full, (tmp_path / "told").open("w+") as told:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", told)
        with lasting_output():
            for _ in range(3):
                print("lost", flush=True)
            print_block("title", [("label", "text")])
            print("x" * 100_000)
            print("kept", file=sys.stderr)
        assert (sys.stdout, sys.stderr) == (full, told)
        told.seek(0)
        warning, kept = told.read().splitlines()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(told.fileno(), full.fileno())  # there is space again, for what was left
    assert warning.startswith("WARNING: stdout cannot be written ([Errno 28] No space left on device): ")
    assert kept == "kept"


def test_a_stream_that_nobody_reads_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    told = (tmp_path / "told").open("w+")
    with told, open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", told)
        monkeypatch.setattr(sys, "stderr", unread)
        with lasting_output():
            print("lost", file=sys.stderr, flush=True)
            print("kept")
        os.dup2(told.fileno(), writer)  # which takes what was left
    assert "WARNING" not in (tmp_path / "told").read_text()


def test_streams_that_are_closed_are_no_file_s():
    """The next file that is opened has the least number that is free."""
    program = (
        "import os, sys\n"
        "from runner.terminal.output import lasting_output\n"
        "os.closerange(0, 3)\n"
        "sys.stdout = sys.stderr = None\n"
        "with lasting_output():\n"
        "    print('lost', flush=True)\n"
        "    print('lost', file=sys.stderr, flush=True)\n"
        "    assert open(os.devnull).fileno() > 2 and all(map(os.get_inheritable, range(3)))\n"
        "os._exit(0)\n"
    )
    run_python(["-c", program], check=True)
