from __future__ import annotations

import logging
import re
import sys
import threading

import pytest

from runner.terminal import labelled_lines, make_console, print_block


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
