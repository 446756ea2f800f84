"""`--json` prints results for programs.

A program reads one JSON object on stdout, the exit code, and optionally lines of progress in a file.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from main_runs import SHORT
from tiers import fast
from wrong_commands import WRONG, assert_nothing_left, assert_one_message, plant_modules

from runner.failures.errors import RankFailed
from runner.failures.exit_codes import ENVIRONMENT_FAILED, FAILED, NAMES, code_of_failure
from runner.failures.facts import Facts
from runner.records.result import Result
from runner.terminal.answer import SCHEMA, error_object, run_with_answer

OUTPUT_SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs/schemas/output-1.json").read_text())
QUIET = (*SHORT, "callbacks=none")
CLIPPING = "algorithms.gradient_clipping.clipping_type"
KEYLESS = (
    *("nonsense", "=3", "--seed=1", "--mutlirun", "chek", "version", "my_config.yaml"),
    "hydra/job_logging=disabled",
)
"""Wrong commands whose error belongs to no key."""
LOUD = """
import atexit, os
from runner import Callback

atexit.register(print, "at exit")

class Loud(Callback):
    def fit_end(self, state, logger):
        print("printed")
        os.write(1, b"written\\n")
"""


def read(finished: Any) -> dict[str, Any]:
    """Return the object that a command printed, and assert that stdout is this object and conforms to the schema."""
    (line,) = finished.out.splitlines()
    answer = json.loads(line, parse_constant=pytest.fail)
    Draft202012Validator(OUTPUT_SCHEMA).validate(answer)
    assert set(answer) == {*OUTPUT_SCHEMA["properties"]} and answer["exit_code"] == finished.code
    assert answer["error"] is None or answer["error"]["code"] == NAMES[finished.code]
    return answer


def test_the_schema_is_valid_and_has_every_field_of_a_result():
    Draft202012Validator.check_schema(OUTPUT_SCHEMA)
    assert OUTPUT_SCHEMA["properties"]["schema"]["const"] == SCHEMA
    fields = {field.name for field in dataclasses.fields(Result)}
    assert {*OUTPUT_SCHEMA["$defs"]["result"]["properties"]} == fields | {"schema", "folder"}
    assert {*OUTPUT_SCHEMA["$defs"]["error"]["properties"]["code"]["enum"]} == {*NAMES.values()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"exit_code": 2, "error": None},
        {"exit_code": 0, "error": error_object(2, "no")},
        {"error": error_object(2, "no") | {"code": "unknown"}, "exit_code": 2},
        {"verb": "train", "result": {"status": "FINISHED"}},
        {"schema": 2},
    ],
)
def test_the_schema_rejects_inconsistent_objects(wrong: dict[str, Any]):
    right = {"schema": 1, "verb": "list", "command": [], "exit_code": 0, "result": None, "error": None}
    validator = Draft202012Validator(OUTPUT_SCHEMA)
    assert validator.is_valid(right) and not validator.is_valid(right | wrong)


@pytest.mark.parametrize(
    "command", fast(WRONG, "speed_monitor", "+callbacks.mine._target_=needy.Mine", "rerun missing", "--seed=1")
)
def test_a_wrong_command_prints_one_object_and_one_message(
    command: str, run_here: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if "submitit_slurm" in command:  # as on a machine without Slurm
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    plant_modules(folder)
    before = sorted(folder.rglob("*"))
    finished = run_here(*command.split(), "--json", code=2)
    answer = read(finished)
    assert answer["result"] is None and (answer["error"]["key"] is None) == (command in KEYLESS)
    assert f"error: {answer['error']['message']}" in finished.err
    assert_one_message(command, finished.err)
    assert_nothing_left(folder, before)


@pytest.mark.parametrize(
    ("command", "key", "fix", "allowed"),
    [
        ("runs --format tabel", "--format", "--format table", "csv"),
        ("model=mpl", "model", "model=mlp", "resnet8"),
        ("optimizer.lrr=1", "optimizer.lrr", "optimizer.lr=1", "momentum"),
        ("speed_monitor", "callbacks", "+callbacks=speed_monitor", None),
        ("+callbacks=speed_monitr", "callbacks", "+callbacks=speed_monitor", "lr_monitor"),
        ("callbacks=speed_monitor,lr_monitor", "callbacks", "callbacks=[speed_monitor,lr_monitor]", None),
        ("scheduler=cosine", "scheduler", "scheduler=cosine_annealing", "linear"),
        ("+model=mlp", "model", "model=mlp", None),
        ("~data", "data", None, "digits"),
        ("optimizer.nesterov=maybe", "optimizer.nesterov", None, "true"),
        ("trainer.precision=fp16", "trainer.precision", "trainer.precision=amp_fp16", None),
        ("trainer.max_duration=5epochs", "trainer.max_duration", "trainer.max_duration=5ep", None),
        ("objective=eval/acuracy", "objective", "objective=eval/MulticlassAccuracy", "eval/loss"),
        ("callbacks.checkpoint_saver.monitor=nothing", "callbacks.checkpoint_saver.monitor", None, "eval/loss"),
        ("+algorithms=gradient_clipping algorithms.gradient_clipping.clipping_type=x", CLIPPING, None, "adaptive"),
        ("hydra.run.dir=/proc/none", "hydra.run.dir", None, None),
        ("check model=gpt", "model", None, None),
        ("check model=gpt data=digits", None, None, None),
        ("--config-dir=missing", "--config-dir", None, None),
        ("--config-name=nothing", "--config-name", None, None),
        ("seed = 3", "seed", "seed=3", None),
        ("run_name=a)b", "run_name", 'run_name="a)b"', None),
        ("+callbacks=[speed_monitor", "callbacks", None, None),
        ("prove --without lr_monitr", "--without", None, "lr_monitor"),
        ("prove --kill 3", "--kill", "--kills", "--batches"),
        ("prove --kills many", "--kills", None, None),
        ("chek", None, "check", "explain"),
        ("resume missing", "RUN", None, None),
        ("resume", "RUN", None, None),
        ("mode=eval resume=outputs/one", "mode", "runner eval outputs/one", None),
        ("verdict outputs", "RUNS", None, None),
        ("trainer.max_duration=100tok", "trainer.max_duration", None, None),
        ("~callbacks.speed_monitor", "callbacks.speed_monitor", None, None),
        ("--seed=1", None, "seed=1", None),
        ("--mutlirun", None, "--multirun", None),
        ("-m optimizer.momentum=0.9,0 seed=0,1", "optimizer", None, None),
    ],
)
def test_an_error_has_its_key_fix_and_allowed_values_as_fields(
    command: str, key: str | None, fix: str | None, allowed: str | None, run_here: Any
):
    code = 125 if command.startswith("verdict") else 2
    error = read(run_here(*command.split(), "--json", code=code))["error"]
    assert (error["key"], error["fix"]) == (key, fix)
    assert allowed is None or allowed in error["allowed"]


@pytest.mark.parametrize(
    "command",
    [
        "resume https://me:secret@host/a b",
        "mode=eval resume=https://me:secret@host/a",
        "--data.path=https://me:secret@host/a",
        "optimizer.lr=https://me:secret@host/a",
    ],
)
def test_an_error_hides_credentials(command: str, run_here: Any):
    finished = run_here(*command.split(), "--json", code=2)
    assert "secret" not in finished.out + finished.err
    assert "https://***@host/" in finished.err and read(finished)["error"]["fix"] is None


def test_output_formats_other_than_json_are_refused(run_here: Any):
    assert "--json='yaml': takes no value" in run_here("--json=yaml", code=2).err
    assert "write runner runs --json" in run_here("runs", "output=json", code=2).err


def test_a_run_prints_its_result(run_here: Any, tmp_path: Path):
    file = tmp_path / "progress.jsonl"
    lines = ("callbacks=progress_lines", f"callbacks.progress_lines.path={file}")
    answer = read(run_here(*SHORT, *lines, "--json", code=0))
    folder = Path(answer["result"].pop("folder"))
    written = json.loads((folder / "result.json").read_text())
    assert answer["result"] == written
    result_schema = {**OUTPUT_SCHEMA["$defs"]["result"], "$defs": OUTPUT_SCHEMA["$defs"]}
    Draft202012Validator(result_schema).validate(written)
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [event["event"] for event in events] == ["fit_start", *["epoch_end", "eval_end"] * 2, "fit_end"]
    assert events[-1]["batch"] == 6 and "eval/loss" in events[-1]["metrics"]


@pytest.mark.slow
def test_every_verb_prints_its_result(run_here: Any, tmp_path: Path):
    one, two = (str(tmp_path / "outputs" / name) for name in ("one", "two"))
    for folder, seed in ((one, 0), (two, 1)):
        run_here(*SHORT, "callbacks=checkpoint_saver", f"hydra.run.dir={folder}", f"seed={seed}", "--json", code=0)
    commands = {
        "list data": "choices",
        "help seed": "text",
        "completion bash": "text",
        "check model=mlp": "warnings",
        "explain": "events",
        "runs": "runs",
        "table": "cells",
        f"compare {one} {two}": "runs",
        f"verdict {one} {two}": "comparisons",
        f"export {one} {tmp_path / 'model.pt'}": "path",
        f"eval {one}": "metrics",
        f"predict {one} --format pt": "files",
        "lr-range model=mlp --batches 30": "suggestion",
        "init mine": "folder",
    }
    for command, name in commands.items():
        answer = read(run_here(*command.split(), "--json", code=0))
        assert name in answer["result"], command


@pytest.mark.slow
def test_a_sweep_prints_its_jobs(run_here: Any):
    result = read(run_here("-m", "seed=0,1", *QUIET, "--json", code=0))["result"]
    assert [job["status"] for job in result["jobs"]] == ["FINISHED"] * 2 and result["settings"][0]["n"] == 2


def wrap(error: BaseException) -> RuntimeError:
    """Return an exception that an error caused."""
    outer = RuntimeError("training failed")
    outer.__cause__ = error
    return outer


def out_of_memory() -> RuntimeError:
    """Return the error of torch for a tensor that does not fit into memory."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    return raised.value


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ENVIRONMENT_FAILED),
        (OSError(errno.ENOENT, "No such file"), FAILED),
        (MemoryError(), ENVIRONMENT_FAILED),
        (out_of_memory(), ENVIRONMENT_FAILED),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), ENVIRONMENT_FAILED),
        (
            RuntimeError("NCCL error in: x.cpp:1, remote process exited\nncclRemoteError: A call failed"),
            ENVIRONMENT_FAILED,
        ),
        (RuntimeError("NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: This usually"), FAILED),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. "), FAILED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FAILED),
        (RankFailed(1, "killed", Facts(of_environment=True)), ENVIRONMENT_FAILED),
        (RankFailed(1, "ValueError: no"), FAILED),
        (ValueError("no"), FAILED),
    ],
)
def test_the_exit_code_says_whether_a_retry_may_help(error: BaseException, code: int):
    assert code_of_failure(wrap(error)) == code


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_output_of_user_code_goes_to_stderr(run_app: Any, ranks: int, tmp_path: Path):
    (tmp_path / "own.py").write_text(LOUD)
    loud = "+callbacks.own._target_=own.Loud"
    finished = run_app(*QUIET, loud, f"launch.nproc_per_node={ranks}", "--json")
    assert json.loads(finished.stdout)["result"]["status"] == "FINISHED"
    for text in ("printed", "written", "at exit"):
        assert finished.stderr.count(text) == ranks


@pytest.mark.parametrize(("code", "message"), [(130, "Ctrl-C ended the command"), (143, "SIGTERM ended the command")])
def test_the_error_names_the_signal_that_ended_a_command(
    code: int, message: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    monkeypatch.setattr(sys, "argv", ["runner", "--json"])
    assert run_with_answer(lambda arguments: code) == code
    assert json.loads(capfd.readouterr().out)["error"]["message"] == message
