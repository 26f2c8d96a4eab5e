"""What a backend of the control record must do. ``testing.control_suite`` checks that it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deltarefit.errors import RejectedError, TransportError
from deltarefit.protocol.record import MAX_CONTROL_NBYTES

__all__ = ["ABSENT", "RecordStore", "SwapUncertainError", "Tag", "check_nbytes"]


@dataclass(frozen=True, slots=True)
class Tag:
    """Names one stored state of the record. Opaque: only its store reads it."""

    etag: str | None = None
    generation: str | None = None
    """Stores such as GCS compare this and not the ETag; both are always kept."""


ABSENT = Tag()
"""The tag of a record that does not exist."""


class SwapUncertainError(TransportError):
    """A swap was sent and its reply was not had: it may have taken effect, or may still take effect."""


def check_nbytes(place: str, nbytes: int) -> None:
    """Refuse what cannot be a control record, before it is read whole or written.

    Raises:
        RejectedError: more than ``MAX_CONTROL_NBYTES``.
    """
    if nbytes > MAX_CONTROL_NBYTES:
        raise RejectedError(f"{place}: {nbytes} bytes, expected at most {MAX_CONTROL_NBYTES}; is something else there?")


class RecordStore(Protocol):
    """One blob that changes only by compare-and-set. Used from any thread and by any number of processes at once.

    A store may answer *no* to a swap although nothing else changed the record (a retried request whose first reply was lost; a
    store that refuses while another conditional write is under way, HTTP 409). It must never answer *yes* unless the swap took
    effect, and never let two swaps from the same tag take effect.
    """

    @property
    def place(self) -> str:
        """Where the record is, for error texts."""
        ...

    def read(self) -> tuple[bytes | None, Tag]:
        """The bytes and their tag; ``(None, ABSENT)`` if there are none. Sees every swap that was answered before.

        Raises:
            RejectedError: the store refuses this client, or what is there is not a record (too large).
            TransportError: the store could not be reached; nothing was changed.
        """
        ...

    def swap(self, tag: Tag, new: bytes) -> bool:
        """Replace the bytes if the record's tag still is ``tag`` (``ABSENT``: create). Durable once True is returned.

        Returns:
            True: it took effect. False: it did not take effect by this request; read again.

        Raises:
            RejectedError: the store refuses this client, or cannot do conditional writes.
            SwapUncertainError: no reply was had.
        """
        ...
