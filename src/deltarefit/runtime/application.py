"""One attempt on one receiver: fetches payloads as they appear and applies them in the declared order (paper B.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltarefit import payload
from deltarefit.errors import AttemptFailedError, PayloadInvalidError, PayloadMissingError, RefitError
from deltarefit.ids import AttemptId, EncodingMode, OwnerId, PayloadId, PolicyVersion
from deltarefit.plan import RefitPlan
from deltarefit.runtime.engine import EngineDriver
from deltarefit.runtime.events import EventLog
from deltarefit.transport import Manifest, OwnerEnd, PayloadEntry, PayloadSource, RunStore, read_manifest

__all__ = ["Application"]


class Application:
    """Applies one attempt's payloads, each at most once, in the order of their ids.

    The order is (sequence, owner), so that no owner has to finish before another's first payload is applied; owners that ended
    are passed over (checklist D16). Used by one thread.
    """

    def __init__(
        self,
        attempt: AttemptId,
        base_version: PolicyVersion,
        target_version: PolicyVersion,
        mode: EncodingMode,
        plan: RefitPlan,
        *,
        engine: EngineDriver,
        store: RunStore,
        source: PayloadSource,
        log: EventLog,
        may_act: Callable[[], bool],
    ) -> None:
        self.attempt = attempt
        self.base_version = base_version
        self.target_version = target_version
        self.mode = mode
        self.plan = plan
        self.written_elements = 0
        self._engine = engine
        self._store = store
        self._source = source
        self._log = log
        self._may_act = may_act
        self._is_open = False
        self._failure: RefitError | None = None
        self._next = (0, 0)
        self._ended: dict[int, OwnerEnd] = {}
        self._entries: dict[tuple[int, int], PayloadEntry] = {}

    @property
    def is_running(self) -> bool:
        """Whether there is or will be something to apply."""
        return self._is_open and self._failure is None and not self._is_over()

    def open(self, request_timeout_s: float) -> None:
        """Close the request gate, wait for running requests, and apply from now on."""
        self._engine.close_gate(request_timeout_s)
        self._is_open = True

    def pump(self) -> bool:
        """Apply what has arrived and is next in order; whether there was anything. Failures are kept for ``is_complete``."""
        try:
            self._look()
            progressed = False
            while (entry := self._next_entry()) is not None:
                self._apply(entry)
                progressed = True
                self._next = _after(self._next, self.plan.num_owners)
        except RefitError as error:
            self._failure = error
            return False
        else:
            return progressed

    def is_complete(self, ended: Sequence[OwnerEnd]) -> bool:
        """Whether everything that the owners sent is applied.

        Raises:
            AttemptFailedError: applying failed earlier, or the durable manifest is not what the owners say they sent.
        """
        if self._failure is not None:
            raise self._failure
        if not self._is_open:
            raise AttemptFailedError(f"{self.attempt}: flush before the request gate was closed")
        expected = {end.owner: end for end in ended}
        if set(expected) != set(range(self.plan.num_owners)):
            raise AttemptFailedError(f"{self.attempt}: flush names owners {sorted(expected)} of {self.plan.num_owners}")
        if not self._is_over():
            return False
        for owner, end in expected.items():
            if self._ended.get(owner) != end:
                raise PayloadMissingError(
                    f"{self.attempt}: owner {owner} sent {end.count} payloads, its manifest in {self._store.url} ends with "
                    f"{self._ended[owner].count} or other ones"
                )
        return True

    def _look(self) -> None:
        manifest: Manifest = read_manifest(self._store, self.attempt)
        self._ended = {end.owner: end for end in manifest.ended}
        self._entries = {(entry.sequence, entry.owner): entry for entry in manifest.entries}

    def _is_over(self) -> bool:
        """Every owner ended, and what is next lies beyond all of them."""
        sequence, owner = self._next
        return len(self._ended) == self.plan.num_owners and all(
            end.count <= sequence + (number < owner) for number, end in self._ended.items()
        )

    def _next_entry(self) -> PayloadEntry | None:
        """The entry that is next in order, if it has arrived."""
        while not self._is_over():
            entry = self._entries.get(self._next)
            if entry is not None:
                return entry
            sequence, owner = self._next
            end = self._ended.get(owner)
            if end is None or end.count > sequence:
                return None
            self._next = _after(self._next, self.plan.num_owners)
        return None

    def _apply(self, entry: PayloadEntry) -> None:
        if not self._may_act():
            raise AttemptFailedError(f"{self.attempt}: this receiver's lease ran out; it applies nothing more of this attempt")
        name = PayloadId(self.attempt, entry.sequence, OwnerId(entry.owner))
        with self._log.stage("fetch", self.attempt, nbytes=entry.nbytes, payload=str(name)):
            data = self._source.fetch(name, nbytes=entry.nbytes, digest=entry.digest)
        self._check_header(name, data)
        with self._log.stage("apply", self.attempt, nbytes=entry.nbytes, payload=str(name)):
            self.written_elements += self._engine.apply(data)

    def _check_header(self, name: PayloadId, data: bytes) -> None:
        """The payload must say itself that it belongs here: a key in a store is no proof."""
        header = payload.read_header(data)
        expected = (name, self.base_version, self.target_version, self.plan.digest)
        found = (
            PayloadId(header.attempt, header.sequence, header.owner),
            header.base_version,
            header.target_version,
            header.plan_digest,
        )
        if found != expected:
            raise PayloadInvalidError(f"{name}: its header says {found}, expected {expected}; it was not applied")


def _after(place: tuple[int, int], num_owners: int) -> tuple[int, int]:
    sequence, owner = place
    return (sequence, owner + 1) if owner + 1 < num_owners else (sequence + 1, 0)
