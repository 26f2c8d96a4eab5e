"""Asks receivers to do things and collects their answers: every wait ends, and says for whom it waited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deltarefit.errors import DeadlineError, RefitError, TransportError
from deltarefit.ids import ReceiverId
from deltarefit.runtime.clock import Clock, Deadline
from deltarefit.runtime.members import Member, Members
from deltarefit.runtime.messages import (
    Call,
    CallBody,
    Completed,
    Done,
    Failure,
    Reply,
    ReplyBody,
    Surveyed,
    decode_message,
    encode_message,
)
from deltarefit.transport import Mailbox

__all__ = ["Answer", "Caller", "PendingCall"]

_TAKE_S = 0.25  # how long one look into the mailbox may last before the receivers' signs of life are looked at again

Answer = Surveyed | Completed | Done | RefitError
"""What a receiver said, or why it did not."""


class PendingCall:
    """One request to several receivers, posted, whose answers come in."""

    def __init__(self, name: str, what: str, asked: Mapping[ReceiverId, Member], deadline: Deadline) -> None:
        self.name = name
        self.what = what
        self.asked = asked
        self.deadline = deadline
        self.answers: dict[ReceiverId, Answer] = {}

    @property
    def missing(self) -> list[ReceiverId]:
        return sorted(set(self.asked) - set(self.answers))

    def take(self, receiver: ReceiverId, reply: Reply) -> None:
        """Note an answer; answers of an earlier start of the receiver and second answers do not count."""
        member = self.asked.get(receiver)
        if member is None or receiver in self.answers or reply.incarnation != member.membership.incarnation:
            return
        body: ReplyBody = reply.body
        self.answers[receiver] = body.error(f"receiver {receiver}") if isinstance(body, Failure) else body

    def give_up_on(self, receiver: ReceiverId, why: str) -> None:
        self.answers.setdefault(receiver, DeadlineError(f"receiver {receiver}: {self.what}: {why}"))


class Caller:
    """The coordinator's mailbox. Calls may overlap; used by one thread."""

    def __init__(self, mailbox: Mailbox, members: Members, clock: Clock, *, nonce: str, epoch: int) -> None:
        self._mailbox = mailbox
        self._members = members
        self._clock = clock
        self._nonce = nonce
        self._epoch = epoch
        self._count = 0
        self._pending: dict[str, PendingCall] = {}

    def post(self, asked: Iterable[Member], body: CallBody, timeout_s: float) -> PendingCall:
        """Ask, without waiting for answers."""
        self._count += 1
        name = f"{self._nonce}-{self._count}"
        by_receiver = {member.receiver: member for member in asked}
        pending = PendingCall(name, type(body).__name__, by_receiver, Deadline(self._clock, timeout_s))
        self._pending[name] = pending
        data = encode_message(Call(name, self._epoch, body))
        for receiver in sorted(by_receiver):
            self._mailbox.post(receiver, data)
        return pending

    def collect(self, pending: PendingCall) -> dict[ReceiverId, Answer]:
        """Wait until everyone answered, died or ran out of time."""
        while pending.missing:
            remaining_s = pending.deadline.remaining_s()
            self._take(min(_TAKE_S, remaining_s))
            alive = self._members.alive() if pending.missing else {}
            for receiver in pending.missing:
                now = alive.get(receiver)
                if now is None:
                    pending.give_up_on(receiver, "it shows no sign of life any more")
                elif now.identity != pending.asked[receiver].identity:
                    pending.give_up_on(receiver, "its process was restarted meanwhile")
                elif remaining_s <= 0:
                    pending.give_up_on(receiver, f"no answer within {pending.deadline.timeout_s:.0f} s although it is alive")
        del self._pending[pending.name]
        return pending.answers

    def ask(self, asked: Iterable[Member], body: CallBody, timeout_s: float) -> dict[ReceiverId, Answer]:
        """Post and collect."""
        return self.collect(self.post(asked, body, timeout_s))

    def _take(self, timeout_s: float) -> None:
        mails = self._mailbox.take(timeout_s)
        for mail in mails:
            try:
                reply = decode_message(mail.data, Reply, sender=mail.sender)
            except TransportError:
                continue
            if (pending := self._pending.get(reply.name)) is not None:
                pending.take(ReceiverId(mail.sender), reply)
        self._mailbox.acknowledge(*(mail.key for mail in mails))
