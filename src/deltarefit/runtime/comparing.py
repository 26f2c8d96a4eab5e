"""Compares what a receiver proves to hold with what it should: by a summary, tensor by tensor only where that differs."""

from __future__ import annotations

from collections.abc import Mapping

from deltarefit.canonical import TensorDigest
from deltarefit.errors import AttemptFailedError
from deltarefit.runtime import messages
from deltarefit.runtime.calls import expect
from deltarefit.runtime.members import Member
from deltarefit.runtime.planning import DigestCheck, check_digests, check_holding
from deltarefit.runtime.refit_state import Session

__all__ = ["compare"]


def compare(session: Session, member: Member, expected: Mapping[str, TensorDigest], holding: messages.Holding) -> DigestCheck:
    """How the receiver's bits stand to ``expected``; asks it for the digest of each tensor if any differs.

    Raises:
        RefitError: it could not say.
    """
    skipped = session.members.summary(member).skipped
    check = check_holding(expected, holding, skipped)
    if check is not None:
        return check
    answers = session.caller.ask([member], messages.Survey(lists=True), session.settings.reply_timeout_s)
    shown = expect(answers[member.receiver], messages.Surveyed, member.receiver)
    check = check_digests(expected, shown.digests or {}, skipped)
    if check.is_equal:
        raise AttemptFailedError(
            f"receiver {member.receiver}: the digest of all that it holds is not the expected one, but that of each tensor is; "
            "its weights changed meanwhile, so the next attempt looks again"
        )
    return check
