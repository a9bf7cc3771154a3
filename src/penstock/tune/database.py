"""A database of measurements, one SQLite file, so that nothing is measured twice.

Each row is one measurement: its key, which says what was measured, as sorted JSON, and the numbers as JSON. A
key holds everything that the numbers depend on: the model's structure, device, torch, microbatch size, ranks
side by side, ...
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.tune.errors import DatabaseError

SCHEMA = 1
"""Version of the tables, kept in the file's user_version."""

_TABLE = """
create table if not exists measurements (
    key text primary key,
    value text not null,
    measured_at real not null
)
"""


def default_path() -> Path:
    """`penstock/profiles.sqlite` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache).

    Raises:
        DatabaseError: this user has no such folder, as in a container.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "penstock" / "profiles.sqlite"
    except RuntimeError:
        raise DatabaseError(
            "this user has no home folder to keep measurements in; set HOME or XDG_CACHE_HOME, or give --database"
        ) from None


class Database:
    """The measurements in one file. Use it in a `with`. The file and its folder are made when needed.

    Raises:
        DatabaseError: the file is no database of ours, is damaged, or can't be written. The message says what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=30.0)
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(f"{path} can't be opened: {error}; give another file with --database") from None
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was measured under this key, or None."""
        rows = self._run("select value from measurements where key = ?", _text(key))
        if not rows:
            return None
        try:
            value = json.loads(rows[0][0])
        except (ValueError, TypeError):
            value = None
        if not isinstance(value, dict):
            raise self._damaged("a row holds no JSON object")
        return value

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Stores a measurement. It replaces an older one under the same key."""
        text = json.dumps(value, allow_nan=False)
        self._run("insert or replace into measurements values (?, ?, ?)", _text(key), text, time.time())

    def __len__(self) -> int:
        return int(self._run("select count(*) from measurements")[0][0])

    def _prepare(self) -> None:
        version = self._run("pragma user_version")[0][0]
        if version > SCHEMA:
            raise DatabaseError(
                f"{self.path} was written by a newer Penstock (tables {version}, this one knows {SCHEMA}); "
                "give another file with --database"
            )
        tables = {name for (name,) in self._run("select name from sqlite_master where type = 'table'")}
        if tables - {"measurements"} or (version == 0 and tables):
            raise DatabaseError(f"{self.path} is a database of something else; give another file with --database")
        self._run(_TABLE)
        self._run(f"pragma user_version = {SCHEMA}")

    def _run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._connection, closing(self._connection.execute(statement, values)) as cursor:
                return cursor.fetchall()
        except sqlite3.OperationalError as error:
            raise DatabaseError(f"{self.path} can't be used: {error}; give another file with --database") from None
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, why: str) -> DatabaseError:
        return DatabaseError(
            f"{self.path} is damaged ({why}); delete it to measure again, or give another with --database"
        )


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, allow_nan=False)
