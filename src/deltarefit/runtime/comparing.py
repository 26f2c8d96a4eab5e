"""Compares what receivers prove to hold with what they should: by a summary, tensor by tensor only where that differs."""

from __future__ import annotations

from collections.abc import Mapping

from deltarefit.canonical import TensorDigest
from deltarefit.errors import AttemptFailedError, RefitError
from deltarefit.ids import ReceiverId
from deltarefit.runtime import messages
from deltarefit.runtime.calls import Answer, expect
from deltarefit.runtime.members import Member
from deltarefit.runtime.planning import DigestCheck, check_digests, check_holding
from deltarefit.runtime.refit_state import Session

__all__ = ["compare"]


def compare(
    session: Session,
    expected: Mapping[str, TensorDigest],
    holdings: Mapping[ReceiverId, messages.Holding],
    members: Mapping[ReceiverId, Member],
) -> dict[ReceiverId, DigestCheck]:
    """How each receiver's bits stand to ``expected``; asks all that differ at once for the digest of each tensor.

    Raises:
        RefitError: one of these could not say. All of them are asked again before they are taken at their word.
    """
    checks: dict[ReceiverId, DigestCheck] = {}
    differing: list[Member] = []
    known: dict[tuple[str, ...], str] = {}
    for receiver, holding in holdings.items():
        check = check_holding(expected, holding, session.members.summary(members[receiver]).skipped, known)
        if check is None:
            differing.append(members[receiver])
        else:
            checks[receiver] = check
    if not differing:
        return checks
    answers = session.caller.ask(differing, messages.Survey(lists=True), session.settings.reply_timeout_s)
    try:
        return checks | {one.receiver: _by_tensor(session, expected, one, answers[one.receiver]) for one in differing}
    except RefitError:
        for member in differing:
            session.distrust(member.identity)
        raise


def _by_tensor(session: Session, expected: Mapping[str, TensorDigest], member: Member, answer: Answer) -> DigestCheck:
    shown = expect(answer, messages.Surveyed, member.receiver)
    check = check_digests(expected, shown.digests or {}, session.members.summary(member).skipped)
    if check.is_equal:
        raise AttemptFailedError(
            f"receiver {member.receiver}: the digest of all that it holds is not the expected one, but that of each tensor is; "
            "its weights changed meanwhile, so the next attempt looks again"
        )
    return check
