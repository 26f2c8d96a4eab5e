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

from deltarefit.canonical import TensorSpec
from deltarefit.kernels import ItemTable, decode_positions, plane_totals
from deltarefit.payload.header import refuse
from deltarefit.records import CodedItem, LocationForm

__all__ = ["check_disjoint", "check_items", "check_locations"]


def check_items(items: ItemTable, *, where: object) -> None:
    """Check every item's locations, and that no element is addressed twice.

    Raises:
        PayloadInvalidError: an item's location planes do not give exactly ``count`` positions below its tensor's end, or two
            items have an element in common.
    """
    last = items.last_positions()
    for row in np.flatnonzero(last < 0).tolist():
        last[row] = check_locations(items[row], where=where, what=f"item {row} ({items.rows.specs[row].name[:200]})")
    check_disjoint(items.rows.specs, items, last.tolist(), where=where)


def check_locations(item: CodedItem, *, where: object, what: str) -> int:
    """Check count and last position of one item, and return that: the plain twin of ``ItemTable.last_positions``.

    Raises:
        PayloadInvalidError: the location planes do not give exactly ``count`` positions, all below the tensor's end.
    """
    if item.location_form is LocationForm.RUN:
        return item.start + item.count - 1
    escape = item.location_form.escape
    if escape:
        plane = item.location_planes[0]
        totals = plane_totals(plane, escape)
        sums = [totals.sum]
        if totals.highest > escape:
            refuse(where, f"{what}: a gap byte of {totals.highest}, expected at most {escape}")
        if (found := plane.size - totals.escapes) != item.count:
            refuse(where, f"{what}: its gaps give {found} positions, expected {item.count}")
        if plane[-1] == escape:
            refuse(where, f"{what}: its gaps end in the middle of an escape")
    else:
        sums = [int(plane.sum(dtype=np.uint64)) for plane in item.location_planes]
    if any(plane[0] for plane in item.location_planes):
        refuse(where, f"{what}: its first gap is not 0, expected its first element at {item.start}")
    # The first position, all gaps after it, and one more for every step. Python ints: nothing wraps.
    last = item.start + sum(byte_sum << (8 * number) for number, byte_sum in enumerate(sums)) + item.count - 1
    if last >= item.spec.num_elements:
        refuse(where, f"{what}: its gaps lead to element {last}, the tensor has {item.spec.num_elements}")
    return last


def check_disjoint(specs: Sequence[TensorSpec], items: Sequence[CodedItem], last: Sequence[int], *, where: object) -> None:
    """Check that no element is addressed twice in one payload. Item ``n`` is of ``specs[n]`` and ends at ``last[n]``.

    Two entries for one element would contradict each other, or a difference would be added twice (paper A.3). Extra memory
    is needed for interleaving items alone: at most 16 bytes for each of their elements that is not part of a run.

    Raises:
        PayloadInvalidError: an element is addressed twice.
    """
    if len({spec.name for spec in specs}) == len(specs):
        return
    by_name: dict[str, list[int]] = {}
    for row, spec in enumerate(specs):
        by_name.setdefault(spec.name, []).append(row)
    for name, rows in by_name.items():
        if len({(specs[row].dtype, specs[row].shape) for row in rows}) > 1:
            refuse(where, f"tensor {name}: its items differ in dtype or shape")
        if len(rows) > 1:
            spans = [_Span(item.start, last[row], item) for row in rows for item in (items[row],)]
            for cluster in _clusters(spans):
                _check_cluster(cluster, where)


@dataclass(frozen=True, slots=True)
class _Span:
    first: int
    last: int
    """Inclusive."""
    item: CodedItem


def _clusters(spans: Iterable[_Span]) -> Iterable[list[_Span]]:
    """Groups of items whose spans overlap; items that stand alone are left out."""
    cluster: list[_Span] = []
    end = -1
    for span in sorted(spans, key=lambda span: span.first):
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
