"""The SQLite backend: what it leaves on disk, what it refuses, and that it holds no lock between calls."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from contextlib import closing

import pytest

from deltarefit.control import ABSENT, SqliteRecordStore, SwapUncertainError
from deltarefit.errors import RejectedError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "control.db"


def test_reading_a_run_that_does_not_exist_creates_nothing(path):
    assert SqliteRecordStore(path).read() == (None, ABSENT)
    assert not path.parent.exists()


def test_nothing_but_the_database_is_left_behind(path):
    store = SqliteRecordStore(path)
    store.swap(ABSENT, b"1")
    store.swap(store.read()[1], b"2")
    assert [entry.name for entry in path.parent.iterdir()] == ["control.db"]
    assert stat.S_ISREG(path.stat().st_mode)


def test_the_record_is_written_through_to_disk(path, monkeypatch):
    statements = []
    real = sqlite3.connect

    def connect(*args, **kwargs):
        connection = real(*args, **kwargs)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr("deltarefit.control.sqlite.sqlite3.connect", connect)
    SqliteRecordStore(path).swap(ABSENT, b"1")
    assert "PRAGMA synchronous = FULL" in statements
    assert "PRAGMA journal_mode = WAL" in statements
    assert statements.index("BEGIN IMMEDIATE") < next(
        n for n, text in enumerate(statements) if text.startswith("SELECT revision")
    )
    assert statements[-1] == "COMMIT"


def test_no_lock_is_held_between_calls(path):
    store = SqliteRecordStore(path, busy_timeout_s=0.05)
    store.swap(ABSENT, b"1")
    store.read()
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        other.execute("ROLLBACK")


def test_a_writer_that_sits_on_the_lock_delays_a_swap_no_longer_than_the_timeout_and_never_a_read(path):
    store = SqliteRecordStore(path, busy_timeout_s=0.05)
    store.swap(ABSENT, b"1")
    _, tag = store.read()
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SwapUncertainError, match=r"control\.db: SQLITE_BUSY"):
            store.swap(tag, b"2")
        assert store.read()[0] == b"1"
        other.execute("ROLLBACK")
    assert store.swap(tag, b"2")


def test_a_file_that_another_process_writes_while_it_becomes_a_log_is_waited_for(path):
    store = SqliteRecordStore(path)
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE other (x)")  # still with a rollback journal
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.2, other.execute, ["ROLLBACK"])
        release.start()
        assert store.swap(ABSENT, b"1")
        release.join()
    assert store.read()[0] == b"1"


@pytest.mark.parametrize("content", [b"not a database, but long enough to have a header" * 50, b"short"])
def test_a_file_that_is_not_a_database_is_refused_and_not_touched(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    for call in (SqliteRecordStore(path).read, lambda: SqliteRecordStore(path).swap(ABSENT, b"1")):
        with pytest.raises(RejectedError, match=r"control\.db: not a usable control record \(SQLITE_NOTADB"):
            call()
    assert path.read_bytes() == content


def test_a_database_of_something_else_reads_as_absent_and_keeps_its_tables(path):
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
        other.commit()
    store = SqliteRecordStore(path)
    assert store.read() == (None, ABSENT)
    assert store.swap(ABSENT, b"1")
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT count(*) FROM theirs").fetchone() == (0,)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RejectedError, match="the control record cannot be made"):
        SqliteRecordStore(tmp_path / "file" / "control.db").swap(ABSENT, b"1")


def test_a_path_that_is_a_folder_is_refused(tmp_path):
    with pytest.raises(RejectedError, match="SQLITE_CANTOPEN"):
        SqliteRecordStore(tmp_path).read()


def test_a_huge_row_is_refused_before_it_is_read(path):
    store = SqliteRecordStore(path)
    store.swap(ABSENT, b"1")
    with closing(sqlite3.connect(path)) as other:
        other.execute("UPDATE control SET data = zeroblob(2000000)")
        other.commit()
    with pytest.raises(RejectedError, match="2000000 bytes, expected at most"):
        store.read()


def test_a_file_system_without_a_write_ahead_log_is_refused(path, monkeypatch):
    real = sqlite3.connect

    class WithoutWal(sqlite3.Connection):
        def execute(self, sql, *args):
            return super().execute("SELECT 'delete'" if "journal_mode" in sql else sql, *args)

    monkeypatch.setattr(
        "deltarefit.control.sqlite.sqlite3.connect", lambda *args, **kwargs: real(*args, factory=WithoutWal, **kwargs)
    )
    with pytest.raises(RejectedError, match="cannot hold a write-ahead log"):
        SqliteRecordStore(path).swap(ABSENT, b"1")


def test_the_umask_decides_who_may_write_the_record(path):
    before = os.umask(0o002)
    try:
        SqliteRecordStore(path).swap(ABSENT, b"1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o664
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("SELECT * FROM control").fetchall()
            assert {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()} == {0o664}
            assert len(list(path.parent.iterdir())) == 3
    finally:
        os.umask(before)


def test_a_reader_that_may_not_write_the_record_is_refused_and_leaves_nothing_in_its_way(open_directory, other_user):
    """SQLite makes the log's files as the user that reads, in a directory that all may write to."""
    open_directory.chmod(0o777)
    store = SqliteRecordStore(open_directory / "control.db")
    assert store.swap(ABSENT, b"1")
    store._path.chmod(0o444)
    with other_user():
        for call in (store.read, lambda: store.swap(ABSENT, b"2")):
            with pytest.raises(RejectedError, match=r"control\.db: the control record belongs to another user; expected"):
                call()
    assert [one.name for one in open_directory.iterdir()] == ["control.db"]
    store._path.chmod(0o644)
    assert store.swap(store.read()[1], b"2")
