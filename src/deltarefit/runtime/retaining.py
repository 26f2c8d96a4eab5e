"""What a commit leaves in the store for receivers that come back: its payloads, and the policy's digests before and after.

The control record says which attempts these are (``protocol.chain``); the digests say which checkpoint a chain can start from,
tensor by tensor, because an engine may hold fewer tensors than the policy has. Design note 0009.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.control import ControlPlane
from deltarefit.errors import PayloadInvalidError
from deltarefit.ids import AttemptId
from deltarefit.protocol import ChainLink, Retention
from deltarefit.receiver import ReceiverSettings
from deltarefit.runtime.messages import EngineSummary, decode_message, encode_message
from deltarefit.runtime.refit_state import BoundAttempt, Outcome, Session
from deltarefit.transport import RunStore, keys

__all__ = ["is_linked", "is_retained", "note_digests", "read_digests", "retained_whole", "retention_of"]

_DIGEST_NBYTES = 16
_MOST_WHOLE_NBYTES = ReceiverSettings().keep_nbytes
"""Receivers keep no copies of more than that."""


class _PolicyDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both in the catalog's order, 16 bytes a tensor."""

    base: bytes
    target: bytes


def is_retained(session: Session, bound: BoundAttempt) -> bool:
    """Whether this attempt's payloads stay in the store if it is committed. Those that go by relay never are there."""
    return session.settings.retained_versions > 0 and not bound.relays and not bound.is_dense


def retention_of(session: Session, bound: BoundAttempt, outcome: Outcome) -> Retention | None:
    """What the commit request says about it."""
    if not is_retained(session, bound):
        return None
    return Retention(
        nbytes=outcome.payload_nbytes,
        max_links=session.settings.retained_versions,
        max_nbytes=session.settings.retained_nbytes or session.catalog.nbytes,
    )


def retained_whole(session: Session, summaries: Iterable[EngineSummary]) -> frozenset[str]:
    """Tensors to send whole each time, so that a chain can prove them: a newcomer cannot say what it holds of them."""
    names = frozenset(name for summary in summaries for name in summary.computed)
    is_small = sum(session.catalog[name].nbytes for name in names) <= _MOST_WHOLE_NBYTES
    return names if session.settings.retained_versions and is_small else frozenset()


def is_linked(control: ControlPlane, attempt: AttemptId) -> bool:
    """Whether the record retains that attempt."""
    state = control.read()
    return state is not None and any(link.attempt == attempt for link in state.links)


def note_digests(session: Session, bound: BoundAttempt, outcome: Outcome) -> None:
    """Write them while receivers apply: they are there before any commit can name the attempt. Raises TransportError."""
    if is_retained(session, bound):
        both = _PolicyDigests(_packed(session.committed), _packed(outcome.digests))
        session.store.put(keys.digests(bound.attempt), encode_message(both))


def read_digests(
    store: RunStore, link: ChainLink, catalog: Catalog
) -> tuple[Mapping[str, TensorDigest], Mapping[str, TensorDigest]]:
    """Digest of each tensor before and after a link, checked against what the record says of the whole policy.

    Raises:
        PayloadMissingError: the link is not retained any more.
        PayloadInvalidError: the object is not what the record says.
        TransportError: it cannot be read now, or is no such object.
    """
    key = keys.digests(link.attempt)

    def checked(data: bytes) -> tuple[Mapping[str, TensorDigest], Mapping[str, TensorDigest]]:
        both = decode_message(data, _PolicyDigests, sender=key)
        base, target = _unpacked(both.base, catalog, key), _unpacked(both.target, catalog, key)
        for digests, expected in ((base, link.base_digest), (target, link.target_digest)):
            if (got := digest_of_digests(digests)) != expected:
                raise PayloadInvalidError(f"{key}: its policy has digest {got}, the control record says {expected}")
        return base, target

    return store.get_as(key, checked, max_nbytes=2 * _DIGEST_NBYTES * len(catalog) + 64)


def _packed(digests: Mapping[str, TensorDigest]) -> bytes:
    return b"".join(bytes.fromhex(digests[name].hex()) for name in sorted(digests))


def _unpacked(data: bytes, catalog: Catalog, where: str) -> dict[str, TensorDigest]:
    if len(data) != _DIGEST_NBYTES * len(catalog):
        raise PayloadInvalidError(
            f"{where}: {len(data)} bytes of digests, expected {_DIGEST_NBYTES} for {len(catalog)} tensors"
        )
    starts = range(0, len(data), _DIGEST_NBYTES)
    return {
        name: TensorDigest.from_hex(data[start : start + _DIGEST_NBYTES].hex())
        for name, start in zip(catalog, starts, strict=True)
    }
