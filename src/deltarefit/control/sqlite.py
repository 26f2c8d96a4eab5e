"""The control record in one row of a SQLite file: the embedded default for ``file://`` runs.

For processes of one host, or of one file system with working POSIX locks; not for NFS (SQLite's own advice,
https://www.sqlite.org/faq.html question 5). Each call opens the file, does one transaction and closes it, so that a process
that is killed or frozen between calls holds no lock, and nothing but the database file is left behind.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from deltarefit.control.store import ABSENT, SwapUncertainError, Tag, check_nbytes
from deltarefit.errors import RejectedError, TransportError

__all__ = ["SqliteRecordStore"]

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS control (id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL, data BLOB NOT NULL)"
)


class SqliteRecordStore:
    """One row, write-ahead log, ``synchronous=FULL``: a swap that returned True survives SIGKILL and power loss.

    The file is made by the first swap, with the permissions that the umask leaves. Reading a run that does not exist creates
    nothing.
    """

    def __init__(self, path: str | Path, *, busy_timeout_s: float = 10.0) -> None:
        """Store the settings; nothing is opened.

        Args:
            path: the database file. Its folder is made by the first swap.
            busy_timeout_s: how long one call may wait for other writers. Twenty writers at once waited at most 1.1 s
                (measured).
        """
        self._path = Path(path)
        self._busy_timeout_s = busy_timeout_s

    @property
    def place(self) -> str:
        return str(self._path)

    def read(self) -> tuple[bytes | None, Tag]:
        if not self._path.exists():
            return None, ABSENT
        self._require_write_permission()
        with self._translated(TransportError), self._connection() as connection:
            return self._row(connection)

    def swap(self, tag: Tag, new: bytes) -> bool:
        check_nbytes(self.place, len(new))
        self._make_file()
        self._require_write_permission()
        with self._translated(SwapUncertainError), self._connection() as connection:
            self._set_up(connection)
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute(_SCHEMA)
                if not self._replace(connection, tag, new):
                    connection.execute("ROLLBACK")
                    return False
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            return True

    def _replace(self, connection: sqlite3.Connection, tag: Tag, new: bytes) -> bool:
        if self._row(connection)[1] != tag:
            return False
        if tag == ABSENT:
            connection.execute("INSERT INTO control (id, revision, data) VALUES (1, 1, ?)", (new,))
        else:
            connection.execute("UPDATE control SET revision = revision + 1, data = ? WHERE id = 1", (new,))
        return True

    def _row(self, connection: sqlite3.Connection) -> tuple[bytes | None, Tag]:
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'control'").fetchone()
        if known is None:
            return None, ABSENT
        row = connection.execute("SELECT revision, length(data) FROM control WHERE id = 1").fetchone()
        if row is None:
            return None, ABSENT
        revision, nbytes = row
        check_nbytes(self.place, nbytes)
        data = connection.execute("SELECT data FROM control WHERE id = 1").fetchone()[0]
        return bytes(data), Tag(str(revision))

    def _make_file(self) -> None:
        """SQLite would take the group's permissions away; the files that it puts beside this one get the same."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise RejectedError(f"{self.place}: the control record cannot be made: {error}") from error

    def _require_write_permission(self) -> None:
        """Reading makes files beside it as well: left by one who may not write here, they would keep its writers out."""
        if not os.access(self._path, os.R_OK | os.W_OK, effective_ids=True):
            raise RejectedError(
                f"{self.place}: the control record belongs to another user; expected permission to read and write it. Run "
                "trainer, receivers and commands as one user, or as one group with a umask that lets it write"
            )

    def _set_up(self, connection: sqlite3.Connection) -> None:
        mode = self._turned_to_wal(connection)
        if mode != "wal":
            raise RejectedError(
                f"{self.place}: this file system cannot hold a write-ahead log (journal mode {mode!r}); put the run on a local "
                "disk, or use an object store"
            )

    def _turned_to_wal(self, connection: sqlite3.Connection) -> str:
        # SQLite's busy timeout does not cover this one statement: of several processes that make a new file, some fail at once.
        waited_s, pause_s = 0.0, 0.001
        while True:
            try:
                return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or waited_s >= self._busy_timeout_s:
                    raise
            threading.Event().wait(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, 0.05)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # isolation_level=None: we say BEGIN ourselves. A deferred transaction could fail at COMMIT on a stale read.
        with closing(sqlite3.connect(self._path, timeout=self._busy_timeout_s, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            yield connection

    @contextmanager
    def _translated(self, kind: type[TransportError]) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            if name in ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH"):
                raise RejectedError(f"{self.place}: not a usable control record ({name}: {error})") from error
            raise kind(f"{self.place}: {name or type(error).__name__}: {error}") from error
