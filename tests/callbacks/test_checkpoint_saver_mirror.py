"""Checkpoints on a mirror are complete and verified; training neither waits for the mirror nor fails with it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from python_process import PATIENCE, wait_until
from saver_runs import assert_equal_weights, fit, make_trainer, saved

from runner import Callback
from runner.callbacks import CheckpointSaver
from runner.checkpoints.mirror import Mirror


class Faulty(MemoryFileSystem):
    """A file system in memory whose uploads pass through `fault`, which may raise, wait, or change the content.

    Attributes:
        store: the files, separate from those of `memory://`.
        fault: called with the path and the content of an upload; returns the content to store.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012  (as in the base class)
    pseudo_dirs = [""]  # noqa: RUF012
    fault: Callable[[str, bytes], bytes] = staticmethod(lambda path, content: content)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        path = str(path).removeprefix("faulty://")
        return "/" + path.strip("/") if path.strip("/") else ""

    def put_file(self, lpath: Any, rpath: Any, *_: Any, **named: Any) -> None:
        with open(lpath, "rb") as file:
            content = file.read()
        self.pipe_file(rpath, type(self).fault(rpath, content))


@pytest.fixture
def remote() -> Iterator[type[Faulty]]:
    """A new, empty file system at `faulty://`, without a fault."""
    kind = type("Faulty", (Faulty,), {"store": {}, "pseudo_dirs": [""]})
    fsspec.register_implementation("faulty", kind, clobber=True)
    yield kind


class Gate:
    """A fault: uploads of files with this name wait until `open` is set.

    Attributes:
        reached: set when an upload waits.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, path: str, content: bytes) -> bytes:
        if path.endswith(self.name):
            self.reached.set()
            self.open.wait(PATIENCE)
        return content


def mirroring(**arguments: Any) -> CheckpointSaver:
    return CheckpointSaver(**{"mirror": "faulty://runs", "mirror_timeout": PATIENCE, **arguments})


def mirrored() -> list[str]:
    """Return the names of the complete checkpoints on the mirror, newest first."""
    return [*Mirror("faulty://runs/tiny").saved()]


def contents(remote: type[Faulty]) -> dict[str, bytes]:
    return {path: buffer.getvalue() for path, buffer in remote.store.items()}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mirror_holds_the_checkpoints_that_the_run_keeps(tmp_path: Path, remote: type[Faulty], asynchronous: bool):
    script = (4, 1, 2, 3)
    saver = mirroring(keep=2, monitor="loss", asynchronous=asynchronous)
    trainer = fit(tmp_path, saver, run_name="tiny", script=script)
    assert {*mirrored()} == saved(tmp_path) == {"ep2-ba8", "ep3-ba12", "ep4-ba16"}
    assert mirrored()[0] == "ep4-ba16"
    for name, index in Mirror("faulty://runs/tiny").saved().items():
        manifest = json.loads((tmp_path / "checkpoints" / name / "manifest.json").read_text())
        facts = {file.rpartition("/")[2]: fact for file, fact in index.files.items()}
        assert facts.pop("manifest.json")["size"] == (tmp_path / "checkpoints" / name / "manifest.json").stat().st_size
        assert facts.pop("mirror.json") and facts == manifest["files"]
    assert Mirror("faulty://runs/tiny").read_index("ep4-ba16").best == ["ep2-ba8"]
    assert saver.mirrored_at == "faulty://runs/tiny" and not (tmp_path / ".mirror").exists()
    plain = fit(tmp_path / "plain", CheckpointSaver(), script=script)
    assert_equal_weights(trainer, plain)


def test_downloads_equal_uploads(tmp_path: Path, remote: type[Faulty]):
    fit(tmp_path / "run", mirroring(), run_name="tiny")
    mirror = Mirror("faulty://runs/tiny")
    (tmp_path / "copy").mkdir()
    mirror.download(mirror.read_index("ep4-ba16"), "ep4-ba16", tmp_path / "copy")
    assert saved(tmp_path / "copy") == {"ep4-ba16"}
    copy, original = (tmp_path / name / "checkpoints" / "ep4-ba16" / "state.pt" for name in ("copy", "run"))
    assert copy.read_bytes() == original.read_bytes()


def test_an_unreachable_mirror_gives_one_warning_and_catches_up_once_it_is_back(
    tmp_path: Path, remote: type[Faulty], caplog: pytest.LogCaptureFixture
):
    class Reconnect(Callback):
        def epoch_start(self, state, logger):
            if state.timestamp.epoch == 3:
                remote.fault = staticmethod(lambda path, content: content)

    def refuse(path: str, content: bytes) -> bytes:
        raise ConnectionRefusedError(111, "no such host, user:secret")

    remote.fault = staticmethod(refuse)
    fit(tmp_path, mirroring(keep=-1), Reconnect(), run_name="tiny")
    (message,) = messages(caplog)
    assert "mirror faulty://runs/tiny: checkpoint ep" in message and "training continues without it" in message
    assert {*mirrored()} == saved(tmp_path) == {"ep1-ba4", "ep2-ba8", "ep3-ba12", "ep4-ba16"}


def test_a_mirror_without_the_last_checkpoint_is_reported_at_the_end(
    tmp_path: Path, remote: type[Faulty], caplog: pytest.LogCaptureFixture
):
    def full(path: str, content: bytes) -> bytes:
        raise OSError(28, "no space left")

    remote.fault = staticmethod(full)
    saver = mirroring()
    fit(tmp_path, saver, run_name="tiny")
    first, last = messages(caplog)
    assert "no space left" in first
    assert "does not have the last checkpoint, ep4-ba16: it has no checkpoint of this run" in last
    assert str(tmp_path) in last
    assert mirrored() == [] and saver.mirrored_at is None and len(saved(tmp_path)) == 3
    assert Mirror("faulty://runs/tiny").names() == []  # incomplete uploads were removed


def test_training_does_not_wait_for_uploads_and_the_end_waits_for_a_limited_time(
    tmp_path: Path, remote: type[Faulty], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    gate = Gate("state.pt")
    remote.fault = staticmethod(gate)

    class WaitForUpload(Callback):
        def epoch_start(self, state, logger):
            assert state.timestamp.epoch == 0 or gate.reached.wait(PATIENCE)

    fit(tmp_path, mirroring(mirror_timeout=0.05), WaitForUpload(), run_name="tiny")
    assert gate.reached.is_set() and not gate.open.is_set()
    # As after a kill during an upload, the mirror has files but no complete checkpoint.
    assert any(path.endswith("model.pt") for path in remote.store) and mirrored() == []
    assert "waiting up to 0.05 s" in capfd.readouterr().err
    assert "does not have the last checkpoint, ep4-ba16" in messages(caplog)[-1]
    assert len(saved(tmp_path)) == 3 and not (tmp_path / ".mirror").exists()
    gate.open.set()


def test_the_next_session_removes_an_incomplete_upload(tmp_path: Path, remote: type[Faulty]):
    with make_trainer(tmp_path, mirroring(), run_name="tiny") as first:
        first.fit("1ep")
    incomplete = "/runs/tiny/ep2-ba8/checkpoints/ep2-ba8/model.pt"
    files = Mirror("faulty://runs/tiny")._remote
    mark = json.loads(files.cat_file("/runs/tiny/mirror.json"))
    assert mark["checkpoints"] == ["ep1-ba4"]
    files.pipe_file("/runs/tiny/mirror.json", json.dumps(mark | {"checkpoints": ["ep1-ba4", "ep2-ba8"]}).encode())
    files.pipe_file(incomplete, b"half")
    (tmp_path / ".mirror" / "0").mkdir(parents=True)
    fit(tmp_path, mirroring(save_interval="3ep"), run_name="tiny", resume_path=tmp_path)
    assert {*mirrored()} >= {"ep4-ba16", "ep1-ba4"}
    assert incomplete not in remote.store and not (tmp_path / ".mirror").exists()


def test_a_checkpoint_that_the_mirror_changes_is_not_used(
    tmp_path: Path, remote: type[Faulty], caplog: pytest.LogCaptureFixture
):
    def corrupt(path: str, content: bytes) -> bytes:
        return b"x" + content[1:] if "ep4-ba16/model.pt" in path else content

    remote.fault = staticmethod(corrupt)
    fit(tmp_path, mirroring(), run_name="tiny")
    assert "checkpoints/ep4-ba16/model.pt differs from what was uploaded" in messages(caplog)[0]
    assert mirrored()[:2] == ["ep3-ba12", "ep2-ba8"] and "its newest is ep3-ba12" in messages(caplog)[-1]


def test_old_checkpoints_that_cannot_be_removed_give_one_warning(
    tmp_path: Path, remote: type[Faulty], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "may not remove")

    monkeypatch.setattr(remote, "rm", refuse)
    with make_trainer(tmp_path, mirroring(keep=1, save_interval=0), run_name="tiny") as trainer:
        trainer.fit("1ep")
        trainer.fit("1ep")
    (message,) = messages(caplog)
    assert "may not remove" in message
    assert mirrored() == ["ep2-ba8"]
    wait_until(lambda: all(thread.name != "mirror" for thread in threading.enumerate()))


def test_another_runs_checkpoints_are_replaced_only_with_overwrite(
    tmp_path: Path, remote: type[Faulty], caplog: pytest.LogCaptureFixture
):
    fit(tmp_path / "first", mirroring(), run_name="tiny")
    before = contents(remote)
    fit(tmp_path / "second", mirroring(), run_name="tiny")
    assert contents(remote) == before
    assert "holds another run's checkpoints; choose another run_name= for this run" in messages(caplog)[0]
    fit(tmp_path / "fork", mirroring(), run_name="tiny", max_duration="5ep", resume_path=tmp_path / "first")
    assert contents(remote) == before
    fit(tmp_path / "third", mirroring(overwrite=True), run_name="tiny")
    assert contents(remote) != before


def test_other_files_on_the_mirror_are_kept(tmp_path: Path, remote: type[Faulty], caplog: pytest.LogCaptureFixture):
    """Also if the run, a checkpoint or the resumed run has the same name as other files."""
    files = Mirror("faulty://runs")._remote
    files.makedirs("/runs/photos/2025", exist_ok=True)
    files.pipe_file("/runs/photos/2025/a.jpg", b"precious")
    for number, overwrite in enumerate((False, True)):
        fit(tmp_path / f"{number}", mirroring(overwrite=overwrite), run_name="photos")
        assert "it holds files that no run has uploaded; choose another run_name=" in messages(caplog)[-2]
    fit(tmp_path / "tiny", mirroring(keep=1), run_name="tiny", max_duration="1ep")
    files.makedirs("/runs/tiny/notes", exist_ok=True)
    files.pipe_file("/runs/tiny/notes/index.json", b"precious")
    files.pipe_file("/runs/tiny/ep3-ba12/notes.txt", b"precious")
    before = contents(remote)
    # A run of another user, with this run's name and the name of one of its checkpoints.
    fit(tmp_path / "foreign", CheckpointSaver(), max_duration="1ep", run_name="tiny")
    (tmp_path / "foreign" / "mirror.json").write_text(json.dumps({"run": "0" * 32}))
    fit(tmp_path / "foreign", mirroring(keep=1), run_name="tiny", resume_path=tmp_path / "foreign")
    assert contents(remote) == before
    fit(tmp_path / "tiny", mirroring(keep=1), run_name="tiny", resume_path=tmp_path / "tiny")
    assert mirrored() == ["ep4-ba16"]
    assert {path for path, content in contents(remote).items() if content == b"precious"} == {
        "/runs/photos/2025/a.jpg",
        "/runs/tiny/notes/index.json",
        "/runs/tiny/ep3-ba12/notes.txt",
    }


def test_two_savers_cannot_share_a_mirror(tmp_path: Path, remote: type[Faulty]):
    with pytest.raises(ValueError, match="mirror='faulty://runs': .* give each a different mirror"):
        make_trainer(tmp_path, mirroring(), mirroring(folder="others"))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"mirror": "runs"}, ValueError, "mirror='runs': must be an address, such as s3://bucket/runs"),
        ({"mirror": "nothing://runs"}, ValueError, "mirror='nothing://runs': no such protocol"),
        ({"mirror": "dropbox://u:secret@runs"}, ImportError, r"mirror='dropbox://\*\*\*@runs': .*dropboxdrivefs"),
        ({"mirror": "memory://runs", "mirror_timeout": -1}, ValueError, "mirror_timeout=-1: must be a number"),
    ],
)
def test_wrong_arguments_for_a_mirror_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        CheckpointSaver(**arguments)


@pytest.mark.slow
def test_an_s3_bucket_is_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """On a real server, which stops between two runs."""
    pytest.importorskip("s3fs", reason="the extra remote is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for key, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{key}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        fit(tmp_path / "run", mirroring(mirror="s3://bucket/runs", keep=2), run_name="tiny")
        mirror = Mirror("s3://bucket/runs/tiny")
        assert [*mirror.saved()] == ["ep4-ba16", "ep3-ba12"] and not messages(caplog)
        (tmp_path / "copy").mkdir()
        mirror.download(mirror.read_index("ep4-ba16"), "ep4-ba16", tmp_path / "copy")
        assert saved(tmp_path / "copy") == {"ep4-ba16"}
    finally:
        server.stop()
    fit(tmp_path / "away", mirroring(mirror="s3://bucket/runs"), run_name="other")
    assert "training continues without it" in messages(caplog)[0]
