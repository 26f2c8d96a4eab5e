"""One training rank's side of a refit: finds what changed in the shards it owns (paper 4, Algorithm B.1, owners)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.canonical import TensorDigest
from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.ids import OwnerId
from deltarefit.plan import RefitPlan
from deltarefit.records import Bucket, CodedItem, Encoding, EncodingMode
from deltarefit.source.baseline import SourceBaseline, TaskTracker
from deltarefit.source.buckets import cut_into_buckets, cut_into_chunks
from deltarefit.source.settings import SourceSettings
from deltarefit.source.task import ConversionTask

__all__ = ["BuildStats", "Owner"]

WorkT = TypeVar("WorkT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class BuildStats:
    """What one build found."""

    num_owned: int = 0
    """Elements compared: every one this rank owns."""
    num_changed: int = 0
    """Elements whose bits differ from the committed ones (paper D: N_chg)."""
    num_emitted: int = 0
    """Elements in items: ``num_changed``, and the unchanged elements of dense tensors."""
    scanned_nbytes: int = 0
    num_items: int = 0
    num_buckets: int = 0


@dataclass(frozen=True, slots=True)
class _Scanned:
    """One tracker's scan."""

    tracker: TaskTracker
    items: tuple[CodedItem, ...]
    change: TensorDigest
    num_changed: int


class Owner:
    """Compares, packs and commits what one training rank owns.

    Calls come from one thread at a time: ``build`` once per attempt, ``commit`` after the joint commit, then the next
    transition. The candidate, which is whatever the parameters hold, may not change from the first build of a transition to
    its commit.
    """

    def __init__(self, owner: OwnerId, tasks: Sequence[ConversionTask], settings: SourceSettings | None = None) -> None:
        """Copy the present bits of ``tasks``, the owned ones in the order to send, as the committed baseline.

        Raises:
            RejectedError: a task cannot be read or coded, or there is no room for the baseline.
        """
        self.owner = owner
        self.settings = settings or SourceSettings()
        self.baseline = SourceBaseline(tasks, self.settings.baseline_directory)
        sized = [(tracker, tracker.task.nbytes) for tracker in self.baseline.trackers if tracker.task.num_elements]
        self._chunks = cut_into_chunks(sized, self.settings.chunk_nbytes)
        self._changes: dict[TaskTracker, TensorDigest] = {}
        """Digest change of the candidate by tracker, from the first scan in this transition until its commit."""
        self._verified: set[TaskTracker] = set()
        self._complete = False
        self._stats = BuildStats()
        self._on_chunks(self._fill)

    @property
    def stats(self) -> BuildStats:
        """Of the latest complete build."""
        return self._stats

    @property
    def changed_elements(self) -> int:
        """Elements whose bits differ from the committed ones, as the latest complete build found them."""
        return self._stats.num_changed

    def build(self, plan: RefitPlan, mode: EncodingMode) -> Iterator[Bucket]:
        """Compare everything owned with the baseline and yield the changes, in the same buckets at every attempt.

        Raises:
            RejectedError: the plan does not list an owned tensor as this owner knows it.
            OperatorRequiredError: the candidate is not the one that an earlier attempt of this transition read.
        """
        self._check_plan(plan)
        totals = _Totals()
        for bucket in cut_into_buckets(self._scanned_chunks(plan, mode, totals), self.settings.bucket_nbytes):
            totals.num_buckets += 1
            yield bucket
        self._complete = True
        self._stats = totals.stats()

    def commit(self) -> None:
        """Make the candidate the baseline, in place. Absolute and safe to repeat, after an interruption too.

        Without a build since the last commit there is nothing to do.

        Raises:
            RejectedError: the build did not run to its end.
            OperatorRequiredError: the candidate changed after it was built; the committed policy's bits are lost here.
        """
        if not self._changes:
            return
        if not self._complete:
            raise RejectedError("commit before the build ended: expected every bucket of an attempt to be taken first")
        if self.settings.verify_candidate:
            self._on_chunks(self._verify)
        self._on_chunks(self._overwrite)
        self.forget_candidate()

    def forget_candidate(self) -> None:
        """The transition ended without a commit (or after it): the next build may see another candidate."""
        self._changes.clear()
        self._verified.clear()
        self._complete = False

    def digests(self) -> dict[str, TensorDigest]:
        """Of the committed baseline: this owner's part of every tensor that it owns a part of."""
        return _sum_by_name((tracker, tracker.digest) for tracker in self.baseline.trackers)

    def candidate_digests(self) -> dict[str, TensorDigest]:
        """Of the candidate: what ``digests`` will say once it is committed. After a commit, the same as ``digests``.

        Raises:
            RejectedError: a build is under way or broke off.
        """
        if self._changes and not self._complete:
            raise RejectedError("candidate digests before the build ended: expected every bucket to be taken first")
        none = TensorDigest()
        return _sum_by_name((tracker, tracker.digest + self._changes.get(tracker, none)) for tracker in self.baseline.trackers)

    def _check_plan(self, plan: RefitPlan) -> None:
        for tracker in self.baseline.trackers:
            spec = tracker.task.spec
            if plan.catalog.get(spec.name) != spec:
                raise RejectedError(
                    f"owner {self.owner}: the plan lists {plan.catalog.get(spec.name)}, this owner holds {spec}; "
                    "expected the plan to be made from the trainer's catalog"
                )

    def _scanned_chunks(
        self, plan: RefitPlan, mode: EncodingMode, totals: _Totals
    ) -> Iterator[tuple[tuple[CodedItem, ...], int]]:
        def scan(chunk: tuple[TaskTracker, ...]) -> list[_Scanned]:
            return [_scan(tracker, plan, mode) for tracker in chunk]

        for scanned in _in_order(scan, self._chunks, self.settings.num_threads):
            for one in scanned:
                self._remember(one)
                totals.add(one)
            yield (
                tuple(item for one in scanned for item in one.items),
                sum(one.tracker.task.nbytes for one in scanned),
            )

    def _remember(self, scanned: _Scanned) -> None:
        known = self._changes.setdefault(scanned.tracker, scanned.change)
        if known != scanned.change:
            raise OperatorRequiredError(self._moved(scanned.tracker))

    def _moved(self, tracker: TaskTracker) -> str:
        return (
            f"tensor {tracker.task.spec.name} (task {tracker.task.key}, owner {self.owner}) changed after this transition "
            "first read it: expected the candidate to stay as it is until its commit, because receivers may already hold parts "
            "of it. Wait for the refit before the next optimizer step; to go on, end the transition with 'deltarefit abort' "
            "and refit again, sending every element"
        )

    def _fill(self, chunk: tuple[TaskTracker, ...]) -> None:
        for tracker in chunk:
            tracker.fill()

    def _verify(self, chunk: tuple[TaskTracker, ...]) -> None:
        for tracker in chunk:
            if tracker in self._changes and tracker not in self._verified:
                if tracker.scan(Encoding.OVERWRITE)[1] != self._changes[tracker]:
                    raise OperatorRequiredError(self._moved(tracker))
                self._verified.add(tracker)

    def _overwrite(self, chunk: tuple[TaskTracker, ...]) -> None:
        for tracker in chunk:
            if tracker in self._changes:
                tracker.overwrite()
                tracker.digest = tracker.digest + self._changes.pop(tracker)

    def _on_chunks(self, work: Callable[[tuple[TaskTracker, ...]], None]) -> None:
        for _ in _in_order(work, self._chunks, self.settings.num_threads):
            pass


class _Totals:
    """Sums over one build."""

    def __init__(self) -> None:
        self.num_owned = self.num_changed = self.num_emitted = self.scanned_nbytes = self.num_items = self.num_buckets = 0

    def add(self, scanned: _Scanned) -> None:
        self.num_owned += scanned.tracker.task.num_elements
        self.num_changed += scanned.num_changed
        self.num_emitted += sum(item.count for item in scanned.items)
        self.scanned_nbytes += scanned.tracker.task.nbytes
        self.num_items += len(scanned.items)

    def stats(self) -> BuildStats:
        return BuildStats(
            self.num_owned, self.num_changed, self.num_emitted, self.scanned_nbytes, self.num_items, self.num_buckets
        )


def _scan(tracker: TaskTracker, plan: RefitPlan, mode: EncodingMode) -> _Scanned:
    name = tracker.task.spec.name
    encoding = plan.encoding(name, mode)
    items, change = tracker.scan(encoding)
    num_changed = sum(item.count for item in items)
    if name in plan.dense:
        items, _ = tracker.scan(encoding, everything=True)
    return _Scanned(tracker, items, change, num_changed)


def _in_order(work: Callable[[WorkT], ResultT], jobs: Iterable[WorkT], num_threads: int) -> Iterator[ResultT]:
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


def _sum_by_name(digests: Iterable[tuple[TaskTracker, TensorDigest]]) -> dict[str, TensorDigest]:
    total: dict[str, TensorDigest] = {}
    for tracker, digest in digests:
        name = tracker.task.spec.name
        total[name] = total.get(name, TensorDigest()) + digest
    return total
