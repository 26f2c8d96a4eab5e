"""Payload room: bytes to items and back. ``FORMAT.md`` beside this file is normative.

Pure functions without I/O, clock or torch; may import the leaves, ``deltarefit.kernels``, numpy and zstandard. The decoder
is the border: past it, no byte of a payload is doubted again.
"""

from deltarefit.payload.decoder import Payload, decode
from deltarefit.payload.encoder import encode
from deltarefit.payload.header import PayloadHeader, read_header
from deltarefit.payload.layout import FORMAT_VERSION, Limits

__all__ = ["FORMAT_VERSION", "Limits", "Payload", "PayloadHeader", "decode", "encode", "read_header"]
