"""Tracebacks for users: calls in libraries are counted, and calls in the user's files are shown."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, TensorDataset

from runner.data.images.decoding import open_image
from runner.failures.tracebacks import are_whole, environment_of_user, format_failure, is_of_user, raised_by_hydra


def failure_in(folder: Path, code: str, *arguments: Any) -> BaseException:
    """Write code with a function `fail` to a file in a folder, call it, and return its exception."""
    file = folder / "own.py"
    file.write_text(code)
    names: dict[str, Any] = {}
    exec(compile(code, str(file), "exec"), names)
    with pytest.raises(Exception) as caught:
        names["fail"](*arguments)
    return caught.value


def test_calls_in_libraries_are_counted_and_calls_of_the_user_are_shown(tmp_path: Path):
    code = "def fail(module, x):\n    return module(x)\n"
    error = failure_in(tmp_path, code, torch.nn.Linear(3, 2), torch.ones(1, 4))
    lines = format_failure(error).splitlines()
    index = lines.index(f'  File "{tmp_path}/own.py", line 2, in fail')
    assert lines[index + 1] == "    return module(x)"
    (count,) = [line for line in lines if " calls in torch" in line]
    assert count.startswith("  [") and count.endswith("; HYDRA_FULL_ERROR=1 shows them]")
    assert lines[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert not any("site-packages" in line for line in lines)


def test_library_calls_of_a_cause_are_counted_too(tmp_path: Path):
    body = "    try:\n        json.loads('[')\n    except ValueError as error:\n        raise KeyError(1) from error\n"
    code = f"import json\ndef fail():\n{body}"
    text = format_failure(failure_in(tmp_path, code))
    assert "calls in json; HYDRA_FULL_ERROR=1 shows them]" in text
    assert "direct cause" in text and text.rstrip().endswith("KeyError: 1")


def test_a_traceback_without_calls_of_the_user_is_shown_in_full():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("[")
    error = caught.value
    assert error.__traceback__ is not None
    text = format_failure(error.with_traceback(error.__traceback__.tb_next))
    assert "in raw_decode" in text and " calls in " not in text


def test_an_error_that_the_runner_raised_itself_is_shown_without_calls():
    with pytest.raises(ValueError, match="image 3") as caught:
        open_image(b"broken", name="image 3")
    error = caught.value
    assert error.__traceback__ is not None
    first, *message = format_failure(error.with_traceback(error.__traceback__.tb_next)).splitlines()
    assert first.endswith("; HYDRA_FULL_ERROR=1 shows them]") and " calls in runner" in first
    assert message == [f"ValueError: {error}"]


def read_broken(indices: Any) -> Any:
    return torch.zeros(3).view(2, 2)


def sent_by_a_worker() -> ExceptionWrapper:
    """Return what a data worker sends if `read_broken` fails: the class of the exception, and its traceback as text."""
    try:
        return next(iter(DataLoader(TensorDataset(torch.zeros(1)), collate_fn=read_broken)))
    except RuntimeError:
        return ExceptionWrapper(where="in DataLoader worker process 0")


def test_calls_in_a_data_worker_are_counted_too():
    with pytest.raises(RuntimeError, match="Caught RuntimeError in DataLoader worker") as caught:
        sent_by_a_worker().reraise()
    text = format_failure(caught.value)
    assert "return torch.zeros(3).view(2, 2)" in text and "in fetch" not in text
    assert re.search(r"Original Traceback .*\n(.*\n)*  \[\d+ calls in torch; .*\]\n  File .* in read_broken\n", text)


@pytest.mark.parametrize("is_set", [True, False])
def test_hydra_full_error_shows_the_full_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if is_set:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    error = failure_in(tmp_path, "import json\ndef fail():\n    json.loads('[')\n")
    with raised_by_hydra():
        assert os.environ["HYDRA_FULL_ERROR"] == "1"
        assert ("HYDRA_FULL_ERROR" in environment_of_user()) == is_set
        assert ("in raw_decode" in format_failure(error)) == is_set
    assert ("HYDRA_FULL_ERROR" in os.environ) == is_set
    assert not are_whole()  # later calls in this process do not belong to the user's command


def test_files_of_libraries_and_frozen_modules_are_not_files_of_the_user():
    assert is_of_user("/home/me/project/model.py")
    for file in (torch.__file__, json.__file__, "<string>", "<frozen runpy>"):
        assert not is_of_user(str(file))
