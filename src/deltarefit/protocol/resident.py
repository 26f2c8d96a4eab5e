"""What a receiver's weights are worth, and whether it may serve: one small value that only grows truer (paper A.1, B.2).

A receiver serves only bits that a commit published. From the first write of an attempt until the commit is known, its weights
are *in doubt*: any mixture of two versions. Doubt ends by the commit of an attempt that this receiver completed, or by a dense
restore; nothing else. While in doubt, or while fenced, the request gate cannot open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.ids import BaselineId, EncodingMode, PolicyVersion
from deltarefit.protocol.record import CommitRecord

__all__ = ["Doubt", "Resident"]


@dataclass(frozen=True, slots=True)
class Doubt:
    """Writes of a transition that is not known to be committed may have happened."""

    candidate: str
    """Of the last attempt that wrote. A retry that does not send every element must carry the same."""
    is_mixed_candidate: bool = False
    """Attempts with different candidates wrote; until one that sends every element is complete, nothing else helps."""
    completed: BaselineId | None = None
    """If the last attempt was applied wholly: its candidate baseline, by which a commit record is recognised."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A receiver's weights and its request gate."""

    policy_version: PolicyVersion | None = None
    """The committed version whose bits these are, as far as is known; None for a checkpoint that nobody has placed yet."""
    doubt: Doubt | None = None
    is_gate_closed: bool = False
    fenced: str = ""
    """Not empty: the lease ran out or the receiver was retired, for this reason. Others may have gone on without it."""

    def check_takes(
        self, *, base_version: PolicyVersion, mode: EncodingMode, is_dense: bool, candidate: str, receiver: str
    ) -> None:
        """Whether an attempt would leave exactly the target bits here.

        Raises:
            RejectedError: it would not; the text says what to restore.
        """
        if self.fenced:
            raise RejectedError(f"receiver {receiver}: fenced ({self.fenced}); it must be restored and register again")
        if is_dense:
            return
        if self.policy_version != base_version:
            held = "an unplaced checkpoint" if self.policy_version is None else f"policy version {self.policy_version}"
            raise RejectedError(
                f"receiver {receiver}: holds {held}, expected {base_version}, the base of this refit; restore it: "
                f"'deltarefit receiver restore --run RUN --name {receiver}'"
            )
        doubt = self.doubt
        if doubt is None:
            return
        if mode is not EncodingMode.OVERWRITE:
            raise RejectedError(
                f"receiver {receiver}: weights are in doubt after a failed attempt; only overwrites repair them"
            )
        if doubt.is_mixed_candidate or doubt.candidate != candidate:
            raise RejectedError(
                f"receiver {receiver}: holds bits of candidate {doubt.candidate}, this attempt carries {candidate}; send every "
                f"element (dense attempt), or restore it: 'deltarefit receiver restore --run RUN --name {receiver}'"
            )

    def touched(self, *, candidate: str) -> Resident:
        """An attempt is about to write an element."""
        before = self.doubt
        is_mixed = before is not None and (before.is_mixed_candidate or before.candidate != candidate)
        return replace(self, doubt=Doubt(candidate, is_mixed))

    def completed(self, candidate: str, baseline: BaselineId) -> Resident:
        """An attempt was applied wholly and devices are in step, also if it had nothing to write."""
        return replace(self, doubt=Doubt(candidate, completed=baseline))

    def committed(self, record: CommitRecord) -> Resident:
        """The commit record was read. Doubt ends only if it names the attempt that was completed here."""
        if self.doubt is not None and self.doubt.completed == record.baseline:
            return replace(self, policy_version=record.policy_version, doubt=None)
        return self

    def restored(self, policy_version: PolicyVersion) -> Resident:
        """Every element was loaded anew, or proved by digest, at a committed version. The gate stays as it is."""
        return replace(self, policy_version=policy_version, doubt=None, fenced="")

    def fence(self, reason: str) -> Resident:
        """The lease ran out: stop serving until restored."""
        return replace(self, fenced=self.fenced or reason, is_gate_closed=True)

    def closed(self) -> Resident:
        return replace(self, is_gate_closed=True)

    def is_servable(self, record: CommitRecord) -> bool:
        """Whether these are exactly the bits that the record publishes."""
        return not self.fenced and self.doubt is None and self.policy_version == record.policy_version

    def reopened(self, record: CommitRecord, *, receiver: str) -> Resident:
        """Open the gate.

        Raises:
            OperatorRequiredError: the weights are not known to be the committed ones; nothing is changed.
        """
        if self.is_servable(record):
            return replace(self, is_gate_closed=False)
        worth = "in doubt" if self.doubt is not None else f"of policy version {self.policy_version}"
        worth = f"fenced ({self.fenced})" if self.fenced else worth
        raise OperatorRequiredError(
            f"receiver {receiver}: the request gate stays closed: weights are {worth}, committed is {record}; "
            f"'deltarefit receiver restore --run RUN --name {receiver}' places it anew; the next refit() sends it what it lacks"
        )
