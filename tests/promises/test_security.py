"""Checkpoints are loaded without unpickling.

If someone else made a run, its third-party classes, addresses and outside paths are not used until you allow them.
Passwords are never recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import ADDRESSES, ATTACKS, ATTENTION, CODE, EVIL, Evil, attack_mlflow
from kept_runs import CLEAN, LONGER, QUIET, SHORT, foreign_run
from main_runs import query
from python_process import find_free_port
from tiers import fast

from runner.callbacks._mlflow.target import read_target
from runner.cli.command import parse
from runner.cli.verbs import VERBS
from runner.history.rerun import merge_config
from runner.history.saved_run import SavedRun, _is_plain, find_saved_run
from runner.records.record import Record
from runner.records.trust import check_arguments
from runner.records.write import write_record


def find(*arguments: object) -> SavedRun | None:
    """Return the saved run that a command uses."""
    return find_saved_run(parse([*map(str, arguments)]))


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is created when the module `own` in the working directory is imported."""
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath('imported').touch()\ndef Evil(**_): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path / "imported"
    sys.modules.pop("own", None)


@pytest.mark.parametrize("attack", fast(ATTACKS, "a callback", "torch itself", "an interpolation"))
@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_an_untrusted_record_runs_nothing_without_permission(attack: str, verb: str, evil: Path, tmp_path: Path):
    config, overrides, named = ATTACKS[attack]
    folder = foreign_run(tmp_path / "run", config, overrides)
    with pytest.raises(ValueError, match="made by someone else") as raised:
        find(verb, folder)
    assert named in str(raised.value) and "add --allow-targets " in str(raised.value)
    assert not evil.exists()


def test_an_untrusted_class_runs_after_it_is_allowed(evil: Path, tmp_path: Path):
    folder = foreign_run(tmp_path / "run", ATTACKS["a callback"][0], [])
    for insufficient in ("--allow-targets=own.Other", "--allow-targets=own", "--allow-targets="):
        with pytest.raises(ValueError, match=r"own\.Evil"):
            find("rerun", folder, insufficient)
    assert not evil.exists()
    for allowed in (
        "--allow-targets own.Evil",
        "--allow-targets=own.*",
        "--allow-targets=a.B --allow-targets=c.D,own.*",
    ):
        saved = find("rerun", folder, *allowed.split())
        assert saved is not None and saved.config["callbacks"] == {"x": {"_target_": "own.Evil"}}


def test_an_untrusted_record_cannot_allow_itself_or_configure_hydra(evil: Path, tmp_path: Path):
    config = ATTACKS["a callback"][0] | {"allow_targets": ["own.*"]}
    folder = foreign_run(tmp_path / "run", config, ["+allow_targets=[own.*]", "--allow-targets=own.*"])
    with pytest.raises(ValueError, match=r"own\.Evil"):
        find("resume", folder)
    hydra = ["hydra/launcher=joblib", "+hydra.sweeper._target_=own.Evil", "hydra.searchpath=[file:///tmp]", "-m"]
    saved = find("resume", foreign_run(tmp_path / "other", {}, [*hydra, "model=mlp"]))
    assert saved is not None and saved.overrides == ["model=mlp"]
    dangerous = [*hydra, "+experiment@hydra.run=x", "+hydra@x=y", "model=../../evil", "experiment=[../evil]", "a/..=b"]
    dangerous += ["run_name=${hydra:job.name}", "model='../evil'", "~hydra.run", "++hydra.run.dir=x"]
    plain = ["run_name=hydra-nets", "+note=a..b", "+data.path=../images", "optimizer.lr=0.5"]
    assert [override for override in (*dangerous, *plain) if _is_plain(override)] == plain


def test_built_in_classes_and_the_user_s_own_runs_need_no_permission(
    evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    harmless = {
        "callbacks": {"a": {"_target_": "runner.callbacks.SpeedMonitor"}},
        "loss": {"_target_": "torch.nn.MSELoss"},
    }
    assert find("rerun", foreign_run(tmp_path / "harmless", harmless, [])) is not None
    run_dir = tmp_path / "mine"
    write_record(run_dir, CLEAN | {"x": {"_target_": "own.Evil"}}, ["seed=1"])
    assert find("rerun", run_dir) is not None
    assert find("resume", run_dir) is not None
    for name in ("config.yaml", "overrides.yaml"):  # a changed file is not the user's any more
        before = (run_dir / name).read_text()
        (run_dir / name).write_text(before + "\n")
        with pytest.raises(ValueError, match=r"own\.Evil"):
            find("rerun", run_dir)
        (run_dir / name).write_text(before)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    with pytest.raises(ValueError, match=r"own\.Evil"):
        find("rerun", run_dir)
    assert not evil.exists()


@pytest.mark.parametrize("address", ADDRESSES)
def test_untrusted_addresses_and_outside_paths_need_permission(address: str, tmp_path: Path):
    config, shown = ADDRESSES[address]
    folder = foreign_run(tmp_path / "run", config, [])
    with pytest.raises(ValueError, match="made by someone else") as raised:
        check_arguments(Record(folder), [config], [], [], [])
    assert shown in str(raised.value)
    advice = re.search(r"add (--allow-addresses .*)$", str(raised.value))
    assert advice is not None
    command = parse(["resume", "x", *shlex.split(advice[1])])
    check_arguments(Record(folder), [config], [], command.options["allow_addresses"], [])
    check_arguments(Record(folder), [config], [], ["*"], [])
    for key in config:
        check_arguments(Record(folder), [config], [], [], [key])


def test_a_typed_address_replaces_an_untrusted_one(tmp_path: Path):
    config = {"callbacks": {"mlflow_logger": {"tracking_uri": "http://evil.example"}}}
    folder = foreign_run(tmp_path / "run", config, ["callbacks.mlflow_logger.tracking_uri=http://evil.example"])
    key = "callbacks.mlflow_logger.tracking_uri"
    for typed in (f"{key}=http://mine", "~callbacks.mlflow_logger"):
        assert find("resume", folder, typed) is not None
    with pytest.raises(ValueError, match=r"http://evil\.example"):
        find("resume", folder, "+callbacks=speed_monitor")


@pytest.mark.parametrize(
    "command",
    fast(
        [
            "resume run seed=5",
            "rerun run",
            "rerun run seed=5",
            "eval run",
            "replay run",
            "runs",
            "runs --format csv",
            "compare run other",
            "verdict run other",
            "explain run",
        ],
        "resume run seed=5",
        "rerun run",
        "runs",
        "compare run other",
        "explain run",
    ),
)
def test_escape_codes_in_an_untrusted_record_do_not_reach_the_terminal(command: str, tmp_path: Path, run_here: Any):
    """The codes are in keys, values, the names of files and of the run, and in the result of the run."""
    for name in ("run", "other", "outputs"):
        folder = foreign_run(
            tmp_path / name,
            {f"k{EVIL}": f"v{EVIL}", "vars": {f"k{EVIL}": name}, "callbacks": {f"c{EVIL}": {"_target_": "none"}}},
            ["seed=1", f"+vars.a={EVIL}"],
        )
        (folder / "environment.json").write_text(json.dumps({"run_name": EVIL, "packages": {EVIL: EVIL}}))
        fields = {"status": EVIL, "name": EVIL, "identity": EVIL, "overrides": [EVIL], "metrics": {EVIL: 1.0}}
        (folder / "result.json").write_text(json.dumps(fields))
        checkpoint = folder / "checkpoints" / f"ep1{EVIL}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": {f"m{EVIL}.pt": {}}}))
    verb = command.split()[0]
    allow = [
        f"--{option.name}=*" for option in VERBS[verb].options if option.name in ("allow-targets", "allow-addresses")
    ]
    for options in ([], allow):
        finished = run_here(*command.split(), *options)
        assert all(char.isprintable() or char in "\n\t" for char in finished.out + finished.err), repr(finished)


@pytest.mark.parametrize("attack", CODE)
def test_untrusted_commands_and_code_need_permission_in_any_form(attack: str, tmp_path: Path):
    section, shown, allowed = CODE[attack]
    config = {"callbacks": {"m": section}}
    folder = foreign_run(tmp_path / "run", config, [])
    with pytest.raises(ValueError, match="not part of this project: ") as raised:
        find("rerun", folder)
    assert shown in str(raised.value)
    assert find("rerun", folder, "--allow-targets", allowed) is not None
    assert find("rerun", folder, "callbacks=[checkpoint_saver]") is not None


def test_harmless_arguments_need_no_permission(tmp_path: Path):
    sections = {
        "m": {"_target_": "runner.callbacks.MLPerfCallback", "cache_clear_cmd": None},
        "a": {"_target_": "runner.models.hf.network.HFNetwork", **ATTENTION, "attention": "sdpa", "lora": {"r": 4}},
        "n": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.ReLU"}]},
        "s": {"_target_": "runner.callbacks.CheckpointSaver", "folder": "kept", "monitor": "eval/loss"},
        "d": {"_target_": "runner.data.images.cifar10.load_cifar10", "path": "data/cifar10"},
    }
    assert find("rerun", foreign_run(tmp_path / "run", {"callbacks": sections}, [])) is not None


@pytest.mark.slow
def test_an_allowed_package_does_not_allow_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only the classes and functions that a package defines are allowed with it, under any name in the package."""
    (tmp_path / "mine_16").mkdir()
    (tmp_path / "mine_16" / "__init__.py").write_text(
        "import functools, pathlib, torch\nfrom .models import Net\n"
        "load = functools.partial(torch.load)\nwrite = pathlib.Path('x').write_text\n"
    )
    (tmp_path / "mine_16" / "models.py").write_text("class Net:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    allow = "--allow-targets=mine_16.*"
    for name, home in (
        ("mine_16.torch.load", "torch.serialization.load"),
        ("mine_16.load", "functools.partial"),
        ("mine_16.write", "pathlib.Path.write_text"),
        ("mine_16.models.Net.__init__", "builtins.wrapper_descriptor"),
    ):
        folder = foreign_run(tmp_path / name, {"data": {"_target_": name}}, [])
        with pytest.raises(ValueError, match="not part of this project: ") as raised:
            find("rerun", folder, allow)
        assert f"{name}, which is {home}" in str(raised.value)
        assert find("rerun", folder, f"{allow},{home}") is not None
    for name in ("mine_16.Net", "mine_16.models.Net"):
        folder = foreign_run(tmp_path / name, {"data": {"_target_": name}}, [])
        for allowed in (allow, f"--allow-targets={name}"):
            assert find("rerun", folder, allowed) is not None


def test_a_typed_override_counts_even_if_an_untrusted_record_lists_the_same_override(tmp_path: Path):
    typed = "callbacks.mlflow_logger.tracking_uri=sqlite:///mine.db"
    evil = {"mlflow_logger": {"_target_": "runner.callbacks.MLflowLogger", "tracking_uri": "http://evil.example"}}
    folder = foreign_run(tmp_path / "run", {"callbacks": evil}, [typed])
    saved = find("rerun", folder, typed)
    assert saved is not None
    merged = merge_config(saved, saved.base, [typed])
    assert merged["callbacks"]["mlflow_logger"]["tracking_uri"] == "sqlite:///mine.db"


@pytest.mark.parametrize("has_record", [True, False])
def test_links_and_pipes_in_an_untrusted_folder_are_refused(has_record: bool, tmp_path: Path):
    folder, checkpoints = foreign_run(tmp_path / "run", {}, []), tmp_path / "run" / "checkpoints"
    (checkpoints / "ep1").mkdir(parents=True)
    (checkpoints / "ep1" / "manifest.json").write_text('{"files": {}}')
    (checkpoints / "latest").symlink_to("ep1")
    if not has_record:
        (folder / "config.yaml").unlink()
        (folder / "overrides.yaml").unlink()
    find("resume", folder)
    for make in (
        lambda path: path.symlink_to(tmp_path / "secret"),
        lambda path: path.symlink_to("../../.."),
        os.mkfifo,  # reading it would never end
    ):
        for name in ("mlflow", "result.json", "checkpoints/ep1/model.pt", "git.patch"):
            make(folder / name)
            with pytest.raises(ValueError, match=re.escape(str(folder / name))):
                find("resume", folder)
            (folder / name).unlink()


def dump(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize(
    ("name", "write", "reason"),
    [
        ("state.pt", torch.save, "which could run code, so it is rejected"),
        pytest.param("state.pt", dump, "was not written by this project", marks=pytest.mark.slow),
        pytest.param("model.pt", torch.save, "which could run code, so it is rejected", marks=pytest.mark.slow),
        pytest.param("model.pt", dump, "was not written by this project", marks=pytest.mark.slow),
    ],
)
def test_a_malicious_checkpoint_is_refused_without_running_its_code(
    name: str, write: Any, reason: str, tmp_path: Path, run_app: Any
):
    """The manifest matches the malicious file, so only the content shows that it is malicious."""
    run_app(*SHORT, *QUIET, "hydra.run.dir=run")
    checkpoint = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    write({"weight": Evil()}, checkpoint / name)
    content = (checkpoint / name).read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    path = f"run/checkpoints/{checkpoint.name}"
    commands = [("resume", path, LONGER)]
    if name == "model.pt":
        commands += [("eval", path), (*SHORT, *QUIET, f"trainer.load_path={path}", "hydra.run.dir=other")]
    for command in commands:
        refused = run_app(*command, exit_code=2)
        assert refused.stderr.count("error: ") == 1 and reason in refused.stderr
        assert "Traceback" not in refused.stderr and "weights_only" not in refused.stderr
    resumed = run_app("resume", "run", LONGER)  # from the previous checkpoint
    assert f"{checkpoint.name} is not used" in resumed.stderr and reason in resumed.stderr
    assert not (tmp_path / "ran").exists() and not (tmp_path / "other").exists()
    with contextlib.chdir(tmp_path / "run"):
        pickle.loads(pickle.dumps(Evil()))
    assert (tmp_path / "run" / "ran").exists()  # so unpickling would have run the code


LOGGED = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]")


@pytest.fixture
def attacked(folder: Path, request_log: tuple[str, list[str]], run_app: Any) -> dict[str, str | None]:
    """The environment of a user whose run was returned with a malicious `mlflow/` folder and links to a secret file."""
    (folder / "outputs" / "mlflow.db").rename(folder / "store.db")
    shutil.copy(folder / "store.db", folder / "theirs.db")
    run_app(*LOGGED, "hydra.run.dir=run", env={"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/theirs.db"})
    (folder / "secret.txt").write_text("a secret")
    (folder / "victim.npy").write_text("precious")
    attack_mlflow(folder / "run", request_log[0], folder / "secret.txt", folder / "victim.npy")
    (folder / "outputs").mkdir(exist_ok=True)
    (folder / "store.db").rename(folder / "outputs" / "mlflow.db")
    return {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/outputs/mlflow.db"}


def test_the_mlflow_files_of_an_untrusted_run_are_not_sent(
    attacked: dict[str, str | None], folder: Path, request_log: tuple[str, list[str]], run_app: Any
):
    (folder / "run" / "signature").write_text("another user's")
    assert read_target(folder / "run" / "mlflow") is None
    refused = run_app("sync", "run", exit_code=2, env=attacked)
    assert str(folder / "run" / "link") in refused.stderr
    for link in ("link", "folder/link"):
        (folder / "run" / link).unlink()
    refused = run_app("sync", "run", exit_code=2, env=attacked)
    address, requests = request_log
    assert "run/mlflow/run.json: this run was made by someone else" in refused.stderr and address in refused.stderr
    assert not requests and (folder / "victim.npy").read_text() == "precious"


def test_a_malicious_mlflow_folder_in_the_user_s_run_uploads_and_deletes_nothing(
    attacked: dict[str, str | None], folder: Path, request_log: tuple[str, list[str]], run_app: Any
):
    """The record is the user's own, so it may contain links; the run is logged to the user's own store."""
    run_app("resume", "run", "trainer.max_duration=3ep", env=attacked)
    assert not request_log[1] and (folder / "victim.npy").read_text() == "precious"
    assert query(folder, "select name from experiments where name != 'Default'") == [("runner",)]
    assert query(folder, "select status from runs") == [("FINISHED",)]
    artifacts = [path for path in (folder / "outputs" / "mlartifacts").rglob("*") if path.is_file()]
    assert artifacts and not any("a secret" in path.read_text(errors="replace") for path in artifacts)
    assert not (folder / "into").exists() and not list(folder.rglob("stolen"))
    log = (folder / "run" / "mlflow" / "writer.log").read_text()
    assert log.count("artifact was left out") == 5 and "/proc is not in the run's folder" in log
    assert f"{folder / 'secret.txt'} is not in the run's folder" in log


KEY = "callbacks.mlflow_logger.tracking_uri"


QUICK = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]", "callbacks.mlflow_logger.close_timeout=0")


def test_a_password_is_neither_printed_nor_written(tmp_path: Path, run_here: Any):
    host = f"127.0.0.1:{find_free_port()}"
    address = f"{KEY}='http://bob:s3cr@t@{host}/?token=s3cr-t'"
    commands = [run_here(*QUICK, address, "hydra.run.dir=run", code=0)]
    assert f"tracking_uri: http://***@{host}/?token=***" in (tmp_path / "run" / "config.yaml").read_text()
    for arguments in (("resume", "run", LONGER), ("sync", "run")):
        commands.append(run_here(*arguments, code=2))
        assert f"error: {KEY}='http://***@{host}/?token=***': " in commands[-1].err
        assert "type the full value again" in commands[-1].err
    commands.append(run_here("resume", "run", LONGER, address, code=0))
    assert "tracking_uri" not in commands[-1].err  # it is not reported as a change
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "FINISHED"
    commands.append(run_here(*QUICK, address, "objective=none", code=2))
    assert not [command for command in commands if "s3cr" in command.out + command.err]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in files if b"s3cr" in path.read_bytes()] == []
