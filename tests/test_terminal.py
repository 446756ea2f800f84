from __future__ import annotations

import logging
import os
import pty
import re
import select
import sys
import threading
from pathlib import Path

import pytest
from python_process import run_python

from runner import Timestamp
from runner.terminal import (
    describe_time,
    epoch_number,
    labelled_lines,
    lasting_output,
    live_line,
    make_console,
    print_block,
)


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


def test_every_line_that_is_printed_or_logged_has_the_label(capsys: pytest.CaptureFixture[str]):
    console = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(console)
    try:
        with labelled_lines("job"):
            print("one\ntwo", "parts", sep="\n\n")
            print("begun, ", end="", flush=True)
            print("ended")
            print_block("title", [("label", "text")])
            logging.getLogger("runner").warning("logged")
            print("told", file=sys.stderr)
            print("no end", end="")
        print("after")
        logging.getLogger("runner").warning("logged after")
    finally:
        logging.getLogger().removeHandler(console)
    written = capsys.readouterr()
    *inside, after = written.out.splitlines()
    texts = ["one", "two", "", "parts", "begun, ended", "title", "label  text", "no end"]
    assert inside == [f"job  |  {text}" for text in texts]
    assert after == "after"
    assert written.err.splitlines() == ["job  |  logged", "job  |  told", "logged after"]


def test_without_a_label_nothing_changes(capsys: pytest.CaptureFixture[str]):
    stream = sys.stdout
    with labelled_lines(""):
        assert sys.stdout is stream


def test_what_is_labelled_is_no_terminal_but_otherwise_the_stream(monkeypatch: pytest.MonkeyPatch):
    stream = sys.stdout
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert make_console().is_terminal
    with labelled_lines("job"):
        assert not make_console().is_terminal
        assert sys.stdout.encoding == stream.encoding and sys.stdout.buffer is stream.buffer
    assert sys.stdout is stream


def test_threads_that_print_at_once_lose_nothing(capsys: pytest.CaptureFixture[str]):
    def write(name: str) -> None:
        for number in range(5000):
            print(f"<{name}{number}>")  # text and line end are two writes, which others may come between

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with labelled_lines("job"):
            threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("job  |  ") for line in lines)
    found = re.findall(r"<\w+>", "".join(lines))
    assert sorted(found) == sorted(f"<{name}{number}>" for name in "abc" for number in range(5000))


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

        def wait_for_the_line() -> bytes:
            seen = b""
            while b"the live line" not in seen:
                assert select.select([ours], [], [], 60)[0], seen
                seen += os.read(ours, 65536)
            return seen

        for _ in range(2):
            with live_line(make_console(), lambda: "the live line", refresh_per_second=100):
                shown += wait_for_the_line()
                logging.getLogger("runner").warning("it is told")
                shown += wait_for_the_line()
            assert handler.stream is sys.stderr is stderr
        terminal.write("the live line")
        terminal.flush()
        shown += wait_for_the_line()
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()
    assert lines.count("the live line") >= 5
    assert lines.count("it is told") == (0 if stderr_is_a_file else 2)
    assert {*lines} <= {"the live line", "it is told", ""}
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
        "from runner.terminal import lasting_output\n"
        "os.closerange(0, 3)\n"
        "sys.stdout = sys.stderr = None\n"
        "with lasting_output():\n"
        "    print('lost', flush=True)\n"
        "    print('lost', file=sys.stderr, flush=True)\n"
        "    assert open(os.devnull).fileno() > 2 and all(map(os.get_inheritable, range(3)))\n"
        "os._exit(0)\n"
    )
    run_python(["-c", program], check=True)
