"""What a rank can be asked to do, free of any engine: one operation at a time on one rank's model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from deltarefit.bits import dtype_name, logical_words
from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.payload import Limits, decode
from deltarefit.plan import RefitPlan
from deltarefit.receiver import PrewarmReport, RankDigest, RankReceiver

__all__ = ["RESULTS", "RankOperations", "RawTensor", "named_state"]


class RawTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bits of one parameter or buffer, in short."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    """Over the stored bits, row-major."""
    address: int
    """Of its first element; must never change while captured graphs point there."""


RESULTS: Mapping[str, Any] = {
    "prewarm": PrewarmReport,
    "prepare": None,
    "apply": int,
    "synchronize": None,
    "digests": dict[str, RankDigest],
    "drift": tuple[str, ...],
    "stale": str,
    "raw_state": dict[str, RawTensor],
}
"""Operation to the type of its result."""


def named_state(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter and buffer with all its names; tensors that share storage appear under each."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class RankOperations:
    """Carries out operations on one rank's receiver. ``check`` refuses models that cannot be refitted in place."""

    def __init__(
        self,
        model: Any,
        receiver: RankReceiver,
        *,
        check: Callable[[Any], None],
        key: bytes | None = None,
        limits: Limits | None = None,
        state: Callable[[Any], Iterable[tuple[str, Any]]] = named_state,
        check_catalog: Callable[[Catalog], None] | None = None,
    ) -> None:
        """``state``: the tensors of the model that ``raw_state`` shows; ``check_catalog`` refuses one before prewarm."""
        self._model = model
        self._state = state
        self._receiver = receiver
        self._check = check
        self._key = key
        self._limits = limits or Limits()
        self._check_catalog = check_catalog
        self._catalog: Catalog | None = None
        self._actions: Mapping[str, Callable[[memoryview], Any]] = {
            "prewarm": self._prewarm,
            "prepare": self._prepare,
            "apply": self._apply,
            "synchronize": lambda _: self._receiver.synchronize(),
            "digests": lambda _: self._receiver.digests(),
            "drift": lambda _: self._receiver.drift(),
            "stale": lambda _: self._receiver.stale(),
            "raw_state": lambda _: self._raw_state(),
        }

    def run(self, operation: str, data: memoryview) -> Any:
        """Carry out one operation; the result is of the type that ``RESULTS`` says.

        Raises:
            RejectedError: no such operation, or the operation refused its input.
            RefitError: what the operation itself raises.
        """
        if operation not in self._actions:
            raise RejectedError(
                f"operation {operation!r}: expected one of {', '.join(self._actions)}; both sides need one version"
            )
        return self._actions[operation](data)

    def _prewarm(self, data: memoryview) -> PrewarmReport:
        self._check(self._model)
        catalog = Catalog.from_wire(data)
        if self._check_catalog is not None:
            self._check_catalog(catalog)
        report = self._receiver.prewarm(catalog)
        self._catalog = catalog
        return report

    def _prepare(self, data: memoryview) -> None:
        self._receiver.prepare(RefitPlan.from_wire(data))

    def _apply(self, data: memoryview) -> int:
        if self._catalog is None:
            raise RejectedError("a payload came before prewarm; expected prewarm, prepare, then payloads")
        written: int = self._receiver.apply(decode(data, catalog=self._catalog, key=self._key, limits=self._limits))
        return written

    def _raw_state(self) -> dict[str, RawTensor]:
        return {name: _raw(tensor) for name, tensor in self._state(self._model)}


def _raw(tensor: Any) -> RawTensor:
    digest = hashlib.sha256(logical_words(tensor).tobytes()).hexdigest()
    return RawTensor(dtype_name(tensor.dtype), tuple(tensor.shape), digest, tensor.data_ptr())
