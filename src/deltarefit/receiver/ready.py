"""What can be done about a payload before its turn: every check, and the tables that its items are applied with.

Engines serve while payloads are decoded, and a request gate may be closed while they are applied, so work is moved from there
to here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError
from deltarefit.plan import RefitPlan
from deltarefit.receiver.assembly import Prewarmed
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings
from deltarefit.records import CodedItem, Encoding

if TYPE_CHECKING:
    from deltarefit.payload import Payload

__all__ = ["ReadyItems", "ReadyPayload", "make_ready"]

_ENCODINGS = {int(encoding): encoding for encoding in Encoding}
_BLOCK = 128
"""Items that are tabulated at a time; a table takes some 400 bytes an item."""
_AHEAD_NBYTES = 8192
"""Decoded bytes an item, on average, from which on tables are made ahead: they then take a twentieth of them at most."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyItems:
    """Items of one payload."""

    direct: kernels.PreparedApply
    """Those that go straight to host memory."""
    others: tuple[CodedItem, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadyPayload:
    """A payload that fits one prewarm and one plan."""

    payload: Payload
    known: Prewarmed
    plan: RefitPlan
    parts: tuple[ReadyItems, ...]
    """All items, sorted already; empty if that would take much of the memory that the payload itself takes."""

    @property
    def held_nbytes(self) -> int:
        """See ``Payload``."""
        return self.payload.held_nbytes

    def items(self, settings: ReceiverSettings) -> Iterator[ReadyItems]:
        """All items, sorted; some at a time if that was not done ahead."""
        if self.parts:
            yield from self.parts
            return
        every = self.payload.items
        for start in range(0, len(every), _BLOCK):
            yield _sorted(every[start : start + _BLOCK], self.known, settings)


def make_ready(payload: Payload, known: Prewarmed, plan: RefitPlan, settings: ReceiverSettings) -> ReadyPayload:
    """Check a payload against the plan and sort its items. Writes nothing.

    Raises:
        PayloadInvalidError: it does not fit the plan.
    """
    where = f"payload {payload.header.sequence} of owner {payload.header.owner}, attempt {payload.header.attempt}"
    if payload.header.plan_digest != plan.digest:
        raise PayloadInvalidError(f"{where}: made for plan {payload.header.plan_digest}, this receiver prepared {plan.digest}")
    for spec, encoding in _kinds(payload.items):
        _check(spec, encoding, known, plan, where)
    is_ahead = payload.held_nbytes >= _AHEAD_NBYTES * len(payload.items)
    return ReadyPayload(payload, known, plan, (_sorted(payload.items, known, settings),) if is_ahead else ())


def _kinds(items: Sequence[CodedItem]) -> Iterable[tuple[TensorSpec, Encoding]]:
    if isinstance(items, kernels.ItemTable):
        return zip(items.rows.specs, map(_ENCODINGS.__getitem__, items.rows.encodings.tolist()), strict=True)
    return ((item.spec, item.encoding) for item in items)


def _sorted(items: Sequence[CodedItem], known: Prewarmed, settings: ReceiverSettings) -> ReadyItems:
    bound: list[kernels.BoundPieces] = []
    direct: list[int] = []
    others: list[int] = []
    goes_direct = settings.path is ApplyPath.COMPILED and not settings.verify_writes
    for number, (spec, _) in enumerate(_kinds(items)):
        if goes_direct and (homes := known.direct.get(spec.name)):
            bound.extend(homes)
            direct.extend([number] * len(homes))
        else:
            others.append(number)
    return ReadyItems(kernels.PreparedApply(bound, _chosen(items, direct)), tuple(items[number] for number in others))


def _chosen(items: Sequence[CodedItem], numbers: Sequence[int]) -> Sequence[CodedItem]:
    if isinstance(items, kernels.ItemTable):
        return items.take(numbers)
    return [items[number] for number in numbers]


def _check(spec: TensorSpec, encoding: Encoding, known: Prewarmed, plan: RefitPlan, where: str) -> None:
    name = spec.name
    wanted_spec = known.catalog.get(name)
    if wanted_spec is not spec and wanted_spec != spec:
        raise PayloadInvalidError(f"{where}: item of {spec}, expected {wanted_spec or 'a name of the catalog'}")
    if encoding is Encoding.OVERWRITE:
        return
    if name in plan.dense or encoding is not plan.encodings[name]:
        wanted = Encoding.OVERWRITE if name in plan.dense else plan.encodings[name]
        raise PayloadInvalidError(f"{where}: item of {name} is {encoding.name}, the plan says {wanted.name}")
