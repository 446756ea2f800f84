"""Makes once what every command needs: parsed config files, and empty MLflow stores.

The process that made them and those forked from it share them. This halves the time of a command.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import yaml

MAKE_STORES = "TESTS_MAKE_STORES"  # environment variable of processes that are to make their stores themselves
LOADERS = ("OmegaConfLoader", "SafeLoader")  # OmegaConf makes a class of this name whenever it loads a file

_load = yaml.load
_parsed: dict[tuple[str, str | bytes], bytes] = {}


def parse_once() -> None:
    """Have YAML that was parsed before come from memory."""
    yaml.load = load


def load(stream: Any, Loader: type[Any]) -> Any:
    """Return what `yaml.load` does. Errors are always yaml's own."""
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
    """Make the tables of an empty store now; each new SQLite store gets a copy, unless `MAKE_STORES` is set."""
    from mlflow.store.db import utils

    make_tables = utils._initialize_tables
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "mlflow.db"
        maker = os.fork()  # alembic sets up logging for the process that it takes for its own
        if maker == 0:
            os.dup2(os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT), 2)
            engine = utils.create_sqlalchemy_engine(f"sqlite:///{first}")
            make_tables(engine)
            engine.dispose()
            os._exit(0)
        os.waitpid(maker, 0)
        content = first.read_bytes()

    def copy_tables(engine: Any) -> None:
        file = Path(engine.url.database or "")
        if engine.dialect.name == "sqlite" and not file.exists() and MAKE_STORES not in os.environ:
            file.write_bytes(content)
        else:
            make_tables(engine)

    utils._initialize_tables = copy_tables
