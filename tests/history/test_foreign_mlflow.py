"""Somebody else's `mlflow/` folder can make this user's writer log to the user's own store, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from kept_runs import SHORT
from main_runs import query

from runner.callbacks._mlflow.target import read_target

LOGGED = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]")


def attack(run: Path, address: str, secret: Path, victim: Path) -> None:
    """Rewrite a run's folder as an attacker would who knows where the user's files are."""
    mlflow = run / "mlflow"
    order = json.loads((mlflow / "run.json").read_text())
    order |= {"tracking_uri": address, "unsent": str(victim), "artifact_location": str(secret.parent / "into")}
    order |= {"cwd": str(run), "experiment_name": "evil"}
    (mlflow / "run.json").write_text(json.dumps(order))
    (mlflow / "sent.json").unlink()
    (mlflow / "images").mkdir()
    (run / "link").symlink_to(secret)
    (run / "folder").mkdir()
    (run / "folder" / "link").symlink_to(secret)
    entries: list[dict[str, Any]] = [
        {"artifact": name, "folder": "stolen"} for name in (str(secret), f"../{secret.name}", "link", "folder", "/proc")
    ]
    image = {"images": "stolen", "captions": None, "s": 1, "t": 1}
    entries += [{**image, "file": name} for name in (str(victim), f"../../../{victim.name}")]
    entries += [{"text": "evil", "file": f"../../../{victim.name}"}, {"text": "evil", "file": str(victim)}]
    with (mlflow / "spool.jsonl").open("a") as spool:
        spool.writelines(json.dumps(one) + "\n" for one in entries)


def test_a_foreign_folder_sends_to_nobody_reads_no_file_and_deletes_none(
    folder: Path, asked: tuple[str, list[str]], run_app: Any
):
    (address, paths), run = asked, folder / "run"
    (folder / "outputs" / "mlflow.db").rename(folder / "store.db")
    shutil.copy(folder / "store.db", folder / "theirs.db")
    run_app(*LOGGED, "hydra.run.dir=run", env={"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/theirs.db"})
    secret, victim = folder / "secret.txt", folder / "victim.npy"
    secret.write_text("a secret")
    victim.write_text("precious")
    attack(run, address, secret, victim)
    signature = (run / "signature").read_text()
    (run / "signature").write_text("of somebody else")
    assert read_target(run / "mlflow") is None
    own = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/outputs/mlflow.db"}
    (folder / "outputs").mkdir(exist_ok=True)
    (folder / "store.db").rename(folder / "outputs" / "mlflow.db")

    refused = run_app("sync", "run", exit_code=2, env=own)
    assert str(run / "link") in refused.stderr
    links = [run / "link", run / "folder" / "link"]
    for link in links:
        link.unlink()
    refused = run_app("sync", "run", exit_code=2, env=own)
    assert "run/mlflow/run.json: this run was made by someone else" in refused.stderr and address in refused.stderr
    assert not paths and victim.read_text() == "precious"

    # The user's own record, returned with a different `mlflow/`, may contain links: it goes to the user's own store.
    (run / "signature").write_text(signature)
    for link in links:
        link.symlink_to(secret)
    run_app("resume", "run", "trainer.max_duration=3ep", env=own)
    assert not paths and victim.read_text() == "precious"
    assert query(folder, "select name from experiments where name != 'Default'") == [("runner",)]
    assert query(folder, "select status from runs") == [("FINISHED",)]
    stolen = [path for path in (folder / "outputs" / "mlartifacts").rglob("*") if path.is_file()]
    assert stolen and not any("a secret" in path.read_text(errors="replace") for path in stolen)
    assert not (folder / "into").exists() and not list(folder.rglob("stolen"))
    said = (run / "mlflow" / "writer.log").read_text()
    assert said.count("artifact was left out") == 5 and "/proc is not in the run's folder" in said
    assert f"{secret} is not in the run's folder" in said
