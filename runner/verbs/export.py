"""`runner export RUN FILE`: writes the weights of a run to one file, whether its checkpoints are sharded or not.

For a transformers model, FILE may be a folder: `from_pretrained` loads it. `--form adapter` writes adapters alone.

These are the weights that evaluations measured, under their names in the network. If the model
wraps a network, as `ClassificationModel` does, the names have no prefix for the wrapper:

    network.load_state_dict(torch.load("model.pt"))
    network.load_state_dict(safetensors.torch.load_file("model.safetensors"))

The metadata of a `.safetensors` file has the names of the classes, if the run knows them, as a JSON list `classes`.
`trainer.load_path=model.pt` starts a run from the file. A `.pt` file needs memory for all weights, a `.safetensors`
file only for the largest of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.cli.command import Command
from runner.failures.errors import WrongKey
from runner.history.mirrored import download_run, is_address
from runner.records.folder import require_latest_run
from runner.records.record import Record
from runner.terminal.answer import set_fields

SUFFIXES = (".pt", ".safetensors")


def run(command: Command) -> None:
    """Write the weights of a run to a file."""
    name, file = command.words
    source = download_run(name, keep=False) if is_address(name) else name
    run = require_latest_run() if source == "latest" else Path(source)
    path = Path(file)
    is_folder = file.endswith("/") or not path.suffix
    if path.suffix not in SUFFIXES and not is_folder:
        raise WrongKey("FILE", f"must end in {' or '.join(SUFFIXES)}; a folder ends in /", repr(file))
    for key in ("form", "dtype", "tokenizer"):
        if not is_folder and command.options[key] != command.row.defaults[key]:
            raise WrongKey(f"--{key}", "is for folders; leave it out, or give a FILE that ends in /", repr(file))
    if path.exists():
        raise WrongKey("FILE", "this file exists; give another name, or remove it", repr(file))
    import torch
    from torch import Tensor

    from runner.checkpoints.base import BASE
    from runner.checkpoints.files import read_config, read_file
    from runner.checkpoints.shards import write_safetensors
    from runner.checkpoints.writing import write_file
    from runner.config import build
    from runner.distributed.saved_tensor import as_plain
    from runner.models.hf.saving import load_trained

    checkpoint = build.checkpoint_of("RUN", str(run))
    if is_folder:
        _write_folder(checkpoint, path, command.options)
        return
    config = read_config(checkpoint) or {}
    if (checkpoint / BASE).is_file():
        weights: dict[str, Any] = load_trained(checkpoint, _base(checkpoint, command.options["base"])).state_dict()
    else:
        weights = _of_network(read_file(checkpoint, "model.pt"), config)
    others = [name for name, weight in weights.items() if not isinstance(weight, Tensor)]
    if path.suffix != ".pt" and others:
        raise WrongKey(
            "FILE", f"{others[0]} is not a tensor, so safetensors cannot hold it; give a .pt file", repr(file)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        if path.suffix == ".pt":
            whole = {name: as_plain(value) for name, value in weights.items()}
            write_file(aside, lambda file: torch.save(whole, file))  # type: ignore[arg-type]
        else:
            write_file(aside, lambda file: write_safetensors(file.write, weights, {"format": "pt", **_classes(config)}))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    set_fields(result={"checkpoint": str(checkpoint), "path": str(path), "bytes": path.stat().st_size})
    print(f"{len(weights)} weights of {checkpoint}, {path.stat().st_size:,} bytes: {path}")


def _classes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the classes as a JSON list, for the metadata of a file; {} if the run has no names."""
    model = config.get("model")
    names = model.get("classes") if isinstance(model, Mapping) else None
    return {"classes": json.dumps(names)} if isinstance(names, list) else {}


def _write_folder(checkpoint: Path, folder: Path, options: Mapping[str, Any]) -> None:
    import torch

    from runner.models.hf.saving import save_pretrained

    dtype = getattr(torch, options["dtype"])
    base = _base(checkpoint, options["base"])
    save_pretrained(checkpoint, folder, options["tokenizer"] or None, options["form"], dtype, base)
    size = sum(file.stat().st_size for file in folder.iterdir())
    set_fields(result={"checkpoint": str(checkpoint), "path": str(folder), "bytes": size})
    print(f"{options['form']} weights of {checkpoint}, {size:,} bytes: {folder}")


def _base(checkpoint: Path, typed: str) -> str:
    """Return the name of a model that was typed, or else that the user's own run recorded.

    Another user's record must not decide which folder is read, or what is downloaded.
    """
    if typed:
        return typed
    record = next((record for record in map(Record, checkpoint.parents) if record.exists), None)
    from runner.checkpoints.files import read_config

    own = record is not None and record.is_own
    config: Mapping[str, Any] = record.config if record is not None and own else read_config(checkpoint) or {}
    name = dict(config.get("model", {}).get("module") or {}).get("name")
    if not own:
        raise WrongKey("--base", f"this run was made elsewhere, with {name!r}: give the folder or model to use", "''")
    return str(name)


def _of_network(weights: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights by their names in the network if a model of this project wraps it; else unchanged.

    The config of a run in Python does not describe its model, so there the names alone decide.
    """
    from runner.checkpoints.weights import WRAPPER_PREFIX

    model = config.get("model")
    is_ours = not isinstance(model, Mapping) or str(model.get("_target_")).startswith("runner.")
    if not is_ours or not all(name.startswith(WRAPPER_PREFIX) for name in weights):
        return dict(weights)
    return {name.removeprefix(WRAPPER_PREFIX): value for name, value in weights.items()}
