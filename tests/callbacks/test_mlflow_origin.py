from __future__ import annotations

import subprocess
from pathlib import Path

from runner.callbacks._mlflow.description import git_tags

DIRTY = "mlflow.source.git.dirty"


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True)


def test_a_run_with_uncommitted_code_is_tagged_dirty(tmp_path: Path):
    repository, run_dir = tmp_path / "repository", tmp_path / "run"
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "code.py").write_text("a = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    assert git_tags(str(repository), run_dir)[DIRTY] == "false"
    (repository / "outputs").mkdir()
    (repository / "outputs" / "other").touch()  # untracked, so not code of this run
    assert git_tags(str(repository), run_dir)[DIRTY] == "false"
    (run_dir / "code").mkdir(parents=True)
    assert git_tags(str(repository), run_dir)[DIRTY] == "true"
    (run_dir / "code").rmdir()
    (repository / "code.py").write_text("a = 2\n")
    assert git_tags(str(repository), run_dir)[DIRTY] == "true"
    assert git_tags(str(tmp_path), run_dir) == {}
