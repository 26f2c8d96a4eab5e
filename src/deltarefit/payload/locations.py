"""Proof that an item's locations are ascending, as many as its values and inside its tensor, without building positions.

Gaps are unsigned and each step adds one more, so positions ascend strictly whatever the bytes are. What is left to check is
how many there are and where the last one lies, and both are sums. Positions are built only for items of one tensor whose
spans interleave, where sums cannot show that no element is addressed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deltarefit.kernels import decode_positions, plane_totals
from deltarefit.payload.header import refuse
from deltarefit.records import CodedItem, LocationForm

__all__ = ["check_disjoint", "check_locations"]


def check_locations(item: CodedItem, *, where: object, what: str) -> None:
    """Check count and last position of one item.

    Raises:
        PayloadInvalidError: the location planes do not give exactly ``count`` positions, all below the tensor's end.
    """
    if item.location_form is LocationForm.RUN:
        return
    escape = item.location_form.escape
    totals = [plane_totals(plane, escape) for plane in item.location_planes]
    if escape:
        plane = item.location_planes[0]
        if totals[0].highest > escape:
            refuse(where, f"{what}: a gap byte of {totals[0].highest}, expected at most {escape}")
        if (found := plane.size - totals[0].escapes) != item.count:
            refuse(where, f"{what}: its gaps give {found} positions, expected {item.count}")
        if plane[-1] == escape:
            refuse(where, f"{what}: its gaps end in the middle of an escape")
    if any(plane[0] for plane in item.location_planes):
        refuse(where, f"{what}: its first gap is not 0, expected its first element at {item.start}")
    if (last := _last_of_gaps(item, [plane.sum for plane in totals])) >= item.spec.num_elements:
        refuse(where, f"{what}: its gaps lead to element {last}, the tensor has {item.spec.num_elements}")


def check_disjoint(items: Sequence[CodedItem], *, where: object) -> None:
    """Check that no element is addressed twice in one payload. Every item has passed ``check_locations``.

    Two entries for one element would contradict each other, or a difference would be added twice (paper A.3). Extra memory
    is needed for interleaving items alone: at most 16 bytes for each of their elements that is not part of a run.

    Raises:
        PayloadInvalidError: an element is addressed twice.
    """
    by_name: dict[str, list[CodedItem]] = {}
    for item in items:
        by_name.setdefault(item.spec.name, []).append(item)
    for name, same in by_name.items():
        if len({(item.spec.dtype, item.spec.shape) for item in same}) > 1:
            refuse(where, f"tensor {name}: its items differ in dtype or shape")
        if len(same) > 1:
            for cluster in _clusters(same):
                _check_cluster(cluster, where)


@dataclass(frozen=True, slots=True)
class _Span:
    first: int
    last: int
    """Inclusive."""
    item: CodedItem


def _clusters(items: Iterable[CodedItem]) -> Iterable[list[_Span]]:
    """Groups of items whose spans overlap; items that stand alone are left out."""
    spans = sorted((_Span(item.start, _last_position(item), item) for item in items), key=lambda span: span.first)
    cluster: list[_Span] = []
    end = -1
    for span in spans:
        if span.first > end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
        end = max(end, span.last)
    if len(cluster) > 1:
        yield cluster


def _check_cluster(cluster: Sequence[_Span], where: object) -> None:
    # A run is a span without holes: it is compared by its ends and never built, however long it is.
    runs = [span for span in cluster if span.item.location_form is LocationForm.RUN]
    for before, after in itertools.pairwise(runs):
        if after.first <= before.last:
            _refuse_twice(where, after.item, after.first)
    sparse = [span.item for span in cluster if span.item.location_form is not LocationForm.RUN]
    if not sparse:
        return
    positions = np.concatenate([decode_positions(item) for item in sparse])
    positions.sort()
    twice = np.flatnonzero(positions[1:] == positions[:-1])
    if twice.size:
        _refuse_twice(where, sparse[0], int(positions[twice[0]]))
    for run in runs:
        at = int(np.searchsorted(positions, run.first))
        if at < positions.size and positions[at] <= run.last:
            _refuse_twice(where, run.item, int(positions[at]))


def _refuse_twice(where: object, item: CodedItem, flat_index: int) -> None:
    refuse(where, f"tensor {item.spec.name}: element {flat_index} is addressed twice, expected at most once in a payload")


def _last_position(item: CodedItem) -> int:
    if item.location_form is LocationForm.RUN:
        return item.start + item.count - 1
    return _last_of_gaps(item, [plane_totals(plane, item.location_form.escape).sum for plane in item.location_planes])


def _last_of_gaps(item: CodedItem, byte_sums: Sequence[int]) -> int:
    """The first position, all gaps after it, and one more for every step. Python ints: nothing wraps."""
    return item.start + sum(byte_sum << (8 * number) for number, byte_sum in enumerate(byte_sums)) + item.count - 1
