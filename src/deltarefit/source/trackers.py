"""A rank's trackers, and the candidate that the present transition reads through them.

The first scan of a transition pins what it found. Every later scan, and the commit, must find the same: receivers may hold
parts of the candidate already, and a retry from another one would not undo them (paper 6.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from deltarefit.canonical import TensorDigest
from deltarefit.errors import OperatorRequiredError
from deltarefit.records import Encoding
from deltarefit.source.baseline import SourceBaseline, TaskTracker, candidate_digests, committed_digests, fill, overwrite
from deltarefit.source.buckets import cut_into_chunks
from deltarefit.source.settings import SourceSettings
from deltarefit.source.task import ConversionTask

__all__ = ["TrackerSet", "in_order", "moved", "sum_by_name"]

WorkT = TypeVar("WorkT")
ResultT = TypeVar("ResultT")
Chunk = tuple[TaskTracker, ...]


class TrackerSet:
    """Trackers of tasks, in chunks that one thread handles at a time."""

    def __init__(self, tasks: Sequence[ConversionTask], settings: SourceSettings) -> None:
        """Copy the present bits of the tasks as committed."""
        self._settings = settings
        self.baseline = SourceBaseline(tasks, settings.baseline_directory)
        sized = [(tracker, tracker.nbytes) for tracker in self.baseline.trackers if tracker.num_elements]
        self.chunks = cut_into_chunks(sized, settings.chunk_nbytes, total_nbytes=sum(nbytes for _, nbytes in sized))
        self._changes: dict[TaskTracker, TensorDigest] = {}
        """Digest change of the candidate by tracker, from its first scan in this transition until its commit."""
        self._verified: set[TaskTracker] = set()
        self._run(fill)

    @property
    def has_candidate(self) -> bool:
        """Whether anything was scanned in this transition."""
        return bool(self._changes)

    def over_chunks(self, work: Callable[[Chunk], ResultT]) -> Iterator[ResultT]:
        """The results of ``work``, in the order of the chunks, whichever thread was first."""
        return in_order(work, self.chunks, self._settings.num_threads)

    def pin(self, tracker: TaskTracker, change: TensorDigest) -> None:
        """Hold what a scan found against the first scan of this transition.

        Raises:
            OperatorRequiredError: they differ.
        """
        if self._changes.setdefault(tracker, change) != change:
            raise moved(tracker.task)

    def verify(self) -> None:
        """See that nothing changed, before anything is committed. Shards that passed are not read again after an interruption.

        Raises:
            OperatorRequiredError: the candidate is no longer what was scanned.
        """
        self._run(self._verify)

    def doubt(self) -> None:
        """Believe no earlier verification: the next one scans every shard."""
        self._verified.clear()

    def commit(self) -> None:
        """Copy the candidate over the committed words. May be repeated after an interruption."""
        self._run(self._commit)

    def forget(self) -> None:
        """The next scan may see another candidate."""
        self._changes.clear()
        self._verified.clear()

    def digests(self) -> dict[str, TensorDigest]:
        """Of the committed words, by tensor."""
        return sum_by_name((tracker.task.spec.name, tracker.digest) for tracker in self.baseline.trackers)

    def nans(self) -> dict[str, int]:
        """Tensors of which committed elements are NaN, and how many here."""
        found: dict[str, int] = {}
        for tracker in self.baseline.trackers:
            if tracker.num_nans:
                found[tracker.task.spec.name] = found.get(tracker.task.spec.name, 0) + tracker.num_nans
        return found

    def recount(self) -> dict[str, TensorDigest]:
        """``digests``, counted anew from the committed words."""

        def counted(chunk: Chunk) -> list[tuple[str, TensorDigest]]:
            return [(t.task.spec.name, digest) for t, digest in zip(chunk, committed_digests(chunk), strict=True)]

        empty = ((t.task.spec.name, TensorDigest()) for t in self.baseline.trackers if not t.task.num_elements)
        return sum_by_name((*empty, *(entry for listed in self.over_chunks(counted) for entry in listed)))

    def candidate_digests(self) -> dict[str, TensorDigest]:
        """Of the candidate as far as it was scanned, by tensor."""
        none = TensorDigest()
        return sum_by_name(
            (tracker.task.spec.name, tracker.digest + self._changes.get(tracker, none)) for tracker in self.baseline.trackers
        )

    def _verify(self, chunk: Chunk) -> None:
        """By digests, which takes one read of the candidate where another scan would read the committed words, too."""
        pending = [tracker for tracker in chunk if tracker in self._changes and tracker not in self._verified]
        for tracker, digest in zip(pending, candidate_digests(pending), strict=True):
            if digest != tracker.digest + self._changes[tracker]:
                raise self._wrong(tracker)
            self._verified.add(tracker)

    def _wrong(self, tracker: TaskTracker) -> OperatorRequiredError:
        """Either the candidate moved, or the committed words that the change was counted from had lost their digest."""
        if tracker.scan(Encoding.OVERWRITE).change != self._changes[tracker]:
            return moved(tracker.task)
        return OperatorRequiredError(
            f"tensor {tracker.task.spec.name} (task {tracker.task.key}): the committed words in this trainer's memory lost "
            "the digest that they were committed with, so what was sent is relative to wrong bits and not committed. End the "
            "transition with 'deltarefit abort', look for the cause (memory, another writer to the baseline), and make a new "
            "Publisher, which sends every element once"
        )

    def _commit(self, chunk: Chunk) -> None:
        pending = [tracker for tracker in chunk if tracker in self._changes]
        overwrite(pending)
        for tracker in pending:
            tracker.digest = tracker.digest + self._changes.pop(tracker)

    def _run(self, work: Callable[[Chunk], None]) -> None:
        for _ in self.over_chunks(work):
            pass


def moved(task: ConversionTask) -> OperatorRequiredError:
    """What to raise when a shard is not what this transition read before."""
    return OperatorRequiredError(
        f"tensor {task.spec.name} (task {task.key}) changed after this transition first read it: expected the candidate to "
        "stay as it is until its commit, because receivers may already hold parts of it. Wait for the refit before the next "
        "optimizer step; to go on, end the transition with 'deltarefit abort' and refit again, sending every element"
    )


def in_order(work: Callable[[WorkT], ResultT], jobs: Iterable[WorkT], num_threads: int) -> Iterator[ResultT]:
    """Results in the order of the jobs, made by so many threads, with at most twice as many jobs ahead of the consumer."""
    if num_threads == 1:
        yield from map(work, jobs)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="deltarefit-scan")
    waiting: deque[Future[ResultT]] = deque()
    try:
        for job in jobs:
            if len(waiting) == 2 * num_threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, job))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def sum_by_name(digests: Iterable[tuple[str, TensorDigest]]) -> dict[str, TensorDigest]:
    """Per tensor, the sum over its parts."""
    total: dict[str, TensorDigest] = {}
    for name, digest in digests:
        total[name] = total.get(name, TensorDigest()) + digest
    return total
