"""Reads and changes MLflow's SQLite database directly, because its client takes seconds to import."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from python_process import wait_until


def query(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query, after waiting until the store has tables, because a run may still be creating it."""
    wait_until(lambda: count_tables(database))
    with contextlib.closing(sqlite3.connect(read_only(database), timeout=30, uri=True)) as store:
        return store.execute(sql, values).fetchall()


def change(database: Path, sql: str, *values: object) -> None:
    """Execute a statement that changes a store, as a user could do in the UI."""
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as store:
        store.execute(sql, values)
        store.commit()


def count_tables(database: Path) -> int:
    """Return the number of tables, which is 0 if there is no database yet or it is being written or renamed."""
    try:
        with contextlib.closing(sqlite3.connect(read_only(database), uri=True)) as store:
            return store.execute("select count(*) from sqlite_master where type = 'table'").fetchone()[0]
    except sqlite3.Error:
        return 0


def read_only(database: Path) -> str:
    """Return the read-only address of a database; otherwise sqlite3 would create an empty file for a missing one."""
    return f"{database.resolve().as_uri()}?mode=ro"
