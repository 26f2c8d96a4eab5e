"""The control plane's operations: read, ask a rule, swap; again if the swap lost.

Whether a swap that was refused or had no reply took effect is read from the record itself, by the writer's nonce. An answer is
``UNKNOWN`` only if the store stayed out of reach until the tries were used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deltarefit.control.store import ABSENT, RecordStore, SwapUncertainError, Tag
from deltarefit.errors import AttemptFailedError, CommitConflictError, RejectedError, TransportError
from deltarefit.ids import AttemptId, BaselineId, ReceiverId
from deltarefit.protocol import commit as rules
from deltarefit.protocol.commit import CommitRequest, PrepareRequest
from deltarefit.protocol.record import CommitOutcome, CommitRecord, ControlState, decode_control, encode_control

__all__ = ["ControlPlane", "ControlSettings"]

Rule = Callable[[ControlState], ControlState]


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """How long an operation keeps trying. Bounds waiting only; no safety depends on it."""

    max_tries: int = 60
    """Reads and swaps of one operation, over both lost races and lost replies."""
    first_pause_s: float = 0.02
    max_pause_s: float = 1.0
    """Pauses double from the first to this. 60 tries then last about 55 s."""

    def __post_init__(self) -> None:
        if self.max_tries < 1 or self.first_pause_s < 0 or self.max_pause_s < self.first_pause_s:
            raise RejectedError(f"control: {self}; expected max_tries >= 1 and 0 <= first_pause_s <= max_pause_s")

    def pause_s(self, num_tries: int) -> float:
        return min(self.max_pause_s, self.first_pause_s * 2.0 ** min(num_tries, 30))


_DOUBTS = 2
"""A record that cannot be read is read that often again, before something else is said to be in its place."""


class ControlPlane:
    """Rules of ``protocol.commit`` carried out on a store. Usable from any thread; keeps no state of its own."""

    def __init__(
        self,
        store: RecordStore,
        *,
        new_nonce: Callable[[], str],
        pause: Callable[[float], None],
        settings: ControlSettings | None = None,
    ) -> None:
        """Store the arguments; nothing is contacted.

        Args:
            store: where the record is.
            new_nonce: gives a text that no other call of it, in any process, gives.
            pause: sleeps for so many seconds; called between tries. May raise to give up early.
            settings: how often to try.
        """
        self._store = store
        self._new_nonce = new_nonce
        self._pause = pause
        self._settings = settings or ControlSettings()

    @property
    def place(self) -> str:
        return self._store.place

    # ------------------------------------------------------------------------------------------ reading

    def read(self) -> ControlState | None:
        """The record as it is now; None if the run does not exist.

        Raises:
            RejectedError: what is stored is not a control record.
            TransportError: the store stayed out of reach.
        """
        return self._read()[0]

    def _read(self) -> tuple[ControlState | None, Tag]:
        last: TransportError | None = None
        for num_tries in range(self._settings.max_tries):
            try:
                data, tag = self._store.read()
            except TransportError as error:
                last = error
                self._pause(self._settings.pause_s(num_tries))
                continue
            try:
                return (None if data is None else decode_control(data, where=self._store.place)), tag
            except RejectedError:
                # A body that ended early looks like this too, and only another read tells the two apart.
                if num_tries >= min(_DOUBTS, self._settings.max_tries - 1):
                    raise
                self._pause(self._settings.pause_s(num_tries))
        raise TransportError(f"{self.place}: out of reach after {self._settings.max_tries} tries: {last}") from last

    # ------------------------------------------------------------------------------------------ one change

    def _change(self, rule: Rule) -> ControlState:
        """Bring the record to what ``rule`` makes of it.

        Returns:
            the record in which the change is known to be.

        Raises:
            what the rule raises, only if no earlier try of this call took effect;
            SwapUncertainError: the tries are used up and it is not known whether the change took effect.
        """
        nonces: set[str] = set()
        uncertain: SwapUncertainError | None = None
        for num_tries in range(self._settings.max_tries):
            state, tag = self._read_or_uncertain(nonces)
            if state is None:
                raise RejectedError(f"{self.place}: no such run; start the trainer first, or check the address")
            if nonces.intersection(state.nonces):
                return state
            new = rule(state)
            if new is state:
                return state
            nonce = self._new_nonce()
            nonces.add(nonce)
            stamped = rules.stamp(new, nonce)
            try:
                if self._store.swap(tag, encode_control(stamped)):
                    return stamped
            except SwapUncertainError as error:
                uncertain = error
            self._pause(self._settings.pause_s(num_tries))
        raise SwapUncertainError(
            f"{self.place}: no change of the record went through in {self._settings.max_tries} tries"
            + (f"; last: {uncertain}" if uncertain else ": other writers kept coming first")
        ) from uncertain

    def _read_or_uncertain(self, nonces: set[str]) -> tuple[ControlState | None, Tag]:
        try:
            return self._read()
        except TransportError as error:
            if nonces:
                raise SwapUncertainError(f"{self.place}: out of reach after a change was sent: {error}") from error
            raise

    # ------------------------------------------------------------------------------------------ operations

    def create(self, run: str, setup_digest: str, record: CommitRecord) -> ControlState:
        """Create the run's record if there is none; return the record that is there.

        Raises:
            RejectedError: a record of another run or another set-up is there.
        """
        nonce = self._new_nonce()
        wanted = rules.stamp(rules.create_run(run, setup_digest, record), nonce)
        for num_tries in range(self._settings.max_tries):
            state, _ = self._read()
            if state is not None:
                if state.run != run or state.setup_digest != setup_digest:
                    raise RejectedError(
                        f"{self.place}: holds run {state.run!r} with set-up {state.setup_digest}, expected {run!r} with "
                        f"{setup_digest}: the place was used for another model or run; name another place"
                    )
                return state
            try:
                if self._store.swap(ABSENT, encode_control(wanted)):
                    return wanted
            except SwapUncertainError:
                pass
            self._pause(self._settings.pause_s(num_tries))
        raise TransportError(f"{self.place}: the run could not be created in {self._settings.max_tries} tries")

    def acquire(self, holder: str, setup_digest: str, *, expired_epoch: int | None = None) -> ControlState:
        """Become the coordinator; the returned record's ``epoch`` is the caller's. See ``protocol.commit.acquire``.

        Raises:
            RejectedError: the run is held by another coordinator, or is another model's.
            CommitConflictError: it was acquired and taken over by another one before this call could look again.
        """
        state = self._change(
            lambda state: rules.acquire(state, holder=holder, setup_digest=setup_digest, expired_epoch=expired_epoch)
        )
        if state.coordinator != holder:
            raise CommitConflictError(
                f"{self.place}: {holder} acquired the run, but {state.coordinator or 'somebody'} took it over at once"
            )
        return state

    def release(self, epoch: int, holder: str) -> None:
        """Give the run up; nothing happens if it was taken over."""
        self._change(lambda state: rules.release(state, epoch=epoch, holder=holder))

    def prepare(self, request: PrepareRequest) -> ControlState:
        """Bind an attempt; the returned record's ``revision`` goes into ``PrepareAttempt``. See ``protocol.commit.prepare``.

        Raises:
            what the rule raises;
            CommitConflictError, AttemptFailedError: it was bound, but replaced or fenced before this call could look again;
            SwapUncertainError: no reply was had; the next prepare fences whatever this one may have bound.
        """
        state = self._change(lambda state: rules.prepare(state, request))
        if state.epoch != request.epoch:
            raise CommitConflictError(
                f"{request.attempt}: bound, but {state.coordinator or 'somebody'} took the run over at once"
            )
        if state.open_attempt is None or state.open_attempt.attempt != request.attempt:
            raise AttemptFailedError(
                f"{request.attempt}: bound, but fenced at once" + (f": {state.abort}" if state.abort else "")
            )
        return state

    def commit(self, request: CommitRequest) -> CommitOutcome:
        """Publish an attempt.

        Returns:
            SUCCESS, FAILED, CONFLICT, or UNKNOWN if no reply could be had; then ask ``read_commit``.

        Raises:
            RejectedError: a required receiver has not acknowledged.
        """
        outcome = CommitOutcome.UNKNOWN

        def rule(state: ControlState) -> ControlState:
            nonlocal outcome
            outcome, new = rules.commit(state, request)
            return new

        try:
            state = self._change(rule)
        except TransportError:
            return CommitOutcome.UNKNOWN
        return CommitOutcome.SUCCESS if state.record.baseline == request.baseline else outcome

    def mark_obsolete(self, attempt: AttemptId) -> ControlState:
        """Fence an attempt off; needs no epoch, as it only forbids."""
        return self._change(lambda state: rules.mark_obsolete(state, attempt=attempt))

    def read_commit(self, attempt: AttemptId) -> CommitRecord:
        """The commit record, once no commit of ``attempt`` can change it any more. Sees to that itself, by a fence."""
        return self.mark_obsolete(attempt).record

    def close_attempt(self, epoch: int, attempt: AttemptId, *, was_admitted: bool = True) -> ControlState:
        """Take an attempt out of the record. See ``protocol.commit.close_attempt``."""
        return self._change(lambda state: rules.close_attempt(state, epoch=epoch, attempt=attempt, was_admitted=was_admitted))

    def request_abort(self, reason: str) -> ControlState:
        """An operator asks to end the transition under way. See ``protocol.commit.request_abort``."""
        return self._change(lambda state: rules.request_abort(state, reason=reason))

    def record_abort(self, epoch: int, repair: str) -> ControlState:
        """The coordinator ends an aborted transition. See ``protocol.commit.record_abort``."""
        return self._change(lambda state: rules.record_abort(state, epoch=epoch, repair=repair))

    def note_repair(self, epoch: int, reason: str) -> ControlState:
        """The next attempt must send every element."""
        return self._change(lambda state: rules.note_repair(state, epoch=epoch, reason=reason))

    def repaired(self, restored: Iterable[ReceiverId], required: Iterable[ReceiverId]) -> ControlState:
        """Clear the repair note. See ``protocol.commit.repaired``."""
        whole, needed = frozenset(restored), frozenset(required)
        return self._change(lambda state: rules.repaired(state, restored=whole, required=needed))

    def reinitialise(self, epoch: int, baseline: BaselineId, policy_digest: str) -> ControlState:
        """Bind the committed version to a new baseline. See ``protocol.commit.reinitialise``."""
        return self._change(
            lambda state: rules.reinitialise(state, epoch=epoch, baseline=baseline, policy_digest=policy_digest)
        )
