"""Payloads that are here and not applied yet: in memory, on local disk, or being decoded. Bytes only; others decide.

In asynchronous delivery payloads wait here while the engine serves: decoded up to a limit of bytes, then compressed in memory
up to another, then on disk. Decoding runs on several threads, a bounded number of payloads ahead.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deltarefit.errors import AttemptFailedError
from deltarefit.ids import PayloadId

__all__ = ["Decoded", "Staging"]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A payload that is ready to be applied."""

    value: object
    nbytes: int
    """What it holds in memory."""


class Staging:
    """Of one attempt. Used by one thread, which decodes on others."""

    def __init__(
        self,
        decode: Callable[[PayloadId, bytes], Decoded],
        *,
        num_threads: int,
        directory: str = "",
        news: threading.Event | None = None,
    ) -> None:
        """Hold payloads.

        Args:
            decode: called from several threads at once.
            num_threads: how many.
            directory: where payloads go that memory has no room for; empty for the system's directory for temporary files.
            news: set whenever a payload is decoded.
        """
        self._news = news or threading.Event()
        self._decode = decode
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="deltarefit-decode")
        self._directory = directory
        self._spilled: tempfile.TemporaryDirectory[str] | None = None
        self._kept: dict[PayloadId, bytes | Path] = {}
        self._decoding: dict[PayloadId, Future[tuple[Decoded, int]]] = {}

    @property
    def num_decoding(self) -> int:
        """Payloads that are decoded, or being decoded, and not taken."""
        return len(self._decoding)

    @property
    def num_undecoded(self) -> int:
        """Of these, payloads that are not decoded yet."""
        return sum(not future.done() for future in self._decoding.values())

    @property
    def is_all_decoded(self) -> bool:
        """Whether none is being decoded. Raises what decoding one of them raised."""
        return all(future.done() and future.result() for future in self._decoding.values())

    @property
    def decoded_nbytes(self) -> int:
        """Bytes that decoded payloads hold. Raises what decoding one of them raised."""
        return sum(future.result()[0].nbytes for future in self._decoding.values() if future.done())

    def keep(self, name: PayloadId, data: bytes) -> None:
        """Hold it in memory."""
        self._kept[name] = data

    def spill(self, name: PayloadId, data: bytes) -> None:
        """Hold it on disk.

        Raises:
            AttemptFailedError: the disk does not take it.
        """
        try:
            if self._spilled is None:
                self._spilled = tempfile.TemporaryDirectory(prefix="deltarefit-", dir=self._directory or None)
            path = Path(self._spilled.name) / f"{name.sequence}-{name.owner}"
            path.write_bytes(data)
        except OSError as error:
            raise AttemptFailedError(
                f"{name}: {len(data)} bytes cannot be staged on disk in {self._directory or tempfile.gettempdir()}: {error}; "
                "make room there, name another spill_directory, or raise staging_nbytes"
            ) from error
        self._kept[name] = path

    def begin_decoding(self, name: PayloadId) -> None:
        """Decode what is held under this name."""
        kept = self._kept.pop(name)
        future = self._decoding[name] = self._pool.submit(self._decode_kept, name, kept)
        future.add_done_callback(lambda _: self._news.set())

    def is_decoded(self, name: PayloadId) -> bool:
        """Whether ``take`` returns at once."""
        future = self._decoding.get(name)
        return future is not None and future.done()

    def take(self, name: PayloadId) -> tuple[object, int]:
        """The decoded payload, which is not held any more, and its length before. Raises what decoding raised."""
        decoded, nbytes = self._decoding.pop(name).result()
        return decoded.value, nbytes

    def close(self) -> None:
        """Drop everything. Decoding that is under way ends by itself. May be called again."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()
        self._decoding.clear()
        spilled, self._spilled = self._spilled, None
        if spilled is not None:
            with contextlib.suppress(OSError):
                spilled.cleanup()

    def _decode_kept(self, name: PayloadId, kept: bytes | Path) -> tuple[Decoded, int]:
        if isinstance(kept, bytes):
            return self._decode(name, kept), len(kept)
        try:
            data = kept.read_bytes()
        except OSError as error:
            raise AttemptFailedError(f"{name}: what was staged on disk cannot be read: {error}") from error
        kept.unlink(missing_ok=True)
        return self._decode(name, data), len(data)
