"""Files on disk: exact bounded reads, names that stay inside their directory, and results that appear whole or not at all.

Every change to the file system that the offline tool makes goes through ``Disk``, so that tests can end it after any step.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.errors import RejectedError

__all__ = [
    "DISK",
    "Disk",
    "check_file_name",
    "locked",
    "new_directory",
    "new_file",
    "partial_path",
    "read_exact",
    "read_into",
    "require_free",
    "write_file",
]

_PARTIAL = ".deltarefit-partial"


def check_file_name(name: str, where: str) -> str:
    """Refuse a name that is not a plain visible file in one directory: names come from headers, indexes and deltas."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or "\\" in name or len(os.fsencode(name)) > 255:
        raise RejectedError(f"{where}: file name {name[:300]!r}; expected a plain visible name without a directory")
    return name


def partial_path(path: Path) -> Path:
    """The sibling that a result is written to before it takes its name. Fixed, so that a crash leaves at most one."""
    return path.with_name(f".{path.name}{_PARTIAL}")


def read_into(fd: int, buffer: NDArray[Any], byte_offset: int, where: str) -> None:
    """Fill a contiguous array from a file.

    Raises:
        RejectedError: the file ends before the array is full.
    """
    rest = buffer.view(np.uint8).data if buffer.size else memoryview(b"")
    while rest:
        count = os.preadv(fd, [rest], byte_offset)
        if not count:
            raise RejectedError(f"{where}: ends at byte {byte_offset}, {len(rest)} bytes early; it was cut while being read")
        rest, byte_offset = rest[count:], byte_offset + count


def read_exact(fd: int, nbytes: int, byte_offset: int, where: str) -> bytes:
    """So many bytes of a file; the caller has bounded ``nbytes``.

    Raises:
        RejectedError: the file ends before.
    """
    buffer = np.empty(nbytes, np.uint8)
    read_into(fd, buffer, byte_offset, where)
    return buffer.tobytes()


class Disk:
    """Changes to the file system. Each method is one step: a crash between two of them is what recovery must survive."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """A new empty file, open for reading and writing; an earlier one of that name is emptied."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Give a file its final length, holes reading as zeros."""
        os.ftruncate(fd, nbytes)

    def write(self, fd: int, data: Any, byte_offset: int) -> None:
        """Write all of a buffer."""
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while rest:
            count = os.pwrite(fd, rest, byte_offset)
            rest, byte_offset = rest[count:], byte_offset + count

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic on one file system; replaces a file, or an empty directory by a directory."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; nothing happens if there is none."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()
"""The real one."""


def require_free(path: Path, *, directory: bool, replace: bool = False) -> None:
    """Refuse an output path that is taken.

    Raises:
        RejectedError: it exists: a file that may not be replaced, a directory that is not empty, or one of the wrong kind.
    """
    if not path.parent.is_dir():
        raise RejectedError(f"{path}: there is no directory {path.parent} to write it to")
    if not os.path.lexists(path):
        return
    if not directory and not path.is_dir() and not path.is_file() and not path.is_symlink():
        raise RejectedError(f"{path}: is a device, a pipe or a socket, but the result is a file; choose a file name")
    if directory and (not path.is_dir() or any(path.iterdir())):
        raise RejectedError(f"{path}: exists; the result is a directory: choose one that is empty or does not exist yet")
    if not directory and path.is_dir():
        raise RejectedError(f"{path}: is a directory, but the result is one file; choose a file name")
    if not directory and not replace:
        raise RejectedError(f"{path}: exists; choose another output or give --force")


def require_apart(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output path that is one of the files that are read: replacing it would destroy what the result depends on.

    Raises:
        RejectedError: it is one of them, perhaps by another name.
    """
    for source in inputs:
        if path.exists() and path.samefile(source):
            raise RejectedError(f"{path}: is read here, as {source}; choose another output")


def write_file(path: Path, content: bytes, disk: Disk = DISK) -> None:
    """Write a whole file and wait until it is on disk. Not atomic: for files in a directory that has no name yet."""
    fd = disk.create(path)
    try:
        disk.write(fd, content, 0)
        disk.sync(fd)
    finally:
        os.close(fd)


@contextmanager
def new_file(path: Path, disk: Disk = DISK, *, replace: bool = False) -> Iterator[int]:
    """A file that appears under its name, complete and on disk, when the block ends; on an exception it never does.

    Yields a descriptor for reading and writing.

    Raises:
        RejectedError: the path exists and ``replace`` is not set, or another process is writing it.
    """
    require_free(path, directory=False, replace=replace)
    partial = partial_path(path)
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(fd, partial)
        try:
            disk.truncate(fd, 0)
            yield fd
            disk.sync(fd)
            disk.rename(partial, path)
            disk.sync_directory(path.parent)
        except BaseException:
            disk.remove(partial)
            raise
    finally:
        os.close(fd)


@contextmanager
def new_directory(path: Path, disk: Disk = DISK) -> Iterator[Path]:
    """A directory that appears under its name, complete and on disk, when the block ends; on an exception it never does.

    Yields the directory to fill. The caller syncs the files that it writes.

    Raises:
        RejectedError: the path exists and is not an empty directory, or another process is writing it.
    """
    require_free(path, directory=True)
    partial = partial_path(path)
    disk.make_directory(partial)
    with locked(partial):
        try:
            for left in partial.iterdir():
                disk.remove(left)
            yield partial
            disk.sync_directory(partial)
            disk.rename(partial, path)
            disk.sync_directory(path.parent)
        except BaseException:
            disk.remove(partial)
            raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of an existing file or directory. The kernel releases it when the process dies.

    Raises:
        RejectedError: another process holds it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have renamed the file away: then this lock guards nothing.
        is_same = path.exists() and os.path.samestat(os.fstat(fd), path.stat())
    except BlockingIOError:
        is_same = False
    except OSError as error:
        # Some network file systems have no locks; nothing else there tells two writers apart either.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        is_same = True
    if not is_same:
        raise RejectedError(f"{path}: another process is writing it; wait for it or choose another output") from None
