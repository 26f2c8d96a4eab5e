"""The retained chain: committed attempts whose payloads stay in the run's store, so that receivers can come back over them.

The record names them, and a commit adds its own in the same swap. So which attempt of a transition was the committed one is
never in doubt, and no crash leaves a gap. Objects that the record does not name are garbage, whoever left them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, PolicyVersion

__all__ = ["ChainLink", "Retention", "check_links", "extended"]


class ChainLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One committed attempt: its payloads lead from one version to the next."""

    attempt: AttemptId
    target_version: PolicyVersion
    base_digest: str
    """Of the whole policy, as ``CommitRecord.policy_digest``: what a receiver must hold to start with this link."""
    target_digest: str
    plan_digest: str
    """The plan that its payloads were made by."""
    nbytes: int
    """Of its payloads together."""

    @property
    def base_version(self) -> PolicyVersion:
        return PolicyVersion(self.target_version - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How an attempt's payloads stay in the store after its commit, and how much may stay with them."""

    nbytes: int
    """Of this attempt's payloads."""
    max_links: int
    max_nbytes: int
    """Of all links together."""


def extended(
    links: Sequence[ChainLink],
    retention: Retention | None,
    *,
    attempt: AttemptId,
    plan_digest: str,
    target_version: PolicyVersion,
    digests: tuple[str, str],
) -> tuple[ChainLink, ...]:
    """The chain after a commit: its link behind the older ones, of which the oldest go if there are too many.

    Only the oldest may go: whoever holds an older version needs all links after it. A commit whose payloads do not stay
    (``retention`` None) ends the chain, because nothing leads over that version any more. So does one of which base or target
    are not known by digest.

    Args:
        links: the chain so far.
        retention: of this commit.
        attempt: that was committed.
        plan_digest: its plan.
        target_version: that it leads to.
        digests: of the whole policy before and after.
    """
    base_digest, target_digest = digests
    if retention is None or not base_digest or not target_digest:
        return ()
    link = ChainLink(attempt, target_version, base_digest, target_digest, plan_digest, retention.nbytes)
    kept = (*links, link)
    while kept and (len(kept) > retention.max_links or sum(one.nbytes for one in kept) > retention.max_nbytes):
        kept = kept[1:]
    return kept


def check_links(links: Sequence[ChainLink], committed_version: PolicyVersion, where: str) -> None:
    """Refuse a chain with a gap, or one that does not end at the committed version.

    Raises:
        RejectedError: the first break.
    """
    for before, after in itertools.pairwise(links):
        if before.target_version != after.base_version or before.target_digest != after.base_digest:
            raise RejectedError(f"{where}: retained {after.attempt} does not start where {before.attempt} before it ends")
    if links and links[-1].target_version != committed_version:
        raise RejectedError(f"{where}: retained {links[-1].attempt} does not end at committed version {committed_version}")
