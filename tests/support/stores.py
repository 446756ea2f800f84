"""Reads MLflow's database as the UI would, without its client, which takes seconds to import."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from python_process import wait_until


def query(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return rows of a store, which a run's writer may still be making: waits until it has tables."""
    wait_until(lambda: count_tables(database))
    with contextlib.closing(sqlite3.connect(read_only(database), timeout=30, uri=True)) as store:
        return store.execute(sql, values).fetchall()


def change(database: Path, sql: str, *values: object) -> None:
    """Do in a store what somebody does in the UI."""
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as store:
        store.execute(sql, values)
        store.commit()


def count_tables(database: Path) -> int:
    """The number of tables; 0 if there is no database, or one that is being written or renamed."""
    try:
        with contextlib.closing(sqlite3.connect(read_only(database), uri=True)) as store:
            return store.execute("select count(*) from sqlite_master where type = 'table'").fetchone()[0]
    except sqlite3.Error:
        return 0


def read_only(database: Path) -> str:
    """Its address for sqlite3, which would otherwise create an empty file if the database is missing."""
    return f"{database.resolve().as_uri()}?mode=ro"
