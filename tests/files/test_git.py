from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.callbacks._mlflow.description import git_tags
from runner.records import patch as patches
from runner.records.patch import git_commit, patch
from runner.records.uncommitted import loose_modules


def run_git(folder: Path, *arguments: str) -> str:
    """Run a git command as a user would, and return its output."""
    options = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a repository with two committed files, and a submodule in `lib` with the same files."""
    for name in ("origin", "work"):
        folder = tmp_path / name
        folder.mkdir()
        run_git(folder, "init", "-q")
        (folder / "own.py").write_text("a = 1\n")
        (folder / "data.bin").write_text("data\n")
        run_git(folder, "add", ".")
        run_git(folder, "commit", "-qm", "first")
    folder = tmp_path / "work"
    run_git(folder, "submodule", "--quiet", "add", str(tmp_path / "origin"), "lib")
    run_git(folder, "commit", "-qm", "second")
    monkeypatch.chdir(folder)
    return folder


def set_traps(folder: Path, marks: Path) -> None:
    """Set each option of a repository that makes git run a program; every program leaves a file in `marks`."""
    marks.mkdir(exist_ok=True)

    def program(name: str) -> str:
        return f"touch {marks}/{folder.name}-{name}; cat"

    for key in ("core.fsmonitor", "core.pager", "diff.external", "diff.d.command", "diff.d.textconv", "gpg.program"):
        run_git(folder, "config", key, program(key))
    for name in ("f", "with=sign", "with.dot"):
        run_git(folder, "config", f"filter.{name}.clean", program(f"clean-{name}"))
        run_git(folder, "config", f"filter.{name}.required", "true")
    run_git(folder, "config", "filter.p.process", program("process"))
    run_git(folder, "config", "diff.submodule", "log")
    run_git(folder, "config", "log.showSignature", "true")
    git_dir = Path(run_git(folder, "rev-parse", "--absolute-git-dir").strip())
    hook = git_dir / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{program('hook')} </dev/null")
    hook.chmod(0o755)
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info" / "attributes").write_text("own.py diff=d filter=with=sign\ndata.bin filter=with.dot\n")


def test_reading_a_repository_runs_none_of_its_programs(repository: Path, tmp_path: Path):
    marks = tmp_path / "marks"
    for folder in (repository, repository / "lib"):
        set_traps(folder, marks)
        for name in ("own.py", "data.bin"):  # makes git read the files
            os.utime(folder / name, (1, 1))
    assert git_commit() is not None
    patch()
    loose_modules({"a": {"_target_": "own.x"}})
    assert git_tags(str(repository), tmp_path)["mlflow.source.git.commit"] == git_commit()
    assert [*marks.iterdir()] == []
    subprocess.run(["git", "status"], cwd=repository, capture_output=True)
    assert [*marks.iterdir()] != []  # plain git runs them


def test_changes_in_submodules_are_part_of_the_patch(repository: Path):
    assert patch() == b"" and git_tags(".", repository)["mlflow.source.git.dirty"] == "false"
    (repository / "lib" / "own.py").write_text("a = 2\n")
    assert git_tags(".", repository)["mlflow.source.git.dirty"] == "true"
    (repository / "own.py").write_text("a = 3\n")
    diff = patch()
    run_git(repository, "checkout", "-q", "own.py")
    run_git(repository / "lib", "checkout", "-q", "own.py")
    assert patch() == b""
    subprocess.run(["git", "apply"], cwd=repository, input=diff, check=True)
    assert (repository / "lib" / "own.py").read_text() == "a = 2\n"
    assert (repository / "own.py").read_text() == "a = 3\n"


def test_changed_files_that_need_a_filter_are_named_in_a_warning(repository: Path, caplog: pytest.LogCaptureFixture):
    run_git(repository, "config", "filter.f.clean", "tr a-z A-Z")
    (repository / ".git" / "info" / "attributes").write_text("data.bin filter=f\n")
    (repository / "data.bin").write_text("other\n")
    (repository / "own.py").write_text("a = 2\n")
    diff = patch()
    assert b"own.py" in diff and b"data.bin" not in diff
    assert "changes to these files are not recorded: data.bin" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_checkout_of_another_owner_is_recorded(repository: Path, monkeypatch: pytest.MonkeyPatch):
    commit = git_commit()
    (repository / "own.py").write_text("a = 2\n")
    for path in (repository, *repository.rglob("*")):
        os.lchown(path, 12345, 12345)
    monkeypatch.delenv("SUDO_UID", raising=False)
    with pytest.raises(subprocess.CalledProcessError):
        run_git(repository, "rev-parse", "HEAD")
    assert git_commit() == commit and b"+a = 2" in patch()


def test_a_repository_that_git_cannot_read_is_reported(repository: Path, caplog: pytest.LogCaptureFixture):
    (repository / ".git" / "HEAD").write_text("broken")
    assert git_commit() is None and patch() == b""
    assert "git failed, so the commit or uncommitted changes are not recorded: fatal: not a git repo" in caplog.text


def test_nothing_is_logged_without_a_repository_or_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    assert git_commit() is None and patch() == b""
    run_git(tmp_path, "init", "-q")
    assert git_commit() is None and patch() == b"" and caplog.text == ""


def test_a_changed_large_file_is_recorded_by_its_digest(
    repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(patches, "LARGE", 1000)
    names = ("large.bin", "touched.bin", "gone.bin", "lib/inner.bin")
    for name in names:
        (repository / name).write_bytes(os.urandom(2000))
        run_git((repository / name).parent, "add", Path(name).name)
        run_git((repository / name).parent, "commit", "-qm", name)
    run_git(repository, "commit", "-qam", "the submodule")
    assert patch() == b""
    (repository / "large.bin").write_bytes(bytes(3000))
    (repository / "lib" / "inner.bin").write_bytes(bytes(10))
    (repository / "gone.bin").unlink()
    os.utime(repository / "touched.bin", (1, 1))
    (repository / "own.py").write_text("a = 2\n")
    diff = patch()
    lines = diff.decode().splitlines()
    digest = run_git(repository, "hash-object", "large.bin").strip()
    assert f'# not recorded: "large.bin", 3000 bytes, blob {digest}' in lines
    assert '# not recorded: "gone.bin", which is gone' in lines
    assert lines[2].startswith('# not recorded: "lib/inner.bin", 10 bytes, blob ')
    assert "touched" not in diff.decode() and "GIT binary patch" not in diff.decode()
    assert 'only the size and digest of large files that have changed: "gone.bin", which is gone' in caplog.text
    run_git(repository, "checkout", "-q", "own.py")
    subprocess.run(["git", "apply"], cwd=repository, input=diff, check=True)
    assert (repository / "own.py").read_text() == "a = 2\n"


def test_the_largest_changes_are_left_out_above_a_total_size(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patches, "TOTAL", 700)
    for number in (1, 2, 3):
        (repository / f"{number}.txt").write_text("a" * 100 * number)
    run_git(repository, "add", ".")
    run_git(repository, "commit", "-qm", "three")
    for number in (1, 2, 3):
        (repository / f"{number}.txt").write_text("b" * 100 * number)
    (repository / "own.py").write_text("a = 2\n")
    diff = patch().decode()
    assert diff.count("# not recorded: ") == 0
    (repository / "3.txt").write_text("b" * 900)
    diff = patch().decode()
    assert diff.count("# not recorded: ") == 1 and '"3.txt", 900 bytes' in diff and "+++ b/2.txt" in diff
    monkeypatch.setattr(patches, "DIGESTED", 100)
    assert '"3.txt", 900 bytes, modified at ' in patch().decode()
