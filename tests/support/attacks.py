"""Files that an attacker may have left in a run's folder, to harm the user who opens, resumes or uploads the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Records of an untrusted run: its config, its overrides, and the name that the refusal must contain.
ATTACKS: dict[str, tuple[Any, list[str], str]] = {
    "a callback": ({"callbacks": {"x": {"_target_": "own.Evil"}}}, [], "own.Evil"),
    "a nested argument": (
        {"model": {"_target_": "torch.nn.ReLU", "a": [{"b": {"_target_": "own.Evil"}}]}},
        [],
        "own.Evil",
    ),
    "a partial": ({"optimizer": {"_target_": "os.system", "_partial_": True}}, [], "os.system"),
    "through torch": ({"data": {"_target_": "torch.os.system", "_args_": ["touch x"]}}, [], "torch.os.system"),
    "torch itself": ({"data": {"_target_": "torch.load", "f": "x"}}, [], "torch.load"),
    "torch hub": ({"model": {"_target_": "torch.hub.load"}}, [], "torch.hub.load"),
    "through this project": (
        {"data": {"_target_": "runner.distributed.launch.os.system"}},
        [],
        "runner.distributed.launch.os.system",
    ),
    "a list as the target": ({"data": {"_target_": ["own", "Evil"]}}, [], "own"),
    "an interpolation": ({"data": "${oc.create:{_target_:own.Evil}}"}, [], "oc.create"),
    "an override": ({}, ["+callbacks.x._target_=own.Evil"], "own.Evil"),
    "an override with a mapping": ({}, ["+callbacks.x={_target_:own.Evil}"], "own.Evil"),
}


# Configs of an untrusted run, each with the value that the refusal must show in full.
ADDRESSES: dict[str, tuple[Any, str]] = {
    "a server": (
        {"callbacks": {"m": {"tracking_uri": "http://evil.example:5000/x?y=1"}}},
        "http://evil.example:5000/x?y=1",
    ),
    "a server by keyword": (
        {"callbacks": {"m": {"_target_": "runner.callbacks.MLflowLogger", "tracking_uri": "databricks"}}},
        "databricks",
    ),
    "a server by position": (
        {"callbacks": {"m": {"_target_": "runner.callbacks.MLflowLogger", "_args_": ["databricks"]}}},
        "databricks",
    ),
    "another team": (
        {"callbacks": {"w": {"_target_": "runner.callbacks.WandBLogger", "entity": "evil"}}},
        "evil",
    ),
    "a file of the user": (
        {"callbacks": {"l": {"_target_": "runner.callbacks.ProgressLines", "path": "train.py"}}},
        "train.py",
    ),
    "a data set on the Hub": (
        {"data": {"_target_": "runner.data.hf.dataset.load_hf_dataset", "name": "evil/data"}},
        "evil/data",
    ),
    "a store": ({"callbacks": {"m": {"tracking_uri": "sqlite:////home/me/x.db"}}}, "sqlite:////home/me/x.db"),
    "a download": ({"data": {"url": "https://evil.example/x.tar.gz"}}, "https://evil.example/x.tar.gz"),
    "a file": ({"data": {"path": "/home/me/.ssh"}}, "/home/me/.ssh"),
    "a home folder": ({"data": {"path": "~/.ssh"}}, "~/.ssh"),
    "a path with a comma": ({"data": {"path": "/home/me/[a],b"}}, "/home/me/[a],b"),
    "a path out of the folder": ({"data": {"files": [{"one": "a/../../b"}]}}, "a/../../b"),
}


EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"


COMMAND = "touch 'a b'"


ATTENTION = {"name": "gpt2", "pretrained": False, "attention": "owner/kernel"}


# Sections of an untrusted config, each with a part of the refusal and the name with which a user allows the section.
CODE: dict[str, tuple[Any, str, str]] = {
    "a command": ({"_target_": "runner.callbacks.MLPerfCallback", "cache_clear_cmd": COMMAND}, COMMAND, COMMAND),
    "a command by position": (
        {"_target_": "runner.callbacks.MLPerfCallback", "_args_": ["a", 0, "b", 0.5, *"cdefgh", COMMAND]},
        COMMAND,
        COMMAND,
    ),
    "a command in a partial": (
        {"_target_": "runner.callbacks.MLPerfCallback", "_partial_": True, "cache_clear_cmd": COMMAND},
        COMMAND,
        COMMAND,
    ),
    "a kernel of the Hub": (
        {"_target_": "runner.models.hf.network.HFNetwork", **ATTENTION},
        "owner/kernel",
        "owner/kernel",
    ),
    "a kernel of the Hub in a config": (
        {"_target_": "runner.models.hf.causal_lm.HFCausalLM", "overrides": {"text_config": {"a": "owner/kernel"}}},
        "owner/kernel",
        "owner/kernel",
    ),
    "an argument without a parameter": (
        {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 2, "dist_sync_fn": "evil"},
        "dist_sync_fn='evil'",
        "torchmetrics.classification.MulticlassAccuracy",
    ),
    "a class that the module imports": (
        {"_target_": "torch.optim.lr_scheduler.Counter"},
        "torch.optim.lr_scheduler.Counter, which is collections.Counter",
        "collections.Counter",
    ),
}


class Evil:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def attack_mlflow(run: Path, address: str, secret: Path, victim: Path) -> None:
    """Change the MLflow files of a run as an attacker would who knows where the user's files are.

    Args:
        run: the run's folder.
        address: the attacker's tracking server.
        secret: a file of the user that the attacker wants to be uploaded.
        victim: a file of the user that the attacker wants to be overwritten or deleted.
    """
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
        spool.writelines(json.dumps(entry) + "\n" for entry in entries)
