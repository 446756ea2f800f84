"""Records are signed with the key of the user, so that changed or foreign ones are recognized."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from python_process import PATIENCE

from runner.files.signing import sign
from runner.records.record import SIGNED, Record
from runner.records.write import write_record


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the signing key, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "exactrun" / "key"


def test_the_key_is_made_once_and_readable_only_by_its_owner(key: Path):
    first = sign([b"a", b"b"])
    assert first is not None and first == sign([b"a", b"b"])
    assert first not in {sign([b"ab", b""]), sign([b"a", b"c"]), sign([b"b", b"a"])}
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    key.unlink()
    assert sign([b"a", b"b"]) != first


def test_processes_that_start_together_use_the_same_key(key: Path):
    program = "from runner.files.signing import sign; print(sign([b'a']))"
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)]
    assert len({child.communicate(timeout=PATIENCE)[0] for child in children}) == 1


def test_a_signature_holds_only_for_this_user_and_content(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_dir = tmp_path / "run"
    write_record(run_dir, {"seed": 1}, ["seed=1"])
    assert Record(run_dir).is_own
    for name in (*SIGNED, "signature"):
        before = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(before + b"x")
        assert not Record(run_dir).is_own, name
        (run_dir / name).unlink()
        assert not Record(run_dir).is_own, name
        (run_dir / name).write_bytes(before)
    assert Record(run_dir).is_own
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    assert not Record(run_dir).is_own


def test_records_are_not_signed_if_the_key_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    names = {path.name for path in write_record(tmp_path / "run", {"seed": 1}, [])}
    assert "config.yaml" in names and "signature" not in names
    assert not Record(tmp_path / "run").is_own
    assert "not signed" in caplog.text
