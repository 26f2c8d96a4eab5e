"""What can be done about a payload before its turn: every check, and the tables that its items are applied with.

Engines serve while payloads are decoded, and a request gate may be closed while they are applied, so work is moved from there
to here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltarefit import kernels
from deltarefit.errors import PayloadInvalidError
from deltarefit.plan import RefitPlan
from deltarefit.receiver.assembly import Prewarmed
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings
from deltarefit.receiver.writers import HostTarget
from deltarefit.records import CodedItem, Encoding

if TYPE_CHECKING:
    from deltarefit.payload import Payload

__all__ = ["ReadyItems", "ReadyPayload", "make_ready"]

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
    for item in payload.items:
        _check(item, known, plan, where)
    is_ahead = payload.held_nbytes >= _AHEAD_NBYTES * len(payload.items)
    return ReadyPayload(payload, known, plan, (_sorted(payload.items, known, settings),) if is_ahead else ())


def _sorted(items: Iterable[CodedItem], known: Prewarmed, settings: ReceiverSettings) -> ReadyItems:
    direct: list[tuple[kernels.BoundPieces, CodedItem]] = []
    others: list[CodedItem] = []
    for item in items:
        if bound := _bound(item.spec.name, known, settings):
            direct.extend((pieces, item) for pieces in bound)
        else:
            others.append(item)
    return ReadyItems(kernels.PreparedApply(direct), tuple(others))


def _check(item: CodedItem, known: Prewarmed, plan: RefitPlan, where: str) -> None:
    name = item.spec.name
    spec = known.catalog.get(name)
    if spec != item.spec:
        raise PayloadInvalidError(f"{where}: item of {item.spec}, expected {spec or 'a name of the catalog'}")
    if item.encoding is Encoding.OVERWRITE:
        return
    if name in plan.dense or item.encoding is not plan.encodings[name]:
        wanted = Encoding.OVERWRITE if name in plan.dense else plan.encodings[name]
        raise PayloadInvalidError(f"{where}: item of {name} is {item.encoding.name}, the plan says {wanted.name}")


def _bound(name: str, known: Prewarmed, settings: ReceiverSettings) -> list[kernels.BoundPieces]:
    """Pieces of all homes of a tensor, if each is in host memory and items go straight there; otherwise none."""
    if settings.path is not ApplyPath.COMPILED or settings.verify_writes:
        return []
    if known.report.routes[name].kind != "pieces" or name in known.kept or known.rerun_of(name) is not None:
        return []
    targets = known.targets[name]
    bound = [target.bound for target in targets if isinstance(target, HostTarget) and target.bound is not None]
    return bound if len(bound) == len(targets) else []
