"""What relays say to each other: small messages and frames of payload bytes, on one stream.

Every frame is ``magic(2) kind(1) version(1) nbytes(4)``, little-endian, then ``nbytes`` of body. A body of kind MESSAGE is one
msgspec struct in MessagePack; of kind DATA it is ``number(4) byte_offset(8)`` and payload bytes. No body is longer than 1 MiB
and 12 bytes: every message library measured got slower with larger ones, and a frame is the unit
of cut-through.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec

from deltarefit.errors import TransportError
from deltarefit.transport.base import MAX_PAYLOAD_NBYTES

__all__ = [
    "DATA",
    "DATA_HEAD",
    "FRAME_NBYTES",
    "HEADER",
    "MAX_BODY_NBYTES",
    "MESSAGE",
    "PROTOCOL_VERSION",
    "Alive",
    "Call",
    "Done",
    "Failed",
    "Have",
    "Hello",
    "Message",
    "Offer",
    "Peer",
    "Proof",
    "Reply",
    "Route",
    "Welcome",
    "body_nbytes",
    "decode",
    "encode",
    "write_data_head",
]

PROTOCOL_VERSION = 1
MAGIC = b"dr"
MESSAGE = 1
DATA = 2
HEADER = struct.Struct("<2sBBI")
DATA_HEAD = struct.Struct("<IQ")
FRAME_NBYTES = 1 << 20
"""Most payload bytes in one frame."""
MAX_BODY_NBYTES = FRAME_NBYTES + DATA_HEAD.size

_Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_NBYTES)]
_Secret = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class _Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Peer(_Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A relay and where it listens."""

    name: _Name
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"relay {self.name} at {self.host}:{self.port}"


_Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=4096)]


class Hello(_Struct, frozen=True, array_like=True, tag=1):
    """First words of whoever connects."""

    run: Annotated[str, msgspec.Meta(max_length=1024)]
    name: _Name
    nonce: _Secret


class Welcome(_Struct, frozen=True, array_like=True, tag=2):
    """The listener's answer; the proof shows that it knows the run's key."""

    name: _Name
    nonce: _Secret
    proof: _Secret


class Proof(_Struct, frozen=True, array_like=True, tag=3):
    """The caller's proof that it knows the run's key."""

    proof: _Secret


class Route(_Struct, frozen=True, array_like=True, tag=4):
    """Who is below the receiver of this message, for one owner's payloads of one attempt. Replaces an earlier route."""

    attempt: _Name
    owner: _Ordinal
    peers: _Peers
    fan_out: Annotated[int, msgspec.Meta(ge=1, le=64)]


class Offer(_Struct, frozen=True, array_like=True, tag=5):
    """A payload that the sender of this message has or is getting; ``number`` stands for it on this connection."""

    number: _Number
    attempt: _Name
    owner: _Ordinal
    sequence: _Ordinal
    nbytes: _Nbytes


class Have(_Struct, frozen=True, array_like=True, tag=6):
    """There is room for an offered payload; its first ``received`` bytes are here already: go on from there."""

    number: _Number
    received: _Nbytes


class Done(_Struct, frozen=True, array_like=True, tag=7):
    """An offered payload is whole here and at every relay below that can be reached."""

    number: _Number


class Failed(_Struct, frozen=True, array_like=True, tag=8):
    """An offered payload will not be taken."""

    number: _Number
    text: Annotated[str, msgspec.Meta(max_length=2000)]


class Alive(_Struct, frozen=True, array_like=True, tag=9):
    """Said when there is nothing else to say, so that silence means trouble."""


class Call(_Struct, frozen=True, array_like=True, tag=10):
    """Do it here and at every relay below, then reply."""

    verb: Annotated[str, msgspec.Meta(pattern="^(stop|cleanup)$")]
    attempt: _Name
    owner: _Ordinal
    """Whose sends to stop; ``cleanup`` concerns all owners."""
    peers: _Peers
    fan_out: Annotated[int, msgspec.Meta(ge=1, le=64)]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Reply(_Struct, frozen=True, array_like=True, tag=11):
    """Where a call was carried out, and which relays could not be reached."""

    reached: _Number
    lost: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=4096)]


Message: TypeAlias = Hello | Welcome | Proof | Route | Offer | Have | Done | Failed | Alive | Call | Reply

_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """One whole frame."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_BODY_NBYTES:
        raise TransportError(f"{type(message).__name__} of {len(body)} bytes: expected at most {MAX_BODY_NBYTES}")
    return HEADER.pack(MAGIC, MESSAGE, PROTOCOL_VERSION, len(body)) + body


def decode(body: bytes | memoryview) -> Message:
    """Read a MESSAGE body.

    Raises:
        TransportError: it is none.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise TransportError(f"a relay's message cannot be read: {error}") from error


def body_nbytes(header: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Kind and length of the body that follows this header.

    Raises:
        TransportError: it is not a header of this protocol, or claims too much.
    """
    magic, kind, version, nbytes = HEADER.unpack(header)
    if magic != MAGIC or kind not in (MESSAGE, DATA):
        raise TransportError(f"expected a relay's frame, got {bytes(header)!r}: does something else use this port?")
    if version != PROTOCOL_VERSION:
        raise TransportError(
            f"expected relay protocol {PROTOCOL_VERSION}, got {version}: install the same deltarefit everywhere"
        )
    if nbytes > MAX_BODY_NBYTES or (kind == DATA and nbytes < DATA_HEAD.size):
        raise TransportError(f"a frame of {nbytes} bytes: expected at most {MAX_BODY_NBYTES}")
    return kind, nbytes


def write_data_head(into: bytearray, number: int, byte_offset: int, nbytes: int) -> int:
    """Put the head of a DATA frame with ``nbytes`` payload bytes at the start of a buffer; returns the head's length."""
    HEADER.pack_into(into, 0, MAGIC, DATA, PROTOCOL_VERSION, DATA_HEAD.size + nbytes)
    DATA_HEAD.pack_into(into, HEADER.size, number, byte_offset)
    return HEADER.size + DATA_HEAD.size
