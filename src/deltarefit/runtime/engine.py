"""What the receiver agent needs of a rollout engine, and the engine that is just a torch module in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from deltarefit.canonical import Catalog
from deltarefit.errors import OperatorRequiredError
from deltarefit.payload import Limits, decode
from deltarefit.placement.after_load import AfterLoad
from deltarefit.plan import RefitPlan
from deltarefit.receiver import PrewarmReport, RankDigest, ReadyPayload, ReceiverSettings
from deltarefit.run_key import check_key
from deltarefit.runtime.adapters import rank_receiver
from deltarefit.runtime.gate import LocalGate, RequestGate, close_gate

__all__ = ["DecodingEngine", "EngineDriver", "LocalEngine", "require_done"]


def require_done(answer: object, what: str) -> None:
    """Take a hook's answer: None or True says that caches are gone; anything else, that they may not be.

    Raises:
        OperatorRequiredError: serving on would answer from older weights.
    """
    if answer is not None and answer is not True:
        raise OperatorRequiredError(
            f"{what}: expected None or True once caches of older weights are gone, got {answer!r:.200}; the request gate stays "
            "closed, and opens by itself once another try succeeds"
        )


class EngineDriver(Protocol):
    """One rollout engine, all its ranks together. Called from one thread at a time."""

    name: str
    """For reports, e.g. ``torch`` or ``vllm 0.32.0``."""

    @property
    def key(self) -> bytes | None:
        """The run's secret, if it has one: with it a receiver reads and writes payloads in this process."""

    def prewarm(self, catalog: Catalog) -> Sequence[PrewarmReport]:
        """Learn where each canonical tensor goes, on every rank, writing nothing. Raises RejectedError."""

    def prepare(self, plan: RefitPlan) -> None:
        """Fix the plan of the next attempt on every rank. Raises RejectedError."""

    def close_gate(self, timeout_s: float) -> None:
        """Stop serving and let running requests end. May be repeated. Raises DeadlineError."""

    def apply(self, data: bytes) -> int:
        """Apply one payload on every rank; returns the elements written, summed over ranks.

        Raises:
            PayloadInvalidError: it was refused before its first write.
            LoaderContractError: a loader misbehaved; some of it may have been written.
        """

    def synchronize(self) -> None:
        """Return once every write has reached its device."""

    def digests(self) -> Sequence[Mapping[str, RankDigest]]:
        """Per rank, digests of the canonical tensors computed from the bits it holds now."""

    def drift(self) -> Sequence[tuple[str, ...]]:
        """Per rank, storages whose bytes outside all canonical tensors have changed since prewarm."""

    def stale(self) -> str:
        """What has changed on any rank since prewarm so that it must be run again, in words; empty if nothing has."""

    def drop_caches(self) -> object:
        """Forget everything computed from older weights (prefix and KV caches). A refusal is an error; so is any answer but
        None and True, for many engines answer what they cannot do instead of raising."""

    def publish(self, policy_version: int) -> None:
        """Label the engine's answers with this version. Data only: it must not disturb requests."""

    def reopen_gate(self) -> None:
        """Serve again. May be repeated."""

    def covered(self) -> str:
        """What the digests cover, in words."""

    def close(self) -> None:
        """Release what the driver holds; the engine itself lives on."""


@runtime_checkable
class DecodingEngine(Protocol):
    """An engine that unpacks payloads in this process: then decoding overlaps with applying."""

    def decode(self, data: bytes) -> ReadyPayload:
        """Check and unpack a payload, and make it ready for its turn.

        May be called from several threads at once, also while another one is applied.

        Raises:
            PayloadInvalidError: it is damaged, forged, or does not fit the catalog or the plan.
        """

    def apply(self, data: bytes | ReadyPayload) -> int:
        """As ``EngineDriver.apply``; takes what ``decode`` returned, too."""


class LocalEngine:
    """A torch module with a loader, in this process (``Receiver.attach(model, load_weights=...)``)."""

    name = "torch"

    def __init__(
        self,
        model: Any,
        load_weights: Callable[[Iterable[tuple[str, Any]]], object],
        *,
        request_gate: RequestGate | None = None,
        on_refit: Callable[[int], object] | None = None,
        key: bytes | None = None,
        limits: Limits | None = None,
        settings: ReceiverSettings | None = None,
        after_load: AfterLoad | None = None,
    ) -> None:
        check_key(key)
        self._rank = rank_receiver(model, load_weights, settings=settings, after_load=after_load)
        self._gate = request_gate if request_gate is not None else LocalGate()
        self._on_refit = on_refit
        self._key = key
        self._limits = limits or Limits()
        self._catalog: Catalog | None = None
        self.policy_version: int | None = None

    @property
    def request_gate(self) -> RequestGate:
        return self._gate

    @property
    def key(self) -> bytes | None:
        return self._key

    def prewarm(self, catalog: Catalog) -> Sequence[PrewarmReport]:
        self._catalog = catalog
        return (self._rank.prewarm(catalog),)

    def prepare(self, plan: RefitPlan) -> None:
        self._rank.prepare(plan)

    def close_gate(self, timeout_s: float) -> None:
        close_gate(self._gate, timeout_s)

    def apply(self, data: bytes | ReadyPayload) -> int:
        return self._rank.apply(self.decode(data) if isinstance(data, bytes) else data)

    def decode(self, data: bytes) -> ReadyPayload:
        return self._rank.ready(decode(data, catalog=self._catalog, key=self._key, limits=self._limits))

    def synchronize(self) -> None:
        self._rank.synchronize()

    def digests(self) -> Sequence[Mapping[str, RankDigest]]:
        return (self._rank.digests(),)

    def drift(self) -> Sequence[tuple[str, ...]]:
        return (self._rank.drift(),)

    def stale(self) -> str:
        return self._rank.stale()

    def drop_caches(self) -> None:
        """A bare module has no caches; its owner clears what it keeps in ``on_refit``, which may refuse."""

    def publish(self, policy_version: int) -> None:
        if self._on_refit is not None:
            require_done(self._on_refit(policy_version), "on_refit")
        self.policy_version = policy_version

    def reopen_gate(self) -> None:
        self._gate.reopen()

    def covered(self) -> str:
        return "every parameter and buffer that a canonical tensor reaches, on 1 rank"

    def close(self) -> None:
        self._catalog = None
