"""Answers the coordinator's calls on behalf of one receiver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.errors import AttemptFailedError, LoaderContractError, PayloadMissingError, RefitError, RejectedError
from deltarefit.ids import AttemptId, ReceiverId
from deltarefit.plan import RefitPlan
from deltarefit.protocol import CommitRecord
from deltarefit.receiver import RankSurvey, survey_ranks
from deltarefit.runtime import messages
from deltarefit.runtime.application import Application
from deltarefit.runtime.engine import EngineDriver
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.mailroom import MailRoom
from deltarefit.runtime.messages import Call, Failure, Reply, decode_message, encode_message
from deltarefit.runtime.presence import Presence
from deltarefit.runtime.trace_clock import ClockReading, boot_id
from deltarefit.transport import Mail, RunStore, keys

__all__ = ["MAX_PLAN_NBYTES", "ReceiverDesk"]

_LOG = logging.getLogger(__name__)
MAX_PLAN_NBYTES = 128 * 2**20


class ReceiverDesk:
    """Takes calls in the order in which they were posted, one at a time. Used by one thread."""

    def __init__(
        self,
        name: ReceiverId,
        *,
        engine: EngineDriver,
        application: Application,
        presence: Presence,
        mailbox: MailRoom,
        store: RunStore,
        log: EventLog,
        request_timeout_s: float,
        prewarm_anew: Callable[[Catalog], None],
        restore: Callable[[], None],
    ) -> None:
        self.catalog: Catalog | None = None
        """The one that was prewarmed for."""
        self.epoch = 0
        """Of the newest coordinator that was heard of; older ones are ignored."""
        self.heard_s = float("-inf")
        """When it last asked for something, on the log's clock."""
        self._name = name
        self._engine = engine
        self._prewarm_anew = prewarm_anew
        self._restore = restore
        self._application = application
        self._presence = presence
        self._mailbox = mailbox
        self._store = store
        self._log = log
        self._request_timeout_s = request_timeout_s
        self._coordinator = ""
        self._held: tuple[Mail, Call] | None = None
        """A call that is answered once payloads have arrived, or are applied."""
        self._boot = boot_id()
        self._received_s: dict[str, float] = {}
        """When each call that is not answered yet was seen."""
        self._reported: AttemptId | None = None

    # --- mail -------------------------------------------------------------------------------------------------------

    def receive(self, mail: Mail) -> None:
        """Do what a call asks, and answer it; calls of a replaced coordinator, or to an earlier self, are dropped."""
        call = decode_message(mail.data, Call, sender=mail.sender)
        if call.epoch < self.epoch or call.incarnation != self._presence.shown.incarnation:
            self._mailbox.acknowledge(mail.key)  # paper B.2: endpoints ignore what a replaced coordinator still sends
            return
        self.epoch = call.epoch
        if isinstance(call.body, messages.Restore):
            self._mailbox.acknowledge(mail.key)
            self._restore()
            return
        self._received_s[call.name] = self.heard_s = self._log.now_s()
        self._coordinator = mail.sender
        self._presence.note(activity=_activity(call.body))
        if isinstance(call.body, messages.Flush | messages.ConfirmArrival):
            self._drop_held()
            self._held = (mail, call)
            return
        self._reply(mail, call, self._outcome(call))
        if isinstance(call.body, messages.DropCaches):
            self._presence.show()  # which version it holds now; others may wait for that, the coordinator need not

    def answer_held(self) -> None:
        """Answer a call that waits for payloads, once they are here or applied, or once that failed."""
        if self._held is None:
            return
        mail, call = self._held
        try:
            answer = self._settled(call.body)
        except Exception as error:
            answer = self._failure(call, error)
        if answer is not None:
            self._held = None
            self._reply(mail, call, answer)

    def _settled(self, body: messages.CallBody) -> messages.ReplyBody | None:
        if isinstance(body, messages.ConfirmArrival):
            return messages.Done() if self._application.has_arrived(body) else None
        if isinstance(body, messages.Flush):
            return self._complete(body) if self._application.is_finished(body) else None
        raise RejectedError(f"receiver {self._name}: a {type(body).__name__} waits for nothing")

    def report_failure(self) -> None:
        """Tell the coordinator at once that the attempt failed here: it need not wait for the end of the schedule."""
        attempt, failure = self._application.attempt, self._application.failure
        if attempt is None or failure is None or self._reported == attempt:
            return
        self._reported = attempt
        broken = messages.Broken(attempt, Failure.of(failure))
        self._mailbox.post(self._coordinator, encode_message(Reply("", self._presence.shown.incarnation, broken)))

    def forget(self) -> None:
        """The receiver registers anew: what was asked of its earlier self is void."""
        self._drop_held()

    def _drop_held(self) -> None:
        if self._held is not None:
            mail, call = self._held
            self._received_s.pop(call.name, None)
            self._mailbox.acknowledge(mail.key)
            self._held = None

    def _reply(self, mail: Mail, call: Call, body: messages.ReplyBody) -> None:
        now_s = self._log.now_s()
        clock = ClockReading(self._received_s.pop(call.name, now_s), now_s, self._boot)
        self._mailbox.post(mail.sender, encode_message(Reply(call.name, self._presence.shown.incarnation, body, clock)))
        self._mailbox.acknowledge(mail.key)

    def _outcome(self, call: Call) -> messages.ReplyBody:
        try:
            return self._handle(call.body)
        except (RejectedError, LoaderContractError) as error:
            return self._failure(call, self._prewarmed_anew(error) or error)
        except Exception as error:
            return self._failure(call, error)

    def _prewarmed_anew(self, error: RefitError) -> RefitError | None:
        """If a call failed because the engine moved its weights or laid them out anew: learn the layout again, and say so.

        What lies in the new places is unknown: the coordinator asks before it takes this receiver at its word again.
        """
        try:
            stale = self._engine.stale() if self.catalog is not None else ""
            if not stale or self.catalog is None:
                return None
            _LOG.warning("receiver %s: %s changed since prewarm (%s); prewarming again", self._name, stale, error)
            self._prewarm_anew(self.catalog)
        except RefitError as again:
            return again
        return AttemptFailedError(f"{stale} changed since prewarm; this receiver has prewarmed again")

    def _failure(self, call: Call, error: Exception) -> Failure:
        if not isinstance(error, RefitError):
            _LOG.exception("receiver %s: %s failed", self._name, type(call.body).__name__)
        return Failure.of(error)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _handle(self, body: messages.CallBody) -> messages.ReplyBody:
        application = self._application
        match body:
            case messages.Survey(lists=lists):
                held = self.digests()
                return messages.Surveyed(self._holding(held), hex_digests(held) if lists else None)
            case messages.Audit():
                return self._audit()
            case messages.Prepare():
                self._drop_held()
                application.prepare(body, self._plan(body))
                self._reported = None
            case messages.OpenApply(attempt=attempt):
                application.open(AttemptId(attempt), self._request_timeout_s)
                self._presence.note(is_serving=False)
            case messages.Stop(attempt=attempt):
                application.stop(AttemptId(attempt))
            case messages.DropCaches(attempt=attempt, record=record, reopens=reopens):
                application.drop_caches(record)
                self._presence.note(policy_version=record.policy_version)
                if reopens:
                    self._reopen(AttemptId(attempt), record)
                return messages.Done(tuple(self._log.drain()))
            case messages.ReopenGate(attempt=attempt, record=record):
                self._reopen(AttemptId(attempt), record)
                return messages.Done(tuple(self._log.drain()))
            case _:
                raise RejectedError(f"receiver {self._name}: unexpected call {type(body).__name__}")
        return messages.Done()

    def digests(self) -> Mapping[str, TensorDigest | None]:
        """Per canonical tensor that this engine holds, the digest of its resident bits; None where they prove nothing.

        Where ranks disagree about elements that they all hold, the digest is no policy's.
        """
        return self._survey().digests

    def _audit(self) -> messages.Audited:
        survey = self._survey()
        drifted = tuple(f"rank {rank}: {name}" for rank, names in enumerate(self._engine.drift()) for name in names)
        return messages.Audited(hex_digests(survey.digests), survey.disagreeing, drifted, self._engine.covered())

    def _survey(self) -> RankSurvey:
        if self.catalog is None:
            raise RejectedError(f"receiver {self._name} has not prewarmed yet")
        try:
            self._engine.synchronize()
        except (PayloadMissingError, LoaderContractError) as error:
            _LOG.info("receiver %s: %s", self._name, error)  # left by a failed attempt; the digests will show it
        survey = survey_ranks(self._engine.digests(), self.catalog)
        if survey.disagreeing:
            _LOG.warning("receiver %s: its ranks disagree about %s", self._name, survey.disagreeing)
        return survey

    def _plan(self, body: messages.Prepare) -> RefitPlan:
        plan = self._store.get_as(keys.plan(body.plan_digest), RefitPlan.from_wire, max_nbytes=MAX_PLAN_NBYTES)
        if plan.catalog != self.catalog or plan.digest != body.plan_digest or plan.num_owners != body.num_owners:
            raise RejectedError(
                f"receiver {self._name}: plan {body.plan_digest} is for another catalog or other owners than those prewarmed "
                "for; restart the receiver"
            )
        return plan

    def _complete(self, body: messages.Flush) -> messages.Completed:
        attempt = AttemptId(body.attempt)
        self._application.complete(attempt)
        holding = None
        if body.audit:
            with self._log.stage("verify", attempt):
                holding = self._holding(self.digests())
        # What ran here is told when gates have reopened: until then every byte over a long link is part of the pause.
        return messages.Completed(self._application.written_elements, holding, self._engine.covered())

    def _holding(self, digests: Mapping[str, TensorDigest | None]) -> messages.Holding:
        proven = {name: digest for name, digest in digests.items() if digest is not None}
        unproven = tuple(name for name in self.catalog or () if name not in proven)
        return messages.Holding(digest_of_digests(proven), unproven)

    def _reopen(self, attempt: AttemptId, record: CommitRecord) -> None:
        if not self._presence.may_act:
            raise AttemptFailedError(
                f"receiver {self._name} showed no sign of life for {self._presence.lease.lease_s:.0f} s; its gate stays closed"
            )
        if self._application.reopen(attempt, record):
            self._presence.note(is_serving=True, activity="")


def hex_digests(digests: Mapping[str, TensorDigest | None]) -> dict[str, str | None]:
    return {name: None if digest is None else digest.hex() for name, digest in digests.items()}


_ACTIVITIES: Mapping[type, str] = {
    messages.Survey: "showing what it holds",
    messages.Audit: "showing what it holds",
    messages.Prepare: "bound",
    messages.ConfirmArrival: "waiting for the rest of the payloads",
    messages.OpenApply: "applying",
    messages.Flush: "finishing",
    messages.Stop: "stopped",
    messages.DropCaches: "dropping caches",
    messages.ReopenGate: "reopening its gate",
}


def _activity(body: messages.CallBody) -> str:
    attempt = getattr(body, "attempt", "")
    return f"{_ACTIVITIES[type(body)]}{': ' if attempt else ''}{attempt}"
