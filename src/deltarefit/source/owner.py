"""One training rank's side of a refit: finds what changed in the shards it owns (paper 4, Algorithm B.1, owners)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deltarefit.canonical import TensorDigest
from deltarefit.errors import RejectedError
from deltarefit.ids import EncodingMode, OwnerId
from deltarefit.plan import RefitPlan
from deltarefit.records import Bucket, CodedItem
from deltarefit.source.baseline import SourceBaseline, TaskTracker, scan_trackers
from deltarefit.source.buckets import cut_into_buckets
from deltarefit.source.residual import ResidualStage
from deltarefit.source.settings import SourceSettings
from deltarefit.source.task import ConversionTask
from deltarefit.source.trackers import TrackerSet, sum_by_name

__all__ = ["BuildStats", "Owner"]


@dataclass(frozen=True, slots=True)
class BuildStats:
    """What one build found."""

    num_owned: int = 0
    """Canonical elements compared: every one this rank owns, and of the residual tensors those that had to be converted."""
    num_changed: int = 0
    """Of these, elements whose bits differ from the committed ones (paper D: N_chg)."""
    num_emitted: int = 0
    """Elements in items: ``num_changed``, and the unchanged elements of dense tensors."""
    scanned_nbytes: int = 0
    num_items: int = 0
    num_buckets: int = 0
    num_converted: int = 0
    """Residual tensors that this rank assembled."""


@dataclass(frozen=True, slots=True)
class _Scanned:
    """What one tracker or residual tensor gave."""

    items: tuple[CodedItem, ...]
    num_changed: int
    num_elements: int
    nbytes: int


class Owner:
    """Compares, packs and commits what one training rank owns.

    Calls come from one thread at a time: ``build`` once per attempt, ``commit`` after the joint commit, then the next
    transition. The candidate, which is whatever the parameters hold, may not change from the first build of a transition to
    its commit. With a residual stage, all training ranks build and commit together.
    """

    def __init__(
        self,
        owner: OwnerId,
        tasks: Sequence[ConversionTask],
        settings: SourceSettings | None = None,
        residual: ResidualStage | None = None,
    ) -> None:
        """Copy the present bits of ``tasks``, the owned ones in the order to send, as the committed baseline.

        Raises:
            RejectedError: a task cannot be read or coded, or there is no room for the baseline.
        """
        self.owner = owner
        self.settings = settings or SourceSettings()
        self._direct = TrackerSet(tasks, self.settings)
        self._residual = residual
        self._is_complete = False
        self._stats = BuildStats()
        self._totals = _Totals(num_converted=0)

    @property
    def baseline(self) -> SourceBaseline:
        """The committed bits of the directly projected shards."""
        return self._direct.baseline

    @property
    def stats(self) -> BuildStats:
        """Of the latest complete build."""
        return self._stats

    @property
    def owned_nbytes(self) -> int:
        """Of the shards that every build compares; residual tensors come on top, when they are converted."""
        return sum(tracker.nbytes for tracker in self.baseline.trackers)

    @property
    def compared_nbytes(self) -> int:
        """Input bytes of the build under way, or the latest one, that were compared so far. May be read from any thread."""
        return self._totals.scanned_nbytes

    @property
    def changed_elements(self) -> int:
        """Elements whose bits differ from the committed ones, as the latest complete build found them."""
        return self._stats.num_changed

    def build(self, plan: RefitPlan, mode: EncodingMode) -> Iterator[Bucket]:
        """Compare everything owned with the baseline and yield the changes, in the same buckets at every attempt.

        The residual stage, if there is one, comes first and whole, so that no rank waits for another once payloads are sent.

        Raises:
            RejectedError: the plan does not list an owned tensor as this owner knows it.
            AttemptFailedError: residual parts do not make up their tensors.
            OperatorRequiredError: the candidate is not the one that an earlier attempt of this transition read.
        """
        converted = self._convert(plan, mode)
        self._totals = totals = _Totals(num_converted=len(converted))
        chunks = itertools.chain(
            ([one] for one in converted), self._direct.over_chunks(lambda chunk: self._scan(chunk, plan, mode))
        )
        total_nbytes = sum(one.nbytes for one in converted) + self.owned_nbytes
        for bucket in cut_into_buckets(totals.counted(chunks), self.settings.bucket_nbytes, total_nbytes=total_nbytes):
            totals.num_buckets += 1
            yield bucket
        self._is_complete = True
        self._stats = totals.stats()

    def verify(self) -> None:
        """Prove ahead of the commit that the direct shards are still what was sent: the commit then need not do it.

        Waits for no other rank. Nothing happens if the settings want no proof.

        Raises:
            OperatorRequiredError: the candidate changed after it was built.
        """
        if self.settings.verify_candidate:
            self._direct.verify()

    def doubt(self) -> None:
        """Something may have written to the candidate since ``verify``: the commit proves it again."""
        self._direct.doubt()
        if self._residual is not None:
            self._residual.doubt()

    def prove(self) -> None:
        """Prove that ``commit`` would make the baseline what was sent. Raises what ``commit`` raises; copies nothing."""
        if not self._has_candidate():
            return
        if not self._is_complete:
            raise RejectedError("commit before the build ended: expected every bucket of an attempt to be taken first")
        if self.settings.verify_candidate:
            self._direct.verify()
            if self._residual is not None:
                self._residual.verify()

    def commit(self) -> None:
        """Make the candidate the baseline, in place. Absolute and safe to repeat, after an interruption too.

        Without a build since the last commit there is nothing to do.

        Raises:
            RejectedError: the build did not run to its end.
            OperatorRequiredError: the candidate changed after it was built; the committed policy's bits are lost here.
        """
        if not self._has_candidate():
            return
        self.prove()
        self._direct.commit()
        if self._residual is not None:
            self._residual.commit()
        self.forget_candidate()

    def forget_candidate(self) -> None:
        """The transition ended without a commit (or after it): the next build may see another candidate."""
        self._direct.forget()
        if self._residual is not None:
            self._residual.forget()
        self._is_complete = False

    def digests(self) -> dict[str, TensorDigest]:
        """Of the committed baseline: this owner's part of every tensor that it owns a part of."""
        residual = self._residual.digests() if self._residual is not None else {}
        return sum_by_name((*self._direct.digests().items(), *residual.items()))

    def recount(self) -> dict[str, TensorDigest]:
        """``digests``, counted anew from the committed words; unlike them if a bit of this memory has flipped since."""
        residual = self._residual.baseline.recount() if self._residual is not None else {}
        return sum_by_name((*self._direct.recount().items(), *residual.items()))

    def nans(self) -> dict[str, int]:
        """Tensors of which committed elements are NaN, and how many of those this owner compares."""
        residual = self._residual.baseline.nans() if self._residual is not None else {}
        return self._direct.nans() | residual

    def candidate_digests(self) -> dict[str, TensorDigest]:
        """Of the candidate: what ``digests`` will say once it is committed. After a commit, the same as ``digests``.

        Raises:
            RejectedError: a build is under way or broke off.
        """
        if self._has_candidate() and not self._is_complete:
            raise RejectedError("candidate digests before the build ended: expected every bucket to be taken first")
        residual = self._residual.candidate_digests() if self._residual is not None else {}
        return sum_by_name((*self._direct.candidate_digests().items(), *residual.items()))

    def _has_candidate(self) -> bool:
        return self._direct.has_candidate or (self._residual is not None and self._residual.has_candidate)

    def _convert(self, plan: RefitPlan, mode: EncodingMode) -> list[_Scanned]:
        if self._residual is None:
            self._check_plan(plan)
            return []
        found = self._residual.build(plan, mode, before=lambda: self._check_plan(plan))
        return [_Scanned(one.items, one.num_changed, one.spec.num_elements, one.spec.nbytes) for one in found]

    def _check_plan(self, plan: RefitPlan) -> None:
        for tracker in self.baseline.trackers:
            spec = tracker.task.spec
            if plan.catalog.get(spec.name) != spec:
                raise RejectedError(
                    f"owner {self.owner}: the plan lists {plan.catalog.get(spec.name)}, this owner holds {spec}; "
                    "expected the plan to be made from the trainer's catalog"
                )

    def _scan(self, chunk: tuple[TaskTracker, ...], plan: RefitPlan, mode: EncodingMode) -> list[_Scanned]:
        work = [(tracker, plan.encoding(tracker.task.spec.name, mode)) for tracker in chunk]
        found = []
        for (tracker, encoding), scanned in zip(work, scan_trackers(work), strict=True):
            self._direct.pin(tracker, scanned.change)
            items = scanned.items
            if tracker.task.spec.name in plan.dense:
                items = tracker.scan(encoding, everything=True).items
            found.append(_Scanned(items, scanned.num_changed, tracker.num_elements, tracker.nbytes))
        return found


class _Totals:
    """Sums over one build."""

    def __init__(self, num_converted: int) -> None:
        self.num_converted = num_converted
        self.num_owned = self.num_changed = self.num_emitted = self.scanned_nbytes = self.num_items = self.num_buckets = 0

    def counted(self, chunks: Iterable[Sequence[_Scanned]]) -> Iterator[tuple[tuple[CodedItem, ...], int]]:
        """Each chunk's items and input bytes, added up as they pass."""
        for chunk in chunks:
            items = tuple(item for one in chunk for item in one.items)
            nbytes = sum(one.nbytes for one in chunk)
            self.num_owned += sum(one.num_elements for one in chunk)
            self.num_changed += sum(one.num_changed for one in chunk)
            self.num_emitted += sum(item.count for item in items)
            self.scanned_nbytes += nbytes
            self.num_items += len(items)
            yield items, nbytes

    def stats(self) -> BuildStats:
        return BuildStats(
            self.num_owned,
            self.num_changed,
            self.num_emitted,
            self.scanned_nbytes,
            self.num_items,
            self.num_buckets,
            self.num_converted,
        )
