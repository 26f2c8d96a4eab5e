"""The committed bits that owners compare with (paper 4.1).

One tracker per owned task: 1.0 times the owned bytes, in host memory or in a memory-mapped file, never on an accelerator.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import TensorDigest, Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView, merge_pieces, whole
from deltarefit.records import CodedItem, Encoding, LocationForm, ScanResult
from deltarefit.source.task import ConversionTask

__all__ = [
    "SourceBaseline",
    "TaskTracker",
    "TrackerScan",
    "allocate",
    "candidate_digests",
    "committed_digests",
    "count_changed",
    "fill",
    "overwrite",
    "scan_trackers",
]

_ALIGNMENT = 64  # a cache line, and the widest vector of the scan kernels


@dataclass(frozen=True, slots=True, eq=False)
class TrackerScan:
    """What a scan of one task found."""

    items: tuple[CodedItem, ...]
    """One per group of pieces that has something to send."""
    change: TensorDigest
    """What the candidate adds to the digest of the task."""
    num_changed: int
    """Elements whose bits differ."""


def count_changed(item: CodedItem, storage: Words, committed: Words, pieces: Sequence[Piece]) -> int:
    """Elements of a group that differ. The item says so, unless it was sent whole because most of it changed."""
    if item.location_form is not LocationForm.RUN or item.count < committed.size:
        return item.count
    return int(np.count_nonzero(kernels.gather(storage, pieces) != committed))


class TaskTracker:
    """The committed words of one task, group of pieces after group, each in piece order."""

    __slots__ = ("_tables", "_words", "digest", "groups", "nbytes", "num_elements", "num_nans", "task")

    def __init__(self, task: ConversionTask, groups: tuple[tuple[Piece, ...], ...], words: tuple[Words, ...]) -> None:
        self.task = task
        self.groups = groups
        self._words = words
        self.digest = TensorDigest()
        """Of the committed words."""
        self.num_nans = 0
        """Committed elements that are NaN."""
        self._tables = tuple(kernels.PieceTable(group) for group in groups)
        self.num_elements, self.nbytes = task.num_elements, task.nbytes
        """Of the task, which would count them anew."""

    @property
    def words(self) -> tuple[Words, ...]:
        """Committed words, one array per group of pieces. Not to be written to."""
        return self._words

    def scan(self, encoding: Encoding, *, everything: bool = False) -> TrackerScan:
        """Compare storage with the committed words: an item per group that changed, or per group if ``everything`` is sent."""
        if not everything:
            return scan_trackers([(self, encoding)])[0]
        storage = self.task.words()
        results = [
            kernels.scan(self.task.spec, storage, committed, table, encoding, everything=True)
            for table, committed in zip(self._tables, self._words, strict=True)
        ]
        return self._found(storage, results)

    def _found(self, storage: Words, results: Sequence[ScanResult]) -> TrackerScan:
        """What the scans of all groups found."""
        change = TensorDigest()
        num_changed = 0
        for pieces, committed, result in zip(self.groups, self._words, results, strict=True):
            change = change + result.digest_change
            if result.item is not None:
                num_changed += count_changed(result.item, storage, committed, pieces)
        return TrackerScan(tuple(result.item for result in results if result.item is not None), change, num_changed)


def scan_trackers(work: Sequence[tuple[TaskTracker, Encoding]]) -> list[TrackerScan]:
    """Compare the storages of trackers with their committed words, in few calls. All storages are held meanwhile."""
    storages = [tracker.task.words() for tracker, _ in work]
    jobs = [
        kernels.ScanJob(tracker.task.spec, storage, committed, table, encoding)
        for (tracker, encoding), storage in zip(work, storages, strict=True)
        for committed, table in zip(tracker._words, tracker._tables, strict=True)
    ]
    results = iter(kernels.scan_many(jobs))
    return [
        tracker._found(storage, [next(results) for _ in tracker.groups])
        for (tracker, _), storage in zip(work, storages, strict=True)
    ]


def fill(trackers: Sequence[TaskTracker]) -> None:
    """Take storages as they are now for committed."""
    overwrite(trackers)
    for tracker, digest in zip(trackers, committed_digests(trackers), strict=True):
        tracker.digest = digest


def overwrite(trackers: Sequence[TaskTracker]) -> None:
    """Copy storages over committed words: absolute, so it may be repeated. The digests are the caller's to update."""
    work = [
        (tracker, (committed, storage, table, tracker.task.spec.dtype))
        for tracker in trackers
        for storage in (tracker.task.words(),)
        for committed, table in zip(tracker._words, tracker._tables, strict=True)
    ]
    counted = kernels.commit_many([one for _, one in work])
    for tracker in trackers:
        tracker.num_nans = 0
    for (tracker, _), count in zip(work, counted, strict=True):
        tracker.num_nans += count


def candidate_digests(trackers: Sequence[TaskTracker]) -> list[TensorDigest]:
    """Of the storages as they are now, one per tracker."""
    return _sums(
        [kernels.BoundDigest(storage, table) for table in tracker._tables]
        for tracker in trackers
        for storage in (tracker.task.words(),)
    )


def committed_digests(trackers: Sequence[TaskTracker]) -> list[TensorDigest]:
    """Of the committed words, counted anew, one per tracker."""
    return _sums(
        [
            kernels.BoundDigest(committed, _one_after_another(pieces))
            for pieces, committed in zip(tracker.groups, tracker._words, strict=True)
        ]
        for tracker in trackers
    )


def _sums(groups: Iterable[Sequence[kernels.BoundDigest]]) -> list[TensorDigest]:
    """The digest of each group of bound pieces together."""
    bound = list(groups)
    found = iter(kernels.digest_many([one for group in bound for one in group], num_threads=1))
    digests = [[next(found) for _ in group] for group in bound]
    # Only widened elements have none.
    return [sum((digest for digest in group if digest is not None), TensorDigest()) for group in digests]


def _one_after_another(pieces: Sequence[Piece]) -> list[Piece]:
    """The same canonical views against words in piece order."""
    moved: list[Piece] = []
    start = 0
    for piece in pieces:
        view = whole(piece.canonical.shape)
        moved.append(Piece(piece.canonical, StridedView(start, view.shape, view.stride)))
        start += piece.num_elements
    return moved


class SourceBaseline:
    """The trackers of one owner, in one allocation."""

    def __init__(self, tasks: Sequence[ConversionTask], directory: Path | None = None) -> None:
        """Allocate; the words are undefined until ``fill``.

        Raises:
            RejectedError: the file system at ``directory`` has no room, or a task's pieces cannot be coded.
        """
        groups = [merge_pieces(piece for piece in task.pieces if piece.num_elements) for task in tasks]
        layout: list[tuple[int, int]] = []
        nbytes = 0
        for task, task_groups in zip(tasks, groups, strict=True):
            for group in task_groups:
                group_nbytes = sum(piece.num_elements for piece in group) * task.spec.element_nbytes
                layout.append((nbytes, group_nbytes))
                nbytes += -(-group_nbytes // _ALIGNMENT) * _ALIGNMENT
        self._arena = allocate(nbytes, directory)
        places = iter(layout)
        self.trackers = tuple(
            TaskTracker(task, task_groups, tuple(self._place(next(places), task) for _ in task_groups))
            for task, task_groups in zip(tasks, groups, strict=True)
        )

    def _place(self, place: tuple[int, int], task: ConversionTask) -> Words:
        byte_offset, nbytes = place
        return self._arena[byte_offset : byte_offset + nbytes].view(task.spec.word_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held, alignment included."""
        return self._arena.nbytes


def allocate(nbytes: int, directory: Path | None) -> NDArray[np.uint8]:
    """Uninitialised host memory, or a mapping of a nameless file in ``directory``.

    Raises:
        RejectedError: the file system has no room.
    """
    if directory is None or nbytes == 0:
        return np.empty(nbytes, np.uint8)
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="deltarefit-baseline-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a hole in the file would become SIGBUS when the disk is full
            return np.memmap(file, np.uint8, "r+", shape=(nbytes,))
    except OSError as error:
        raise RejectedError(
            f"baseline of {nbytes} bytes in {directory}: {error}; name a directory with that much room"
        ) from error
