"""A run is resumed, rerun or evaluated from its mirror, on a machine without its folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stores
from kept_runs import LONGER, QUIET, SHORT, weights

from runner.checkpoints.mirror import Mirror
from runner.failures.errors import WrongKey
from runner.history.mirrored import download_run
from runner.timing.time import Timestamp

OTHER_USER = {"XDG_CONFIG_HOME": "elsewhere"}  # has another key, so that the record counts as foreign


def mirror_to(folder: Path) -> str:
    return f"callbacks.checkpoint_saver.mirror=file://{folder}/mirror"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumes_from_its_mirror_on_another_machine(tmp_path: Path, run_app: Any, ranks: int):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    launch = f"launch.nproc_per_node={ranks}"
    arguments = (*SHORT, *QUIET, launch, mirror_to(tmp_path), "scheduler=none", "run_name=one")
    run_app(*arguments, "hydra.run.dir=run", folder=here)
    shutil.rmtree(here)
    done = run_app("resume", f"file://{tmp_path}/mirror/one", LONGER, folder=there, env=OTHER_USER)
    assert f"RUN='file://{tmp_path}/mirror/one': downloaded ep2-ba6 to outputs/" in done.stderr
    (run,) = there.glob("outputs/*/*")
    assert not (run / ".mirror").exists() and not (run / ".download").exists()
    run_app(*arguments, LONGER, "hydra.run.dir=whole", "callbacks.checkpoint_saver.mirror=null")
    assert weights(run, "ep3-ba9") == weights(tmp_path / "whole", "ep3-ba9")
    # The resumed run continues the same mirror, from which a third machine evaluates it.
    assert {path.name for path in (tmp_path / "mirror" / "one").glob("*/")} == {"ep1-ba3", "ep2-ba6", "ep3-ba9"}
    done = run_app("eval", f"file://{tmp_path}/mirror/one", env=OTHER_USER)
    assert "after 9 batches" in done.stdout


@pytest.mark.slow
def test_a_sharded_checkpoint_resumes_from_its_mirror(tmp_path: Path, run_app: Any):
    (tmp_path / "there").mkdir()
    sharded = ("trainer.parallel=fsdp", "launch.nproc_per_node=2", "callbacks.checkpoint_saver.sharded=true")
    run_app(*SHORT, *QUIET, *sharded, mirror_to(tmp_path), "run_name=one", "hydra.run.dir=run")
    address = f"file://{tmp_path}/mirror/one"
    run_app("resume", address, LONGER, "launch.nproc_per_node=1", folder=tmp_path / "there", env=OTHER_USER)
    (run,) = (tmp_path / "there").glob("outputs/*/*")
    assert json.loads((run / "result.json").read_text())["status"] == "FINISHED"
    assert (run / "checkpoints" / "ep2-ba6" / "manifest.json").is_file()


def test_a_rerun_from_a_mirror_leaves_only_its_own_run(tmp_path: Path, run_here: Any):
    run_here(*SHORT, *QUIET, mirror_to(tmp_path), "run_name=one", "hydra.run.dir=run", code=0)
    run_here("rerun", f"file://{tmp_path}/mirror/one", "callbacks.checkpoint_saver.mirror=null", code=0)
    (run,) = tmp_path.glob("outputs/*/*")
    assert weights(run) == weights(tmp_path / "run")


@pytest.mark.slow
def test_a_run_resumed_from_its_mirror_continues_its_run_in_mlflow(tmp_path: Path, run_app: Any):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    callbacks = "callbacks=[checkpoint_saver,mlflow_logger]"
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    run_app(*SHORT, callbacks, mirror_to(tmp_path), "run_name=one", folder=here, env=store)
    run_app("resume", f"file://{tmp_path}/mirror/one", LONGER, folder=there, env={**OTHER_USER, **store})
    database = tmp_path / "mlflow.db"
    assert stores.query(database, "SELECT name, status FROM runs") == [("one", "FINISHED")]
    steps = stores.query(database, "SELECT step FROM metrics WHERE key = 'loss/train/total' ORDER BY step")
    assert [step for (step,) in steps] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_check_uploads_nothing(tmp_path: Path, run_app: Any):
    run_app("check", *SHORT, *QUIET, mirror_to(tmp_path), "trainer.device=cpu", "model=resnet8")
    assert not (tmp_path / "mirror").exists()


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the mirror of a run with three checkpoints; tests only read it."""
    folder = tmp_path_factory.mktemp("mirror")
    for number in (1, 2, 3):
        run = folder / "run"
        (run / "checkpoints" / f"ep{number}").mkdir(parents=True)
        (run / "config.yaml").write_text("seed: 1\n")
        content = str(number).encode()
        (run / "checkpoints" / f"ep{number}" / "model.pt").write_bytes(content)
        facts = {"size": 1, "sha256": hashlib.sha256(content).hexdigest()}
        time = Timestamp(epoch=number).state_dict()
        manifest = {"format": 1, "saved_at": float(number), "timestamp": time, "files": {"model.pt": facts}}
        (run / "checkpoints" / f"ep{number}" / "manifest.json").write_text(json.dumps(manifest))
        Mirror(f"file://{folder}/mirror/one").upload(run, f"ep{number}", f"checkpoints/ep{number}", ["ep1"])
        shutil.rmtree(run)
    return folder / "mirror" / "one"


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a function that changes the index of a mirrored checkpoint."""

    def apply(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index)
        (folder / "index.json").write_text(json.dumps(index))

    return apply


def overwritten(file: str, content: bytes) -> Callable[[Path], None]:
    """Return a function that replaces the content of a file of a mirrored checkpoint."""

    def apply(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return apply


def replace_by_pipe(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")


FACTS = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
UNREADABLE = "ep3 is not used: its index.json cannot be read"
NAMES = "ep3 is not used: its index.json names"
LARGE = "ep3 is not used: its config.yaml has 1,099,511,627,776 bytes, at most"
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a changed file": (
        overwritten("checkpoints/ep3/model.pt", b"x"),
        "ep3 is not used: checkpoints/ep3/model.pt differs from its index.json",
    ),
    "a longer file": (
        overwritten("config.yaml", b"seed: 1\nmode: x\n"),
        "ep3 is not used: config.yaml differs from its index.json",
    ),
    "a missing file": (lambda folder: (folder / "config.yaml").unlink(), "ep3 is not used: "),
    "too large": (
        changed(lambda index: index["files"]["checkpoints/ep3/model.pt"].update(size=1 << 52)),
        "are free in",
    ),
    "a large record": (changed(lambda index: index["files"]["config.yaml"].update(size=1 << 40)), LARGE),
    "a pipe": (replace_by_pipe, "ep3 is not used: "),
    "a path out of the folder": (
        changed(lambda index: index["files"].update({"../x": FACTS})),
        f"{NAMES} '../x', which leads out",
    ),
    "an absolute path": (changed(lambda index: index["files"].update({"/tmp/x": FACTS})), f"{NAMES} '/tmp/x'"),
    "a hidden file": (changed(lambda index: index["files"].update({"a/.b": FACTS})), f"{NAMES} 'a/.b'"),
    "a path out of the checkpoint": (changed(lambda index: index.update(checkpoint="../..")), f"{NAMES} '../..'"),
    "files as a list": (changed(lambda index: index.update(files=[1])), UNREADABLE),
    "text for a number": (changed(lambda index: index.update(saved_at="later")), UNREADABLE),
    "a number of 400 digits": (changed(lambda index: index.update(saved_at=10**400)), UNREADABLE),
    "another name": (
        changed(lambda index: index.update(checkpoint="checkpoints/ep4")),
        "ep3 is not used: it holds the checkpoint 'ep4'",
    ),
    "the name of a link": (
        changed(lambda index: index.update(checkpoint="checkpoints/latest")),
        f"{NAMES} 'latest', which is not a valid name for a checkpoint",
    ),
    "an escaped path": (changed(lambda index: index["best"].append("..%2fx")), f"{NAMES} '..%2fx'"),
    "a later format": (changed(lambda index: index.update(format=2)), "ep3 is not used: a later version"),
    "JSON nested too deeply": (overwritten("index.json", b"[" * 100_000), UNREADABLE),
    "torn JSON": (overwritten("index.json", b'{"chec'), UNREADABLE),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_damaged_or_hostile_checkpoint_is_not_used(
    attack: str, mirror: Path, tmp_path: Path, monkeypatch: Any, capfd: Any
):
    apply, warning = ATTACKS[attack]
    shutil.copytree(mirror, tmp_path / "mirror" / "one")
    apply(tmp_path / "mirror" / "one" / "ep3")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "work")}
    folder = download_run(f"file://{tmp_path}/mirror/one", keep=True)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    best = {f"checkpoints/ep1/{name}" for name in ("model.pt", "manifest.json")}
    newest = {f"checkpoints/ep2/{name}" for name in ("model.pt", "manifest.json")}
    assert files == {"config.yaml"} | newest | best
    assert (folder / "checkpoints" / "latest").resolve().name == "ep2"
    assert (folder / "checkpoints" / "best").resolve().name == "ep1"
    assert warning in capfd.readouterr().err
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "work")} == before


def test_unsafe_names_in_a_listing_are_left_out(tmp_path: Path):
    for name in ("ep1", "latest", "best", "config.yaml", "..%2fx", "a%20b", "a\\b", ".hidden", "a\x1bb"):
        (tmp_path / name).mkdir()
    assert Mirror(f"file://{tmp_path}").names() == ["ep1"]


def test_a_single_checkpoint_can_be_downloaded(mirror: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    folder = download_run(f"file://{mirror}/ep2", keep=False)
    assert (folder / "checkpoints" / "ep2" / "model.pt").read_bytes() == b"2"
    assert not folder.is_relative_to(tmp_path) and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "file://{mirror}",
            r"RUN='file://.*': holds no checkpoint of a run; give the address of a run, such as file://.*/one",
        ),
        ("file://{mirror}/none", "RUN='file://.*/none': holds no checkpoint of a run; give the address of a run"),
        ("nothing://runs", "RUN='nothing://runs': no such protocol"),
        ("http://u:secret@127.0.0.1:1/runs", r"RUN='http://\*\*\*@127.0.0.1:1/runs': cannot be read: "),
    ],
)
def test_an_address_without_a_run_is_refused(
    address: str, message: str, mirror: Path, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        download_run(address.format(mirror=mirror.parent), keep=True)
    assert "secret" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_mirror_without_a_usable_checkpoint_says_why(mirror: Path, tmp_path: Path, monkeypatch: Any):
    shutil.copytree(mirror, tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    for checkpoint in (tmp_path / "one").glob("*/"):
        (checkpoint / "config.yaml").write_text("x")
    with pytest.raises(WrongKey, match="none of its checkpoints can be used: ep3: config.yaml differs"):
        download_run(f"file://{tmp_path}/one", keep=True)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
