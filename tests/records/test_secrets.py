"""Secrets in uncommitted files are left out of the recorded patch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.records.secrets import is_secret, without_secrets
from runner.records.write import write_record

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"


def git(*arguments: str) -> bytes:
    identity = ("-c", "user.name=me", "-c", "user.email=me@here")
    return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as working directory, with secrets in its uncommitted changes."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    names = [".env", "a b/.env.local", "deploy.pem", "code.py", "notes.py", "old.py", "umläut.key"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    for name in names[:4]:
        (tmp_path / name).write_text("PASSWORD=hunter2\n" if name != "code.py" else "x = 2\n")
    (tmp_path / "notes.py").write_text(f"x = 1\n{KEY}")
    git("mv", "old.py", "id_rsa")
    (tmp_path / "umläut.key").write_text("PASSWORD=hunter2\n")
    return tmp_path


def test_a_record_leaves_out_secrets_and_names_their_files(repository: Path, caplog: Any):
    write_record(repository / "run", {"seed": 1}, [])
    patch = (repository / "run" / "git.patch").read_bytes()
    assert b"+x = 2" in patch
    assert b"hunter2" not in patch and b"PRIVATE KEY" not in patch and b"id_rsa" not in patch
    (warning,) = (record.message for record in caplog.records if "git.patch" in record.message)
    for name in (".env", "a b/.env.local", "deploy.pem", "notes.py", "id_rsa"):
        assert name in warning
    assert "code.py" not in warning
    git("stash", "-q")
    git("apply", "--check", "run/git.patch")  # the rest is still a patch


def test_a_patch_of_secrets_only_is_empty(repository: Path):
    patch, left_out = without_secrets(git("diff", "HEAD", "--", ".env", "deploy.pem"))
    assert (patch, left_out) == (b"", [".env", "deploy.pem"])
    assert without_secrets(b"") == (b"", [])
    whole = git("diff", "HEAD", "--", "code.py")
    assert without_secrets(whole) == (whole, [])


def test_secrets_are_recognized_by_name_or_content():
    for name in ("a/.env", ".env.prod", "ID_RSA", "x/server.key", "aws/credentials", "my_credentials.json"):
        assert is_secret(name), name
    for name in ("environment.py", "keys.py", "token_cache.py", "monkey.py", "env/a.py", "data.json"):
        assert not is_secret(name), name
    assert is_secret("a.py", b"token = 'hf_" + b"a" * 34 + b"'") and not is_secret("a.py", b"hf_dataset = sk-learn")
