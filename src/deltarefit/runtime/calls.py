"""Asks receivers to do things and collects their answers: every wait ends, and says for whom it waited."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deltarefit.errors import AttemptFailedError, DeadlineError, RefitError, RejectedError, TransportError
from deltarefit.ids import AttemptId, ReceiverId
from deltarefit.runtime.activity import Activity
from deltarefit.runtime.clock import Clock, Deadline
from deltarefit.runtime.members import Member, Members
from deltarefit.runtime.messages import (
    Audited,
    Broken,
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
from deltarefit.runtime.trace_clock import TimeAxis
from deltarefit.transport import Mailbox
from deltarefit.wording import some_of

__all__ = ["Answer", "Caller", "PendingCall", "expect"]

_LOG = logging.getLogger(__name__)

_TAKE_S = 0.25  # how long one look into the mailbox may last before anything else is looked at again
_WAKE_S = 0.05  # between looks of a thread that is to be woken
_POSTS = 16  # at the same time: over a long link each takes a round trip

Answer = Surveyed | Audited | Completed | Done | RefitError
"""What a receiver said, or why it did not."""
AnswerT = TypeVar("AnswerT", Completed, Surveyed, Done)
Poll = Callable[[], None]
"""Called now and then while waiting; whatever it raises ends the wait."""


class PendingCall:
    """One request to several receivers, posted, whose answers come in."""

    def __init__(self, name: str, what: str, asked: Mapping[ReceiverId, Member], deadline: Deadline) -> None:
        self.name = name
        self.what = what
        self.asked = asked
        self.deadline = deadline
        self.answers: dict[ReceiverId, Answer] = {}
        self.asked_s: dict[ReceiverId, float] = {}
        """When each was asked."""

    @property
    def missing(self) -> list[ReceiverId]:
        return sorted(set(self.asked) - set(self.answers))

    @property
    def has_failed(self) -> bool:
        return any(isinstance(answer, RefitError) for answer in self.answers.values())

    @property
    def waiting_for(self) -> str:
        """In words, for people."""
        return f"{self.what}: waiting for {some_of(self.missing, 5)}"

    def take(self, receiver: ReceiverId, reply: Reply) -> None:
        """Note an answer; answers of an earlier start of the receiver and second answers do not count."""
        member = self.asked.get(receiver)
        if member is None or receiver in self.answers or reply.incarnation != member.membership.incarnation:
            return
        body: ReplyBody = reply.body
        if isinstance(body, Failure):
            self.answers[receiver] = body.error(f"receiver {receiver}")
        elif not isinstance(body, Broken):
            self.answers[receiver] = body

    def give_up_on(self, receiver: ReceiverId, why: str) -> None:
        self.answers.setdefault(receiver, DeadlineError(f"receiver {receiver}: {self.what}: {why}"))


class Caller:
    """The coordinator's mailbox. Calls may overlap; used by one thread at a time."""

    def __init__(
        self,
        mailbox: Mailbox,
        members: Members,
        clock: Clock,
        *,
        nonce: str,
        epoch: int,
        life_s: float,
        activity: Activity,
        axis: TimeAxis,
    ) -> None:
        """``life_s``: how often to look at signs of life while waiting. ``axis`` learns how receivers' clocks stand."""
        self._mailbox = mailbox
        self._members = members
        self._clock = clock
        self._nonce = nonce
        self._epoch = epoch
        self._life_s = life_s
        self._activity = activity
        self._axis = axis
        self._count = 0
        self._pending: dict[str, PendingCall] = {}
        self._broken: dict[tuple[ReceiverId, str], tuple[AttemptId, RefitError]] = {}

    def post(self, asked: Iterable[Member], body: CallBody | Callable[[Member], CallBody], timeout_s: float) -> PendingCall:
        """Ask, without waiting for answers. ``body`` may be made for each receiver."""
        self._count += 1
        name = f"{self._nonce}-{self._count}"
        by_receiver = {member.receiver: member for member in asked}
        bodies = {receiver: body(member) if callable(body) else body for receiver, member in by_receiver.items()}
        what = type(next(iter(bodies.values()))).__name__ if bodies else "nothing"
        pending = PendingCall(name, what, by_receiver, Deadline(self._clock, timeout_s))
        self._pending[name] = pending
        for member in by_receiver.values():
            if trouble := self._members.key_trouble(member):
                pending.answers[member.receiver] = RejectedError(trouble)
        reached = sorted(set(by_receiver) - set(pending.answers))

        def post_one(receiver: ReceiverId) -> None:
            call = Call(name, self._epoch, by_receiver[receiver].membership.incarnation, bodies[receiver])
            pending.asked_s[receiver] = self._clock.monotonic_s()
            self._mailbox.post(receiver, encode_message(call))

        if len(reached) < 2:
            for receiver in reached:
                post_one(receiver)
            return pending
        with ThreadPoolExecutor(min(_POSTS, len(reached)), thread_name_prefix="deltarefit-post") as pool:
            for posted in [pool.submit(post_one, receiver) for receiver in reached]:
                posted.result()
        return pending

    def collect(
        self,
        pending: PendingCall,
        *,
        until_failure: bool = False,
        poll: Poll = lambda: None,
        wake: threading.Event | None = None,
    ) -> dict[ReceiverId, Answer]:
        """Wait until everyone answered, died or ran out of time; with ``until_failure`` only until the first of them failed.

        ``poll`` is called now and then, and as soon as ``wake`` is set. May be called again for the same call, after ``poll``
        ended the wait.
        """
        self._pending[pending.name] = pending
        try:
            while pending.missing and not (until_failure and pending.has_failed):
                self._activity.begin(pending.waiting_for)
                remaining_s = pending.deadline.remaining_s()
                self._take(min(_TAKE_S, remaining_s), wake)
                poll()
                if pending.missing:
                    self._give_up_on_the_dead(pending, is_over=remaining_s <= 0)
        finally:
            del self._pending[pending.name]
        return pending.answers

    def ask(
        self, asked: Iterable[Member], body: CallBody | Callable[[Member], CallBody], timeout_s: float
    ) -> dict[ReceiverId, Answer]:
        """Post and collect."""
        return self.collect(self.post(asked, body, timeout_s))

    def listen(self, wake: threading.Event) -> None:
        """Look into the mailbox for a moment, or until ``wake`` is set, without waiting for anything in particular."""
        self._take(_TAKE_S, wake)

    def broken(self, attempt: AttemptId, asked: Mapping[ReceiverId, Member]) -> RefitError | None:
        """Why the attempt failed at one of these receivers, if one said so unasked."""
        for receiver in sorted(asked):
            found = self._broken.get((receiver, asked[receiver].membership.incarnation))
            if found is not None and found[0] == attempt:
                return found[1]
        return None

    def _give_up_on_the_dead(self, pending: PendingCall, *, is_over: bool) -> None:
        alive = self._members.alive(max_age_s=0.0 if is_over else self._life_s)
        for receiver in pending.missing:
            now = alive.get(receiver)
            if now is None:
                pending.give_up_on(receiver, "it shows no sign of life any more")
            elif now.identity != pending.asked[receiver].identity:
                pending.give_up_on(receiver, "it was restarted, or its lease ran out, meanwhile")
            elif is_over:
                pending.give_up_on(receiver, f"no answer within {pending.deadline.timeout_s:.0f} s although it is alive")

    def _take(self, timeout_s: float, wake: threading.Event | None) -> None:
        mails = self._mailbox.take(timeout_s if wake is None else 0.0)
        if wake is not None and not mails:
            wake.wait(min(timeout_s, _WAKE_S))
        taken_s = self._clock.monotonic_s()
        for mail in mails:
            try:
                reply = decode_message(mail.data, Reply, sender=mail.sender)
            except TransportError as error:
                _LOG.warning("%s; ignored", error)
                continue
            receiver = ReceiverId(mail.sender)
            if isinstance(reply.body, Broken):
                why = reply.body.failure.error(f"receiver {receiver}")
                self._broken[receiver, reply.incarnation] = (AttemptId(reply.body.attempt), why)
            elif (pending := self._pending.get(reply.name)) is not None:
                if reply.clock is not None and receiver in pending.asked_s:
                    asked_s = pending.asked_s[receiver]
                    self._axis.observe(f"receiver {receiver}", asked_s=asked_s, reading=reply.clock, answered_s=taken_s)
                pending.take(receiver, reply)
        self._mailbox.acknowledge(*(mail.key for mail in mails))


def expect(answer: Answer, kind: type[AnswerT], receiver: ReceiverId) -> AnswerT:
    """The answer, if it is of this kind; otherwise raise what it says."""
    if isinstance(answer, RefitError):
        raise answer
    if not isinstance(answer, kind):
        raise AttemptFailedError(f"receiver {receiver}: expected {kind.__name__}, got {type(answer).__name__}")
    return answer
