"""Small durable messages between processes that share nothing but a run's store.

A message is one object under ``mail/<recipient>/``: written at once, deleted when acknowledged, so it survives restarts of
both ends. Messages of one sender to one recipient come in the order of ``post``; those of different senders in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError, TransportError
from deltarefit.transport import keys
from deltarefit.transport.base import Clock
from deltarefit.transport.keys import MailKey
from deltarefit.transport.stores import RunStore

__all__ = ["Mail", "Mailbox", "MailboxSettings"]

_LOG = logging.getLogger(__name__)
_MAGIC = b"DRML\x01"
_DIGEST_NBYTES = 16
_OVERHEAD_NBYTES = 512
"""Magic, digest and the envelope's names (at most 64 bytes each) together stay far below this."""
_READERS = 8
"""Messages read at the same time: over a long link each read is a round trip."""
_LATENESS = 8
"""While waiting, a look comes after an eighth of the time waited so far, so no message is found much later than it came."""


@dataclass(frozen=True, slots=True)
class MailboxSettings:
    """Limits and the pace of polling."""

    max_nbytes: int = 4 << 20
    """Longest message."""
    max_taken: int = 256
    """Most messages that one ``take`` returns."""
    first_poll_s: float = 0.002
    """Shortest pause between looks; the longer nothing came, the longer. For a bucket choose 0.01 to 0.5: a look costs."""
    max_poll_s: float = 0.05

    def __post_init__(self) -> None:
        if self.max_nbytes < 1 or self.max_taken < 1 or not 0 < self.first_poll_s <= self.max_poll_s:
            raise RejectedError(f"{self}: expected positive limits and 0 < first_poll_s <= max_poll_s")

    @classmethod
    def for_store(cls, store: RunStore) -> MailboxSettings:
        """The pace that suits the store: fast for files and memory, gentle for a bucket."""
        if store.url.startswith(("file:", "memory:")):
            return cls()
        return cls(first_poll_s=0.02, max_poll_s=0.5)


@dataclass(frozen=True, slots=True)
class Mail:
    """One message, as ``take`` gives it."""

    sender: str
    data: bytes
    key: str
    """For ``acknowledge``."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sender: str
    recipient: str
    boot: int
    sequence: int
    nonce: str
    data: bytes


Sealed = bytes | PayloadInvalidError | None
"""What lies under a key: an object, one that is refused, or none."""


class Mailbox:
    """One participant's letters, out and in.

    ``post`` may be called from any thread; ``take`` and ``acknowledge`` from any thread too, but two threads that take share
    the messages between them. Only one mailbox of a name may take at a time: a second one would get the same messages.
    """

    def __init__(
        self,
        store: RunStore,
        me: str,
        *,
        clock: Clock,
        nonce: str,
        key: bytes | None = None,
        settings: MailboxSettings | None = None,
    ) -> None:
        """Open the letters of ``me``. Nothing is read or written yet.

        Args:
            store: where the messages lie.
            me: this participant's name, part of object keys.
            clock: paces the looks.
            nonce: eight hex digits, new at each start of this participant.
            key: the run's secret, at most 64 bytes; with it, messages of anyone without it are skipped.
            settings: limits and pace; ``MailboxSettings.for_store`` by default.
        """
        if len(nonce) != 8 or not set(nonce) <= set("0123456789abcdef"):
            raise RejectedError(f"mailbox nonce {nonce[:80]!r}: expected 8 hex digits, new at each start")
        keys.mail_prefix(me)
        self.me = me
        self._store = store
        self._clock = clock
        self._nonce = nonce
        self._key = key or b""
        self._settings = settings if settings is not None else MailboxSettings.for_store(store)
        self._posting: dict[str, threading.Lock] = {}
        self._next: dict[str, MailKey] = {}
        self._taking = threading.Lock()
        self._latest: MailKey | None = None
        """Of the message given out last, whoever sent it."""
        self._taken: set[str] = set()
        self._last: dict[str, MailKey] = {}  # per sender: the message given out last
        self._passed: dict[tuple[str, int, str], int] = {}  # per start of a sender: the last sequence given out
        self._foreign: set[str] = set()

    def post(self, to: str, data: bytes) -> None:
        """Leave a message for ``to``. Durable on return, as the store is.

        Raises:
            RejectedError: too long, or no name.
            TransportError: perhaps not left; posting it again may deliver it twice.
        """
        if len(data) > self._settings.max_nbytes:
            raise RejectedError(f"message to {to}: expected at most {self._settings.max_nbytes} bytes, got {len(data)}")
        # One at a time for each recipient, so that a later message never shows before an earlier one.
        with self._posting.setdefault(to, threading.Lock()):
            parts = self._next.get(to) or MailKey(self.me, self._boot(to), self._nonce, 0)
            # The number is used up even when the write fails: the lost reply may hide a message that lies there.
            self._next[to] = parts._replace(sequence=parts.sequence + 1)
            self._store.put(keys.mail(to, parts), _seal(to, parts, data, self._key))

    def take(self, timeout_s: float) -> list[Mail]:
        """Messages that wait and were not taken before, at least one unless ``timeout_s`` ran out; in order per sender.

        They stay in the store, and a restarted process gets them again, until ``acknowledge``.
        """
        start_s = self._clock.monotonic_s()
        end_s = start_s + timeout_s
        while True:
            if found := self._look():
                return found
            now_s = self._clock.monotonic_s()
            if now_s >= end_s:
                return []
            poll_s = min(max(self._settings.first_poll_s, (now_s - start_s) / _LATENESS), self._settings.max_poll_s)
            self._clock.sleep(min(poll_s, end_s - now_s))

    @property
    def following(self) -> MailKey | None:
        """What the message after the one given out last will be called; None if that is not known.

        With ``read`` and ``take_read`` that is one request, where ``take`` needs a listing first: half the round trips. A
        message is missed whose sender began anew, or failed to leave the one in between.
        """
        latest = self._latest
        if latest is None:
            return None
        parts = latest._replace(sequence=latest.sequence + 1)
        return None if keys.mail(self.me, parts) in self._foreign else parts

    def read(self, parts: MailKey) -> Sealed:
        """Look whether a message lies there; for ``take_read``. May be called from several threads at once."""
        return self._read(parts)

    def take_read(self, parts: MailKey, sealed: Sealed) -> Mail | None:
        """Give out what ``read`` found, unless it is none or was given out meanwhile."""
        with self._taking:
            if sealed is None or parts != self.following:
                return None
            mail = self._open(parts, keys.mail(self.me, parts), sealed)
            if mail is not None:
                self._give(mail, parts)
            return mail

    def acknowledge(self, *taken: str) -> None:
        """Remove messages by their keys, once what they asked for is done. May be repeated."""
        self._store.delete(taken)
        with self._taking:
            self._taken.difference_update(taken)

    def _boot(self, to: str) -> int:
        """A number above that of every message of an earlier start of ours that still waits there."""
        waiting = [keys.parse_mail(info.key) for info in self._store.listing(keys.mail_prefix(to))]
        return max((parts.boot + 1 for parts in waiting if parts is not None and parts.sender == self.me), default=0)

    def _look(self) -> list[Mail]:
        with self._taking:
            found: list[Mail] = []
            rows = self._waiting()[: self._settings.max_taken]
            for (parts, key), sealed in zip(rows, self._read_all([parts for parts, _ in rows]), strict=True):
                if isinstance(sealed, TransportError):
                    if not found:
                        raise sealed
                    _LOG.warning("mailbox of %s: %s stays for the next look: %s", self.me, key, sealed)
                    break
                mail = self._open(parts, key, sealed)
                self._give(mail, parts)
                if mail is not None:
                    found.append(mail)
            return found

    def _give(self, mail: Mail | None, parts: MailKey) -> None:
        """Note that a message is given out, or passed over."""
        self._last[parts.sender] = self._latest = parts
        self._passed[parts[:3]] = parts.sequence
        if mail is not None:
            self._taken.add(mail.key)

    def _waiting(self) -> list[tuple[MailKey, str]]:
        """New messages, the oldest of every sender first, so that a talkative one cannot starve the others."""
        waiting = self._new()
        newest = {parts.sender: parts for parts, _ in waiting}
        if any(not self._follows(rows) for rows in _by_sender(waiting).values()):
            # A listing is no snapshot: it may show a message and miss one that was left before it. What the first listing
            # showed was left before the second one began, and so was all that came before it.
            waiting = [(parts, key) for parts, key in self._new() if parts.sender in newest and parts <= newest[parts.sender]]
        ranked = [(turn, row) for rows in _by_sender(waiting).values() for turn, row in enumerate(rows)]
        return [row for _, row in sorted(ranked)]

    def _new(self) -> list[tuple[MailKey, str]]:
        """Messages of our format that this object has not given out, in order per sender."""
        found: list[tuple[MailKey, str]] = []
        for info in self._store.listing(keys.mail_prefix(self.me)):
            if info.key in self._taken or info.key in self._foreign:
                continue
            parts = keys.parse_mail(info.key)
            if parts is None:
                self._skip(info.key, "its key is not one of ours")
            elif parts.sequence <= self._passed.get(parts[:3], -1):
                with contextlib.suppress(TransportError):
                    self._store.delete([info.key])  # a repeated write brought back a message that was acknowledged
            else:
                found.append((parts, info.key))
        return sorted(found)

    def _follows(self, rows: list[tuple[MailKey, str]]) -> bool:
        """Whether these messages of one sender go on where the last one taken ended, without a gap."""
        first = rows[0][0]
        last = self._last.get(first.sender)
        expected = last._replace(sequence=last.sequence + 1) if last is not None else first._replace(boot=0, sequence=0)
        return all(parts == expected._replace(sequence=expected.sequence + step) for step, (parts, _) in enumerate(rows))

    def _read_all(self, wanted: Sequence[MailKey]) -> list[Sealed | TransportError]:
        def read(parts: MailKey) -> Sealed | TransportError:
            try:
                return self._read(parts)
            except TransportError as error:
                return error

        if len(wanted) < 2:
            return [read(parts) for parts in wanted]
        with ThreadPoolExecutor(min(_READERS, len(wanted)), thread_name_prefix="deltarefit-mail") as pool:
            return list(pool.map(read, wanted))

    def _read(self, parts: MailKey) -> Sealed:
        """The object; None if there is none, as when another thread acknowledged it; the error if it is no message for us."""

        def whole(sealed: bytes) -> bytes:
            _unseal(self.me, parts, sealed, self._key)
            return sealed

        try:
            return self._store.get_as(keys.mail(self.me, parts), whole, max_nbytes=self._settings.max_nbytes + _OVERHEAD_NBYTES)
        except PayloadMissingError:
            return None
        except PayloadInvalidError as error:
            return error

    def _open(self, parts: MailKey, key: str, sealed: Sealed) -> Mail | None:
        try:
            if isinstance(sealed, PayloadInvalidError):
                raise sealed
            return None if sealed is None else Mail(parts.sender, _unseal(self.me, parts, sealed, self._key), key)
        except PayloadInvalidError as error:
            self._skip(key, str(error))
            return None

    def _skip(self, key: str, why: str) -> None:
        self._foreign.add(key)
        _LOG.warning("mailbox of %s: skipped %s and leave it there: %s", self.me, key, why)


def _by_sender(rows: list[tuple[MailKey, str]]) -> dict[str, list[tuple[MailKey, str]]]:
    grouped: dict[str, list[tuple[MailKey, str]]] = {}
    for row in rows:
        grouped.setdefault(row[0].sender, []).append(row)
    return grouped


def _seal(to: str, parts: MailKey, data: bytes, key: bytes) -> bytes:
    body = msgspec.msgpack.encode(_Envelope(parts.sender, to, parts.boot, parts.sequence, parts.nonce, data))
    return _MAGIC + _digest(body, key) + body


def _digest(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES, key=key).digest()


def _unseal(me: str, parts: MailKey, sealed: bytes, key: bytes) -> bytes:
    """The message within, if object and key belong together.

    Raises:
        PayloadInvalidError: not a message, damaged, or moved from another place.
    """
    head = len(_MAGIC) + _DIGEST_NBYTES
    body = sealed[head:]
    if sealed[: len(_MAGIC)] != _MAGIC:
        raise PayloadInvalidError("it is not a message of this format")
    if not hmac.compare_digest(_digest(body, key), sealed[len(_MAGIC) : head]):
        raise PayloadInvalidError("its digest is wrong: it was cut short, changed, or sealed with another key")
    try:
        envelope = msgspec.msgpack.decode(body, type=_Envelope)
    except (msgspec.DecodeError, ValueError) as error:
        raise PayloadInvalidError(f"its envelope cannot be read: {error}") from error
    if (envelope.recipient, MailKey(envelope.sender, envelope.boot, envelope.nonce, envelope.sequence)) != (me, parts):
        raise PayloadInvalidError(f"it is a message from {envelope.sender[:80]!r} to {envelope.recipient[:80]!r}")
    return envelope.data
