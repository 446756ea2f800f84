"""The record of a run: config, command, environment, uncommitted changes and modules, kept for each session."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_runs import git

from runner.cli.command import parse
from runner.records.environment import differences, environment
from runner.records.record import Record
from runner.records.write import describe_origin, write_record

CONFIG = {"seed": 3, "model": {"_target_": "x.Y", "sizes": [1, 2], "none": None}, "trainer": {"max_duration": "1ep"}}


def test_a_record_holds_config_overrides_and_run_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run_dir = tmp_path / "deep" / "run"
    files = write_record(run_dir, CONFIG, ["seed=3", "+callbacks=[a,b]"], {"run_name": "my name"})
    assert [path.name for path in files] == ["config.yaml", "overrides.yaml", "environment.json", "signature"]
    assert {*run_dir.iterdir()} == {*files}
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == CONFIG
    assert list(yaml.safe_load((run_dir / "config.yaml").read_text())) == list(CONFIG)
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text()) == ["seed=3", "+callbacks=[a,b]"]
    kept = json.loads((run_dir / "environment.json").read_text())
    assert kept["git_commit"] is None and kept["run_name"] == "my name"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["seed=1", "run_name=two words"], "train seed=1 'run_name=two words'"),
        (
            ["resume", "my run", "--allow-changes", "seed,data", "seed=1"],
            "resume 'my run' --allow-changes=seed,data seed=1",
        ),
        (["-m", "fork", "run", "5,9", "--allow-divergence", "--afresh"], "fork run 5,9 --allow-divergence --afresh -m"),
        (["eval", "http://me:secret@host/run"], "eval 'http://***@host/run'"),
    ],
)
def test_a_record_holds_the_command_without_secrets(typed: list[str], kept: str, tmp_path: Path):
    command = parse(typed)
    write_record(tmp_path, CONFIG, [], describe_origin(command, ""))
    recorded = json.loads((tmp_path / "environment.json").read_text())
    assert recorded["verb"] == command.verb and recorded["command"] == f"python -m runner {kept}"


def test_uncommitted_changes_are_recorded_as_a_patch_that_applies(repository: Path):
    """The patch is exact to the byte for any content, and does not depend on the git settings of the user."""
    before = {"blank.txt": b"a\n\n", "latin.txt": b"caf\xe9\n", "bytes": bytes(range(256)), "dos.txt": b"a\r\n"}
    after = {"blank.txt": b"b\n\n", "latin.txt": b"caf\xe8\n", "bytes": bytes(range(255, -1, -1)), "dos.txt": b"b\r\n"}
    run_dir = repository / "run"
    assert "git.patch" not in [path.name for path in write_record(run_dir, CONFIG, [])]
    for name, content in before.items():
        (repository / name).write_bytes(content)
    git(repository, "add", *before)
    git(repository, "commit", "-qm", "second")
    for name, content in after.items():
        (repository / name).write_bytes(content)
        for key, value in (("diff.noprefix", "true"), ("color.ui", "always"), ("diff.external", "false")):
            git(repository, "config", key, value)
        (patch,) = [path for path in write_record(run_dir, CONFIG, []) if path.name == "git.patch"]
        git(repository, "checkout", "-q", ".")
        git(repository, "apply", str(patch))
        assert (repository / name).read_bytes() == content
        git(repository, "commit", "-qam", name)


def test_uncommitted_modules_are_recorded_for_each_session(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(repository)
    run_dir, config = repository / "run", {"model": {"_target_": "loose_module.Model"}}
    for width in (1, 2):
        (repository / "loose_module.py").write_text(f"width = {width}\n")
        monkeypatch.delitem(sys.modules, "loose_module", raising=False)
        importlib.import_module("loose_module")
        files = write_record(run_dir, config, [])
        assert files[-1] == run_dir / "code" / "loose_module.py"
    assert (run_dir / "sessions" / "1" / "code" / "loose_module.py").read_text() == "width = 1\n"
    assert (run_dir / "code" / "loose_module.py").read_text() == "width = 2\n"
    assert Record(run_dir).is_own and Record(run_dir / "sessions" / "1").is_own
    git(repository, "add", "loose_module.py")
    git(repository, "commit", "-qm", "second")
    write_record(run_dir, config, [])
    assert not (run_dir / "code").exists() and Record(run_dir).is_own


def test_a_failure_of_git_is_reported(repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    (repository / "code.py").write_text("a = 2\n")
    (repository / ".git" / "index").write_bytes(b"torn")
    write_record(repository / "run", CONFIG, [])
    assert "git failed, so the commit or uncommitted changes are not recorded" in caplog.text


def test_the_environment_names_folder_commit_ranks_and_versions(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    recorded = environment()
    assert recorded["folder"] == str(repository)
    assert recorded["git_commit"] == git(repository, "rev-parse", "HEAD")
    assert recorded["ranks"] == 4
    assert recorded["packages"]["torch"] == version("torch")
    assert recorded["python"] == ".".join(map(str, sys.version_info[:3]))
    assert json.loads(json.dumps(recorded)) == recorded


def test_records_of_earlier_sessions_are_kept(repository: Path):
    run_dir = repository / "run"
    for seed in (1, 2, 3):
        (repository / "code.py").write_text(f"a = {seed}\n")
        write_record(run_dir, CONFIG | {"seed": seed}, [f"seed={seed}"])
    for seed, folder in ((1, "sessions/1"), (2, "sessions/2"), (3, ".")):
        assert yaml.safe_load((run_dir / folder / "config.yaml").read_text())["seed"] == seed
        assert yaml.safe_load((run_dir / folder / "overrides.yaml").read_text()) == [f"seed={seed}"]
        assert ("git.patch" in {path.name for path in (run_dir / folder).iterdir()}) == (seed != 1)
        assert Record(run_dir / folder).is_own
    git(repository, "checkout", "-q", "code.py")
    write_record(run_dir, CONFIG, [])
    assert not (run_dir / "git.patch").exists(), "the patch of an earlier session was kept"


def test_another_commit_or_version_is_a_difference_from_the_record(repository: Path):
    recorded = environment()
    assert differences(recorded) == []
    (repository / "code.py").write_text("a = 2\n")
    git(repository, "commit", "-qam", "second")
    recorded["packages"]["torch"] = "1.0"
    commit, versions = differences(recorded)
    assert recorded["git_commit"][:10] in commit and git(repository, "rev-parse", "HEAD")[:10] in commit
    assert f"torch 1.0, now {version('torch')}" in versions
    assert differences({}) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_record(tmp_path / "file" / "run", CONFIG, [])


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.yaml", "- 1", "config.yaml is not the record of a run"),
        ("config.yaml", "a: [", "its config.yaml cannot be read"),
        ("config.yaml", "a: " + "x" * 1_000_001, "its config.yaml cannot be read.*at most 1,000,000"),
        ("overrides.yaml", "a: 1", "overrides.yaml is not the record of a run"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_the_file(name: str, text: str, reason: str, tmp_path: Path):
    write_record(tmp_path, CONFIG, ["seed=3"])
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=reason):
        _ = (Record(tmp_path).config, Record(tmp_path).overrides)
    assert Record(tmp_path).config_if_readable == ({} if name == "config.yaml" else CONFIG)
    assert not Record(tmp_path).is_own


@pytest.mark.parametrize("environment", ["", "[1]", '{"threads": "2", "ranks": -1, "from_batch": "7", "packages": 3}'])
def test_wrong_values_of_a_damaged_environment_are_ignored(environment: str, tmp_path: Path):
    (tmp_path / "environment.json").write_text(environment)
    record = Record(tmp_path)
    assert record.threads is None and record.ranks is None and record.began_after == 0
    assert (record.verb, record.run_name) == ("train", "")
    assert differences(record.environment) == []
