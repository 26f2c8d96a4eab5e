"""The directory through which the processes of one rollout node share payloads: the engines' downloads, and the node's relay.

All of them derive the same directory from the run's URL, usually under ``/dev/shm``; a small file in it names the node, so that
the coordinator knows which receivers a relay serves. A node without such a directory works as well: its engines download for
themselves. Each process holds a lock on the directory while it uses it, which the kernel drops when the process dies; the last
one to leave removes the directory, unless payloads wait in it for a relay to come back.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import weakref
from pathlib import Path
from typing import IO

from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import IdSource
from deltarefit.transport import shared_directory, shared_path

__all__ = ["NodeShare", "open_node_share"]

_LOG = logging.getLogger(__name__)
_NODE_NAME_NBYTES = 64
_OPENINGS = 20  # more than once only where somebody else left in the same moment


class _GoneError(Exception):
    """The directory was removed while it was being opened."""


class NodeShare:
    """One node's directory for one run, until ``close``."""

    def __init__(self, directory: Path, ids: IdSource) -> None:
        """Find or make the node's name in ``directory``.

        Raises:
            RejectedError: the directory cannot be used.
        """
        self.directory = directory
        self._users = self._enter()
        self._leave = weakref.finalize(self, os.close, self._users)
        self.payloads = directory / "payloads"
        """Of ``NodeCache``."""
        self.relay = directory / "relay"
        """The relay's shelf."""
        try:
            self.payloads.mkdir(mode=0o700, exist_ok=True)
            self.relay.mkdir(mode=0o700, exist_ok=True)
            self.node = self._name(ids)
        except OSError as error:
            self._leave()
            raise RejectedError(f"shared directory {directory}: {error}; name another with shared_directory") from error

    def _enter(self) -> int:
        """Be one of the directory's users: nobody removes it until the returned file descriptor is closed.

        Raises:
            RejectedError: the directory cannot be used.
        """
        path = self.directory / "users"
        try:
            users = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(users, fcntl.LOCK_SH)  # waits for no longer than somebody removes the directory
                if os.path.samestat(os.fstat(users), path.stat()):
                    return users
            except OSError:
                os.close(users)
                raise
            os.close(users)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RejectedError(f"shared directory {self.directory}: {error}; name another with shared_directory") from error
        raise _GoneError(f"shared directory {self.directory}: others keep removing it")

    def close(self) -> None:
        """Leave the directory. The last one removes it, unless a relay's payloads lie there. May be called again."""
        if not self._leave.alive:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while others are in it
            if not any(path.is_file() and path.parent != self.relay / "readers" for path in self.relay.rglob("*")):
                gone = self.directory.with_name(f"{self.directory.name}.{self.node}")
                self.directory.rename(gone)  # in one step, so that nobody enters what is being removed
                shutil.rmtree(gone, ignore_errors=True)
        self._leave()

    def lock_relay(self) -> IO[bytes]:
        """Be this node's one relay until the returned file is closed, or this process ends.

        Raises:
            RejectedError: another process is.
        """
        file = (self.directory / "relay.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise RejectedError(f"shared directory {self.directory}: another relay serves this node and run already") from error
        return file

    def _name(self, ids: IdSource) -> str:
        """Whoever links first names the node for all."""
        path = self.directory / "node"
        own = self.directory / f"node.{os.getpid()}-{ids.nonce()}"
        own.write_text(f"n{ids.nonce()}{ids.nonce()}", encoding="ascii")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            own.unlink(missing_ok=True)
        with path.open("rb") as file:
            return file.read(_NODE_NAME_NBYTES).decode("ascii", "replace")


def open_node_share(root: str, run_url: str, ids: IdSource, *, makes: bool = False) -> NodeShare | None:
    """The node's share for that run; None if ``root`` is empty, or cannot be used, which is logged.

    A run in files on this machine needs none, so there it is only found, unless the caller ``makes`` it, as a relay does.
    """
    is_local = run_url.startswith(("file:", "memory:")) and not makes
    if not root or (is_local and not shared_path(run_url, Path(root)).exists()):
        return None
    try:
        why = ""
        for _ in range(_OPENINGS):
            try:
                return NodeShare(_directory(run_url, Path(root)), ids)
            except _GoneError as error:
                why = str(error)
        raise RejectedError(why)
    except RejectedError as error:
        _LOG.warning("nothing is shared with other engines of this node: %s", error)
        return None


def _directory(run_url: str, root: Path) -> Path:
    try:
        return shared_directory(run_url, root=root)
    except RejectedError as error:
        if isinstance(error.__cause__, FileNotFoundError | FileExistsError) and root.is_dir():
            raise _GoneError(str(error)) from error
        raise
