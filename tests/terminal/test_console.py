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
def test_epochs_are_counted_from_1(epoch: int, batch: int, in_epoch: int, number: int, described: str):
    now = Timestamp(epoch=epoch, batch=batch, batch_in_epoch=in_epoch)
    assert epoch_number(now) == number and describe_time(now) == described


def test_printed_and_logged_text_can_go_only_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    path = tmp_path / "console.log"
    path.write_text("earlier\n")
    with lasting_output(), output_to(str(path)):  # as in a job, `sys.stderr` is not the handler's stream
        print("printed")
        assert path.read_text().endswith("printed\n")  # at once, for `tail -f`
        print_block("title", [("label", "text")])
        logging.getLogger("runner").warning("logged")
        print("to stderr", file=sys.stderr)
        print("no end", end="")
        assert not make_console().is_terminal
    print("after")
    logging.getLogger("runner").warning("logged after")
    texts = ["earlier", "printed", "title", "label  text", "logged", "to stderr", "no end"]
    assert path.read_text().splitlines() == texts
    assert capsys.readouterr() == ("after\n", "logged after\n")


def test_printed_and_logged_text_can_go_to_file_and_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    with lasting_output(), output_to(str(tmp_path / "console.log"), is_printed=True):
        print("printed")
        logging.getLogger("runner").warning("logged")
        print("to stderr", file=sys.stderr)
    assert (tmp_path / "console.log").read_text() == "printed\nlogged\nto stderr\n"
    assert capsys.readouterr() == ("printed\n", "logged\nto stderr\n")


def test_without_a_file_text_stays_on_the_terminal():
    stream = sys.stdout
    with output_to(""):
        assert sys.stdout is stream


def test_a_full_disk_gives_one_warning_and_no_error(capsys: pytest.CaptureFixture[str]):
    with output_to("/dev/full"):
        print("lost")
        print("lost, too", end="")
    written = capsys.readouterr()
    assert written.out == "" and written.err.count("cannot write to full") == 1


def test_lines_have_no_trailing_spaces(capsys: pytest.CaptureFixture[str]):
    print_block("title", [("label", "text " * 40), ("another", "short")])
    make_console().print(Unpadded(f"padded{' ' * 20}"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines] and lines[-1] == "padded"
    assert lines[1].startswith("label    text") and max(map(len, lines)) <= 120


def test_the_environment_variable_columns_sets_the_width_of_the_console(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width == 120
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console().width == 60


def test_in_a_pipe_the_title_is_printed_only_when_the_run_begins(
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


@pytest.mark.parametrize("has_output", [False, True])
def test_the_title_of_a_refused_run_is_erased_from_a_terminal_unless_text_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_output: bool
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "run"
    name = "a-name-of-more-than-forty-characters-on-two-lines"
    controller, device = pty.openpty()
    with open(device, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with lasting_output():
            announce(name, folder)
            print_title(name, folder)
            announce("refused", Path("there"))
            if has_output:
                print("WARNING: something")
            take_back_title()
            announce(name, Path("there"))
            take_back_title()
    shown = ""
    with suppress(OSError):  # reading fails at the end of the output
        while text := os.read(controller, 65536).decode():
            shown += text
    os.close(controller)
    assert shown.count(name) == 2
    assert ("there\x1b[0m\r\n\x1b[1A\x1b[J" in shown) != has_output
    assert shown.endswith("\x1b[2A\x1b[J")


@pytest.mark.parametrize("stderr_is_a_file", [False, True])
def test_a_logged_line_does_not_mix_with_a_live_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr_is_a_file: bool
):
    monkeypatch.setenv("TERM", "xterm-256color")
    controller, device = pty.openpty()
    with open(device, "w") as terminal, (tmp_path / "errors").open("w") as file:
        stderr = file if stderr_is_a_file else terminal
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = logging.StreamHandler(stderr)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        shown = b""

        def wait_for(text: bytes) -> bytes:
            seen = b""
            while text not in seen:
                assert select.select([controller], [], [], 60)[0], seen
                seen += os.read(controller, 65536)
            return seen

        for _ in range(2):
            with live_line(make_console(), lambda: "the live line", interval=0.01):
                shown += wait_for(b"the live line")
                logging.getLogger("runner").warning("a warning")
                shown += wait_for(b"the live line")
            assert handler.stream is sys.stderr is stderr
        terminal.write("the end")
        terminal.flush()
        shown += wait_for(b"the end")
    os.close(controller)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()
    assert lines.count("the live line") >= 4
    assert lines.count("a warning") == (0 if stderr_is_a_file else 2)
    assert {*lines} <= {"the live line", "a warning", "the end", ""}
    assert (tmp_path / "errors").read_text() == ("a warning\n" * 2 if stderr_is_a_file else "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_lost_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w") as full, (tmp_path / "errors").open("w+") as errors:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", errors)
        with lasting_output():
            for _ in range(3):
                print("lost", flush=True)
            print_block("title", [("label", "text")])
            print("x" * 100_000)
            print("kept", file=sys.stderr)
        assert (sys.stdout, sys.stderr) == (full, errors)
        errors.seek(0)
        warning, kept = errors.read().splitlines()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(errors.fileno(), full.fileno())  # so that the buffered rest can be written
    assert warning.startswith("WARNING: cannot write to stdout ([Errno 28] No space left on device): ")
    assert kept == "kept"


def test_a_closed_pipe_gives_neither_an_error_nor_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    output = (tmp_path / "output").open("w+")
    with output, open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", unread)
        with lasting_output():
            print("lost", file=sys.stderr, flush=True)
            print("kept")
        os.dup2(output.fileno(), writer)  # so that the buffered rest can be written
    assert "WARNING" not in (tmp_path / "output").read_text()


def test_opened_files_do_not_take_the_place_of_closed_standard_streams():
    """A newly opened file gets the lowest free descriptor, which would be that of a closed standard stream."""
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
