"""Zstandard frames: written with parameters that suit byte planes, read only if they are exactly what was announced."""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from deltarefit.payload.header import refuse

__all__ = [
    "MAX_FRAME_RATIO",
    "MAX_WINDOW_NBYTES",
    "PLANE_PARAMETERS",
    "TABLE_LEVEL",
    "could_hold",
    "open_frame",
    "pack_plane",
    "pack_table_frame",
]

PLANE_PARAMETERS = {
    "compression_level": 1,
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}
"""Match search all but off, so that a frame is mostly Huffman-coded literals: a byte plane has no matches worth having.
Differences shrink 5 % more than under plain level 1 and code twice as fast (measured)."""
TABLE_LEVEL = 3
"""Item tables are names and small numbers: text, and short."""
MAX_WINDOW_NBYTES = 2**23
"""The window that RFC 8878 recommends every decoder to support; frames that need more are refused."""
MAX_FRAME_RATIO = 2**17 // 4
"""A zstd block makes at most 128 KiB and takes at least 4 bytes (RFC 8878, 3.1.1.2): no frame can hold more than this many
times its own bytes. Planes of one repeated byte do reach it, so a tighter bound would refuse honest payloads."""

_MAGIC = b"\x28\xb5\x2f\xfd"


class _Contexts(threading.local):
    """One set per thread: a zstd context serves one caller at a time, and making one costs more than coding a small plane."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(write_content_size=True, write_checksum=False, **PLANE_PARAMETERS)
        self.plane_writer = zstandard.ZstdCompressor(compression_params=parameters)
        self.table_writer = zstandard.ZstdCompressor(level=TABLE_LEVEL, write_content_size=True)
        self.reader = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack_plane(plane: NDArray[np.uint8]) -> bytes:
    """One frame for one plane. Same bytes in, same bytes out, with the same zstd library."""
    frame: bytes = _contexts.plane_writer.compress(plane.data)
    return frame


def pack_table_frame(table: bytes) -> bytes:
    """One frame for the item table."""
    frame: bytes = _contexts.table_writer.compress(table)
    return frame


def could_hold(frame_nbytes: int, nbytes: int) -> bool:
    """Whether a frame of that many bytes can hold so much at all; asked before anything is allocated."""
    return nbytes <= frame_nbytes * MAX_FRAME_RATIO


def open_frame(frame: memoryview, nbytes: int, *, where: object, what: str) -> bytes:
    """Decompress one frame that must hold exactly ``nbytes`` bytes and end where ``frame`` ends.

    Allocates ``nbytes`` and no more, and that only after the frame's own header has agreed, if it states a size: streaming
    encoders do not know it, and their frames are decompressed under that limit.

    Raises:
        PayloadInvalidError: any of that does not hold, or the frame is corrupt.
    """
    if frame[:4] != _MAGIC:
        refuse(where, f"{what}: starts with {bytes(frame[:4]).hex()}, expected a zstd frame ({_MAGIC.hex()})")
    try:
        stated = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        refuse(where, f"{what}: no valid zstd frame header ({error})")
    if stated.content_size not in (nbytes, zstandard.CONTENTSIZE_UNKNOWN):
        refuse(where, f"{what}: its zstd frame states {stated.content_size} bytes, expected {nbytes}")
    if stated.dict_id:
        refuse(where, f"{what}: its zstd frame needs dictionary {stated.dict_id}, expected none")
    # A single-segment frame has no window of its own: it needs its content, which is bounded already.
    if stated.window_size > max(MAX_WINDOW_NBYTES, nbytes):
        refuse(
            where,
            f"{what}: its zstd frame needs a window of {stated.window_size} bytes, at most {MAX_WINDOW_NBYTES} are allowed",
        )
    if not could_hold(frame.nbytes, nbytes):
        refuse(where, f"{what}: {frame.nbytes} bytes of zstd cannot hold {nbytes}")
    try:
        # The binding takes 0 for "no limit given".
        content: bytes = _contexts.reader.decompress(frame, max_output_size=max(1, nbytes), allow_extra_data=False)
    except zstandard.ZstdError as error:
        refuse(where, f"{what}: its zstd frame is corrupt or does not end where it should ({error})")
    if len(content) != nbytes:
        refuse(where, f"{what}: {len(content)} bytes decompressed, expected {nbytes}")
    return content
