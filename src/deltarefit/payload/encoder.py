"""Coded columns to one payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.kernels import has_fitting_columns
from deltarefit.payload.frames import pack_plane, pack_table_frame
from deltarefit.payload.header import PayloadHeader, digest_parts, pack_header
from deltarefit.payload.layout import (
    DEFAULT_LIMITS,
    DIGEST_NBYTES,
    HEADER,
    PLANE,
    Limits,
    PlaneKey,
    location_keys,
    value_keys,
)
from deltarefit.payload.table import max_table_nbytes, pack_table
from deltarefit.records import CodedItem
from deltarefit.run_key import check_key

__all__ = ["encode"]

_Parts = dict[PlaneKey, list[NDArray[np.uint8]]]


def encode(
    items: Sequence[CodedItem],
    *,
    attempt: AttemptId,
    owner: OwnerId,
    sequence: int,
    base_version: PolicyVersion,
    target_version: PolicyVersion,
    plan_digest: str,
    key: bytes | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """One bucket as one payload (``FORMAT.md``). The items keep their order. Safe to call from several threads at once.

    The same arguments give the same bytes, as long as the zstd library is the same; any build decodes any of them. Beside
    the result this needs the compressed planes once more and the largest plane of several items joined.

    Args:
        items: at least one; an attempt without changes sends no payload.
        plan_digest: 32 hex digits, ``RefitPlan.digest``.
        key: the run's key, 16 to 64 bytes, if it has one.
        limits: those of the receivers.

    Raises:
        RejectedError: there are no items, an item's columns do not fit together, a header field does not fit, or a limit
            would be exceeded. Positions are not looked at here: the kernels made them, and every decoder checks them.
    """
    check_key(key)
    if not items:
        raise RejectedError("payload without items: an attempt that changes nothing sends no payload")
    for number, item in enumerate(items):
        _check_columns(number, item)
    planes = _collect(items)
    _check_limits(items, planes, limits)
    table = pack_table(items)
    if len(table) > max_table_nbytes(len(items), limits):
        raise RejectedError(f"payload: an item table of {len(table)} bytes; put fewer items into a bucket")
    table_frame = pack_table_frame(table)
    rows, frames = _pack_planes(planes)
    header = PayloadHeader(
        attempt=attempt,
        owner=owner,
        sequence=sequence,
        base_version=base_version,
        target_version=target_version,
        plan_digest=plan_digest,
        num_items=len(items),
        num_changed=sum(item.count for item in items),
        num_planes=len(frames),
        table_nbytes=len(table),
        table_frame_nbytes=len(table_frame),
        payload_nbytes=HEADER.size + len(rows) + len(table_frame) + sum(map(len, frames)),
        is_keyed=key is not None,
        digest="00" * DIGEST_NBYTES,
    )
    if header.payload_nbytes > limits.payload_nbytes:
        raise RejectedError(
            f"payload {header.payload_id}: {header.payload_nbytes} bytes, at most {limits.payload_nbytes} are allowed "
            "(Limits.payload_nbytes); put fewer items into a bucket or raise the limit on both sides"
        )
    body = (rows, table_frame, *frames)
    digest = digest_parts((pack_header(header), *body), key)
    return b"".join((pack_header(replace(header, digest=digest.hex())), *body))


def _check_columns(number: int, item: CodedItem) -> None:
    """An item that fails here would make a payload that no decoder takes."""
    if not has_fitting_columns(item):
        raise RejectedError(
            f"item {number} ({item.spec}): {item.count} elements as {item.encoding.name} at {item.location_form.name} from "
            f"{item.start}, with location planes of {[plane.size for plane in item.location_planes]} bytes and value planes of "
            f"{[plane.size for plane in item.value_planes]}; expected one value plane a byte of the element, one location "
            f"plane a byte of the gap ({item.location_form.width}), flat uint8, each of {item.count} bytes "
            "(GAPS and SHORT_GAPS: or more), and elements inside the tensor"
        )


def _collect(items: Sequence[CodedItem]) -> _Parts:
    """What each plane is made of, in item order, by ascending plane key."""
    planes: _Parts = {}
    for item in items:
        for plane_key, plane in zip(location_keys(item.location_form), item.location_planes, strict=True):
            planes.setdefault(plane_key, []).append(plane)
        for plane_key, plane in zip(value_keys(item.encoding, item.spec.element_nbytes), item.value_planes, strict=True):
            planes.setdefault(plane_key, []).append(plane)
    return dict(sorted(planes.items()))


def _check_limits(items: Sequence[CodedItem], planes: _Parts, limits: Limits) -> None:
    for field, found in (
        ("items", len(items)),
        ("name_nbytes", sum(len(item.spec.name.encode()) for item in items)),
        ("decompressed_nbytes", sum(part.size for parts in planes.values() for part in parts)),
    ):
        if found > (allowed := getattr(limits, field)):
            raise RejectedError(
                f"payload: {found} for {field}, at most {allowed} are allowed (Limits.{field}); put fewer items into a "
                "bucket or raise the limit on both sides"
            )


def _pack_planes(planes: _Parts) -> tuple[bytes, list[bytes]]:
    """The plane table, and the frames in its order."""
    rows = []
    frames = []
    for plane_key, parts in planes.items():
        # A copy, but a twentieth of the time that zstd then takes; feeding parts to a stream copies just as much inside it.
        plane = np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
        frame = pack_plane(plane)
        rows.append(PLANE.pack(*plane_key, 0, plane.size, len(frame)))
        frames.append(frame)
    return b"".join(rows), frames
