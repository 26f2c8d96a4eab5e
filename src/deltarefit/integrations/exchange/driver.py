"""The driver: one engine in other processes, all its ranks together (``runtime.engine.EngineDriver``)."""

from __future__ import annotations

import logging
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from deltarefit.canonical import Catalog
from deltarefit.errors import AttemptFailedError, OperatorRequiredError, RefitError, RejectedError
from deltarefit.integrations.exchange.calls import EngineCalls
from deltarefit.integrations.exchange.directory import Exchange, create_directory
from deltarefit.integrations.exchange.operations import RESULTS, RawTensor
from deltarefit.plan import RefitPlan
from deltarefit.receiver import PrewarmReport, RankDigest
from deltarefit.run_key import check_key, read_key
from deltarefit.runtime.clock import IdSource, RandomIds
from deltarefit.runtime.gate import RequestGate, close_gate

__all__ = ["ExchangeDriver"]

_log = logging.getLogger(__name__)
_BEGINNING, _ENDING = "beginning an update session", "ending an update session"


class ExchangeDriver:
    """Drives an engine's ranks through its public calls. An engine's adapter derives from it.

    Called from one thread at a time. Where the engine cannot take calls while it generates, wrap each request in
    ``with engine.request_gate.serving():``.
    """

    engine = "engine"
    """What the engine is called in texts."""
    if_absent = "is deltarefit installed in the engine's environment?"
    """What to look at if ranks do not answer a new driver."""
    if_caches_stay = "end the requests that hold them"
    """How to make the engine drop its caches."""

    def __init__(
        self,
        calls: EngineCalls,
        *,
        request_gate: RequestGate,
        directory: Path | None = None,
        key_file: Path | None = None,
        key: bytes | None = None,
        verify_writes: bool = False,
        call_timeout_s: float = 600.0,
        ids: IdSource | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is asked of the engine before the first operation.

        ``directory`` is where to make the exchange directory (default: shared memory, else the temporary directory);
        ``key_file`` holds the run's key, if it has one, or ``key`` is the key itself, handed to the ranks through a private
        file that is removed at once; ``verify_writes`` has ranks check every write after it was made, at about the cost of
        another read of the changes; ``call_timeout_s`` bounds each call except the wait for running requests; ``options`` is
        what else ranks are told when the driver introduces itself.

        Raises:
            RejectedError: the key cannot be one.
        """
        check_key(key)
        self.request_gate = request_gate
        self._calls = calls
        self._parent = directory
        self._key_file = key_file
        self._key = key
        self._options = {**(options or {}), **({"verify_writes": True} if verify_writes else {})}
        self._call_timeout_s = call_timeout_s
        self._ids = ids if ids is not None else RandomIds()
        self._exchange: Exchange | None = None
        self._number = 0
        self._num_ranks = 0
        self._is_updating = False
        self._is_closing_ordered = False
        self._is_gate_closed = False
        self._name = ""

    @property
    def name(self) -> str:
        if not self._name:
            self._name = f"{self.engine.lower()} {self._translated('its version', self._calls.engine_version)}"
        return self._name

    @property
    def key(self) -> bytes | None:
        """Raises RejectedError if its file holds none."""
        return self._key if self._key_file is None else read_key(self._key_file)

    @property
    def num_ranks(self) -> int:
        """Ranks that answered the last operation; 0 before the first."""
        return self._num_ranks

    # --- the driver's operations ------------------------------------------------------------------------------------

    def prewarm(self, catalog: Catalog) -> Sequence[PrewarmReport]:
        """Learn every rank's placement, writing nothing. Raises RejectedError, also for packed weights."""
        reports: Sequence[PrewarmReport] = self._operate("prewarm", catalog.to_wire())
        return reports

    def prepare(self, plan: RefitPlan) -> None:
        self._operate("prepare", plan.to_wire())

    def close_gate(self, timeout_s: float = 60.0) -> None:
        """Stop serving. Running requests end, freeze or are aborted, as ``in_flight`` says. Raises DeadlineError."""
        self._is_closing_ordered = True
        self._translated("pausing", lambda: self._calls.pause(timeout_s))
        self._is_gate_closed = True

    def apply(self, data: bytes | memoryview | Path) -> int:
        """Apply one payload on every rank; returns the elements written, summed over ranks."""
        return sum(self._operate("apply", data))

    def synchronize(self) -> None:
        self._operate("synchronize")

    def digests(self) -> Sequence[Mapping[str, RankDigest]]:
        digests: Sequence[Mapping[str, RankDigest]] = self._operate("digests")
        return digests

    def drift(self) -> Sequence[tuple[str, ...]]:
        """Per rank, storages whose bytes outside all canonical tensors have changed since prewarm."""
        drifted: Sequence[tuple[str, ...]] = self._operate("drift")
        return drifted

    def stale(self) -> str:
        """What has changed on any rank since prewarm so that it must be run again, in words; empty if nothing has."""
        shown = [f"rank {rank}: {what}" for rank, what in enumerate(self._operate("stale")) if what]
        return "; ".join(shown[:3])

    def drop_caches(self) -> None:
        """Forget keys, values and encoder outputs of older weights.

        Raises:
            OperatorRequiredError: the engine kept them; serving on would mix policies, so the gate must stay closed.
        """
        with self._exclusive():
            done = self._translated("dropping caches", self._calls.reset_caches)
        if not done:
            raise OperatorRequiredError(
                f"{self.engine} did not drop its prefix cache: blocks are still held. The request gate stays closed; "
                f"{self.if_caches_stay}: its receiver then opens the gate by itself; or restart the engine, and run "
                "'deltarefit receiver restore'"
            )

    def publish(self, policy_version: int) -> None:
        """End the update session and label the engine's answers with this policy version."""
        with self._exclusive():
            self._finish()
            self._translated("setting weight_version", lambda: self._calls.set_weight_version(str(policy_version)))

    def reopen_gate(self) -> None:
        self._finish()
        self._translated("resuming", self._calls.resume)
        self._is_closing_ordered = self._is_gate_closed = False

    def covered(self) -> str:
        ranks = "1 rank" if self._num_ranks == 1 else f"{self._num_ranks} ranks"
        return f"every parameter and buffer that a canonical tensor reaches, on {ranks}"

    def close(self) -> None:
        """End an open session and remove the exchange directory. The engine lives on, and its gate stays as it is."""
        try:
            self._finish()
        except RefitError as error:
            _log.warning("closing the driver: %s", error)
        if self._exchange is not None:
            self._exchange.remove()
            self._exchange = None

    def raw_state(self) -> Sequence[Mapping[str, RawTensor]]:
        """Per rank, a hash of the bits of every parameter and buffer: the proof that two engines hold the same."""
        states: Sequence[Mapping[str, RawTensor]] = self._operate("raw_state")
        return states

    # --- how they are asked for ------------------------------------------------------------------------------------

    def _operate(self, operation: str, data: bytes | memoryview | Path = b"") -> list[Any]:
        """Have every rank carry out one operation; results in rank order, or the first rank's error raised here."""
        with self._exclusive():
            exchange = self._exchange if self._exchange is not None else self._meet()
            self._number += 1
            number = self._number
            exchange.put(number, data)
            try:
                self._start()
                info = {"session": exchange.session, "number": number, "operation": operation}
                self._translated(operation, lambda: self._calls.update(info), on_error=self._abandon)
                results = self._results(exchange, number, RESULTS[operation])
            except BaseException:
                if not self._is_gate_closed:
                    self._abandon()
                raise
            finally:
                exchange.clear(number)
            if not self._is_gate_closed:
                self._finish()
            return results

    def _meet(self) -> Exchange:
        exchange = Exchange(create_directory(self._parent), f"driver-{self._ids.nonce()}")
        weakref.finalize(self, shutil.rmtree, exchange.directory, ignore_errors=True)  # also at exit, if nobody calls close
        key_file = self._key_file.resolve() if self._key_file is not None else None
        if self._key is not None:
            key_file = exchange.directory / "key"  # the directory is readable by this user only
            key_file.write_bytes(self._key)
        info: dict[str, Any] = {
            "directory": str(exchange.directory),
            "session": exchange.session,
            "key_file": str(key_file) if key_file is not None else "",
            **self._options,
        }
        try:
            self._translated("introducing the driver", lambda: self._calls.init(info))
            self._results(exchange, 0, None)
        except AttemptFailedError as error:
            exchange.remove()
            raise RejectedError(f"{error}. {self.if_absent}") from error
        except BaseException:
            exchange.remove()
            raise
        exchange.clear(0)
        if self._key is not None:
            (exchange.directory / "key").unlink()
        self._exchange = exchange
        return exchange

    def _results(self, exchange: Exchange, number: int, kind: Any) -> list[Any]:
        replies = exchange.collect(number)
        self._num_ranks = len(replies)
        for reply in replies:
            if reply.failure is not None:
                raise reply.failure.error(f"{self.engine} rank {reply.rank}")
        try:
            return [msgspec.msgpack.decode(reply.result, type=kind) for reply in replies]
        except msgspec.DecodeError as error:
            raise AttemptFailedError(f"operation {number}: a rank's result is not what it must be: {error}") from error

    def _start(self) -> None:
        if self._is_updating:
            return
        try:
            self._translated(_BEGINNING, self._calls.start)
        except RejectedError:
            raise
        except RefitError as error:
            _log.info("ending an update session that somebody left open: %s", error)
            self._translated(_ENDING, self._calls.finish)
            self._translated(_BEGINNING, self._calls.start)
        self._is_updating = True

    def _finish(self) -> None:
        if self._is_updating:
            self._is_updating = False
            self._translated(_ENDING, self._calls.finish)

    def _abandon(self) -> None:
        """End the session because something failed in it. Some engines have ended it themselves then, and say so; others hold
        their requests until it is ended."""
        try:
            self._finish()
        except RefitError as error:
            _log.info("ending an update session in which an operation failed: %s", error)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Some engines take calls only while they do not generate; servers look after that themselves."""
        if self._calls.is_thread_safe or self._is_gate_closed:
            yield
            return
        close_gate(self.request_gate, self._call_timeout_s)
        try:
            yield
        finally:
            if not self._is_closing_ordered:
                self.request_gate.reopen()

    def _translated(self, what: str, call: Callable[[], Any], on_error: Callable[[], None] | None = None) -> Any:
        """Make a foreign failure one of ours: the one place where an engine's exceptions are translated."""
        try:
            return call()
        except BaseException as error:
            if on_error is not None:
                on_error()
            if isinstance(error, RefitError) or not isinstance(error, Exception):
                raise
            raise AttemptFailedError(f"{self.engine} failed at {what}: {type(error).__name__}: {error}") from error
