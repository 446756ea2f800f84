"""Caches of what every command needs: parsed config files, and an empty MLflow store.

A process shares its caches with the processes that are forked from it. This halves the time of a command.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import yaml

MAKE_STORES = "TESTS_MAKE_STORES"  # environment variable that tells a process to create its stores itself
LOADERS = ("OmegaConfLoader", "SafeLoader")  # OmegaConf makes a class of this name whenever it loads a file

_load = yaml.load
_parsed: dict[tuple[str, str | bytes], bytes] = {}


def parse_once() -> None:
    """Patch `yaml.load` so that it parses each text only once."""
    yaml.load = load


def load(stream: Any, Loader: type[Any]) -> Any:
    """Return the same as `yaml.load`, from memory if this text was parsed before; errors are raised by yaml itself."""
    if Loader.__name__ not in LOADERS:
        return _load(stream, Loader=Loader)
    text = stream
    if hasattr(stream, "read"):
        text = stream.read()
        stream.seek(0)
    key = Loader.__name__, text
    if key not in _parsed:
        _parsed[key] = pickle.dumps(_load(stream, Loader=Loader))
    return pickle.loads(_parsed[key])


def make_stores_once() -> None:
    """Create an empty store now, and copy it to each new SQLite store, unless `MAKE_STORES` is set."""
    from mlflow.store.db import utils

    make_tables = utils._initialize_tables
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "mlflow.db"
        maker = os.fork()  # in a process of its own, because alembic reconfigures the logging of its process
        if maker == 0:
            os.dup2(os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT), 2)
            engine = utils.create_sqlalchemy_engine(f"sqlite:///{first}")
            make_tables(engine)
            engine.dispose()
            os._exit(0)
        os.waitpid(maker, 0)
        content = first.read_bytes()

    def copy_or_make_tables(engine: Any) -> None:
        file = Path(engine.url.database or "")
        if engine.dialect.name == "sqlite" and not file.exists() and MAKE_STORES not in os.environ:
            file.write_bytes(content)
        else:
            make_tables(engine)

    utils._initialize_tables = copy_or_make_tables
