"""A run folder with one damaged, foreign or hostile file is used, or refused with an error that names the file."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kept_runs import SHORT, tree

TRIES = 120
FEW = 4  # tries in the first tier
SECRET = b"qv7Xk2-what-nobody-may-send"
TOGETHER = 30  # tries in a test, which trains two runs first
LOGGED = (*SHORT, "trainer.max_duration=1ep", "callbacks=[mlflow_logger,checkpoint_saver]")
COMMANDS = (
    ("resume", "run", "trainer.max_duration=3ep"),
    ("sync", "run"),
    ("eval", "run"),
    ("check", "run", "trainer.max_duration=3ep"),
    ("rerun", "run"),
)


def hostile(value: Any, chance: random.Random, traps: list[str]) -> Any:
    """Return a value of the same shape, with some texts replaced by paths and addresses outside the run."""
    if isinstance(value, dict):
        return {key: hostile(item, chance, traps) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, chance, traps) for item in value]
    if isinstance(value, str) and chance.random() < 0.5:
        return chance.choice(traps)
    return value


def rewrite(file: Path, chance: random.Random, traps: list[str]) -> None:
    """Make the content of a JSON, YAML or tensor file hostile, and update its manifest."""
    if file.suffix == ".json":
        file.write_text(json.dumps(hostile(json.loads(file.read_text()), chance, traps)))
    elif file.suffix == ".jsonl":
        lines = [hostile(json.loads(line), chance, traps) for line in file.read_text().splitlines()]
        lines += [{"artifact": trap, "folder": None} for trap in traps]
        lines += [{"images": "a", "file": trap, "captions": None, "s": 1, "t": 1} for trap in traps]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif file.suffix == ".yaml":
        file.write_text(yaml.safe_dump(hostile(yaml.safe_load(file.read_text()), chance, traps)))
    elif file.suffix == ".pt":
        torch.save(hostile(torch.load(file, weights_only=True), chance, traps), file)
    manifest = file.parent / "manifest.json"
    if manifest.exists() and file != manifest:
        content, facts = file.read_bytes(), json.loads(manifest.read_text())
        facts["files"][file.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest.write_text(json.dumps(facts))


def corrupt(file: Path, other: Path, chance: random.Random, traps: list[str]) -> str:
    """Damage a file in a random way, and return the kind of damage."""
    content = file.read_bytes()
    kind = chance.choice(("emptied", "truncated", "another run's", "random bytes", "hostile", "hostile"))
    if kind == "emptied":
        file.write_bytes(b"")
    elif kind == "truncated":
        file.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif kind == "another run's" and other.exists():
        shutil.copyfile(other, file)
    elif kind == "random bytes":
        file.write_bytes(chance.randbytes(max(1, len(content))))
    else:
        rewrite(file, chance, traps)
    return kind


@pytest.fixture
def attempt(folder: Path, run_app: Any, request_log: tuple[str, list[str]]) -> Callable[[int], None]:
    """Return a function of one try; its number seeds the choice of file, damage and command."""
    address, requests = request_log
    outside = folder / "outside"
    for name, seed in (("whole", "seed=0"), ("other", "seed=1")):
        run_app(*LOGGED, seed, "hydra.run.dir=run")
        (folder / "run").rename(folder / name)
    shutil.copytree(folder / "whole" / "checkpoints" / "ep1-ba3", outside / "precious")
    (outside / "secret.npy").write_text(SECRET.decode())
    traps = [address, f"{address}/?a=b", "sqlite:///../outside/new.db", f"file://{outside}/new", "${oc.env:HOME}"]
    traps += [str(outside / "secret.npy"), "../outside/secret.npy", str(outside / "precious")]
    traps += ["../../../outside/precious", "..", "/"]
    files = sorted(path.relative_to(folder / "whole") for path in (folder / "whole").rglob("*") if path.is_file())
    files = [path for path in files if not path.name.endswith(".lock") and "latest" not in path.parts]

    def run(number: int) -> None:
        chance = random.Random(number)
        shutil.copytree(folder / "whole", folder / "run", symlinks=True)
        name, command = chance.choice(files), chance.choice(COMMANDS)
        kind = corrupt(folder / "run" / name, folder / "other" / name, chance, traps)
        if chance.random() < 0.5:
            (folder / "run" / "signature").unlink()
        before = tree(outside)
        done = run_app(*command, exit_code=None)
        about = f"try {number}: {name} {kind}, {' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode in (0, 2), about
        if done.returncode == 2:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and "Traceback" not in done.stderr, about
            assert name.stem in done.stderr or (name.parts[0] == "checkpoints" and name.parts[1] in done.stderr), about
        assert tree(outside) == before and not requests, about
        sent = [path for path in (folder / "outputs" / "mlartifacts").rglob("*") if path.is_file()]
        assert not any(SECRET in path.read_bytes() for path in sent), about
        shutil.rmtree(folder / "run")

    return run


def test_a_few_corrupted_folders_are_used_or_refused_by_name(attempt: Callable[[int], None]):
    for number in range(FEW):
        attempt(number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, TRIES, TOGETHER))
def test_corrupted_folders_are_used_or_refused_by_name(first: int, attempt: Callable[[int], None]):
    for number in range(first, first + TOGETHER):
        attempt(number)
