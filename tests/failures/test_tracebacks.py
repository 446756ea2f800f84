"""Tracebacks as users read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.failures.tracebacks import are_whole, environment_of_user, format_failure, is_of_user, raised_by_hydra


def failure_in(folder: Path, code: str, *arguments: Any) -> BaseException:
    """The exception that a user's function raises, from a file in a folder."""
    file = folder / "own.py"
    file.write_text(code)
    names: dict[str, Any] = {}
    exec(compile(code, str(file), "exec"), names)
    with pytest.raises(Exception) as raised:
        names["fail"](*arguments)
    return raised.value


def test_calls_of_libraries_are_counted_and_the_users_are_shown(tmp_path: Path):
    error = failure_in(
        tmp_path, "def fail(module, x):\n    return module(x)\n", torch.nn.Linear(3, 2), torch.ones(1, 4)
    )
    lines = format_failure(error).splitlines()
    at = lines.index(f'  File "{tmp_path}/own.py", line 2, in fail')
    assert lines[at + 1] == "    return module(x)"
    (counted,) = [line for line in lines if " calls in torch" in line]
    assert counted.startswith("  [") and counted.endswith("; HYDRA_FULL_ERROR=1 shows them]")
    assert lines[-1].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert not any("site-packages" in line for line in lines)


def test_a_cause_is_shortened_as_well(tmp_path: Path):
    body = "    try:\n        json.loads('[')\n    except ValueError as error:\n        raise KeyError(1) from error\n"
    code = f"import json\ndef fail():\n{body}"
    text = format_failure(failure_in(tmp_path, code))
    assert "calls in json; HYDRA_FULL_ERROR=1 shows them]" in text
    assert "direct cause" in text and text.rstrip().endswith("KeyError: 1")


def test_without_a_call_of_the_users_everything_is_shown():
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("[")
    error = raised.value
    assert error.__traceback__ is not None
    text = format_failure(error.with_traceback(error.__traceback__.tb_next))
    assert "in raw_decode" in text and " calls in " not in text


@pytest.mark.parametrize("wanted", [True, False])
def test_whole_tracebacks_are_there_for_the_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if wanted:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    error = failure_in(tmp_path, "import json\ndef fail():\n    json.loads('[')\n")
    with raised_by_hydra():
        assert os.environ["HYDRA_FULL_ERROR"] == "1"
        assert ("HYDRA_FULL_ERROR" in environment_of_user()) == wanted
        assert ("in raw_decode" in format_failure(error)) == wanted
    assert ("HYDRA_FULL_ERROR" in os.environ) == wanted
    assert not are_whole()  # what is called later in this process is no command of the user's


def test_whose_a_file_is():
    assert is_of_user("/home/me/project/model.py")
    for file in (torch.__file__, json.__file__, "<string>", "<frozen runpy>"):
        assert not is_of_user(str(file))
