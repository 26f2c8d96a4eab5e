"""From an adapter to an owner: the one order in which the source side is set up and audited."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deltarefit.canonical import Catalog
from deltarefit.ids import OwnerId
from deltarefit.source.audit import agree_on_catalog, audit_coverage, audit_replicas
from deltarefit.source.collective import Collective, together
from deltarefit.source.conversion import ExplainedConverter, ResidualConverter
from deltarefit.source.coverage import CoverageReport, coverage_of
from deltarefit.source.owner import Owner
from deltarefit.source.ownership import owned_tasks
from deltarefit.source.replicas import find_replicas
from deltarefit.source.residual import ResidualStage
from deltarefit.source.settings import SourceSettings
from deltarefit.source.task import ConversionTask, ResidualSource, SourceAdapter

__all__ = ["Source", "open_source"]


class _Counted(msgspec.Struct, frozen=True, array_like=True):
    """What one rank owns, by place in the catalog."""

    items: dict[int, int]
    casts: dict[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One training rank's side, audited and ready to build."""

    adapter: SourceAdapter
    catalog: Catalog
    tasks: tuple[ConversionTask, ...]
    """Every shard this rank holds, in key order."""
    sources: tuple[ConversionTask, ...]
    """Every shard it holds of what residual tensors are computed from."""
    owner: Owner
    residual: Mapping[str, str]
    """Canonical tensors that are computed rather than rearranged, and why. The paper sends them as overwrites (4.3); their old
    bits are at hand here, so any encoding that the plan names is exact."""
    fingerprint: str
    """32 hex digits over this rank's catalog, shards and replica sets: it changes when names, shapes or layout do."""

    @property
    def residual_names(self) -> frozenset[str]:
        return frozenset(self.residual)

    def coverage(self, collective: Collective) -> CoverageReport:
        """How much is sent directly, and in how many items if everything changes. Every rank must call it; reads no weights."""
        places = {name: place for place, name in enumerate(self.catalog)}
        items: dict[int, int] = {}
        casts: dict[int, str] = {}
        for tracker in self.owner.baseline.trackers:
            place = places[tracker.task.spec.name]
            items[place] = items.get(place, 0) + len(tracker.groups)
            if tracker.task.stored_dtype:
                casts[place] = tracker.task.stored_dtype
        data = collective.all_gather(msgspec.msgpack.encode(_Counted(items, casts)))
        counted = [msgspec.msgpack.decode(part, type=_Counted) for part in data]
        names = tuple(self.catalog)
        total = {name: int(name in self.residual) for name in names}  # an assembled tensor is one item of its assembler
        for one in counted:
            for place, count in one.items.items():
                total[names[place]] += count
        stored = {names[place]: dtype for one in counted for place, dtype in one.casts.items()}
        reasons = {
            name: f"held as {dtype}, rounded to {self.catalog[name].dtype} before it is compared"
            for name, dtype in stored.items()
        }
        return coverage_of(self.catalog, residual=self.residual, cast=reasons, items=total)

    def check_replicas(self, collective: Collective) -> None:
        """Compare all copies bit for bit, now. Every rank must call it between steps; it reads all weights.

        Raises:
            RejectedError: copies differ; the text names tensors and ranks.
        """
        self.adapter.barrier()
        audit_replicas((*self.tasks, *self.sources), collective)


def open_source(adapter: SourceAdapter, collective: Collective, settings: SourceSettings | None = None) -> Source:
    """Read the adapter's facts, prove them, and copy the present parameters as the committed baseline.

    Called by every training rank, with equal settings. Every rank raises if one does.

    Raises:
        RejectedError: catalogs differ between ranks, an element has no owner or several, replicas differ bitwise, or there is
            no room for the baseline.
    """
    settings = settings or SourceSettings()
    catalog, tasks = together(collective, "reading the model's facts", lambda: (adapter.catalog(), _sorted(adapter.tasks())))
    agree_on_catalog(catalog, collective)
    tasks = find_replicas(tasks, collective)
    owned = together(collective, "electing owners", lambda: owned_tasks(tasks, collective.rank))
    converter = adapter.residual() if isinstance(adapter, ResidualSource) else None
    sources = find_replicas(converter.sources(), collective) if converter is not None else ()
    residual = _reasons(converter) if converter is not None else {}
    audit_coverage(catalog, owned, collective, residual=residual.keys())
    adapter.barrier()
    if settings.check_replicas:
        audit_replicas((*tasks, *sources), collective)
    stage = ResidualStage(converter, sources, collective, settings) if converter is not None else None
    owner = together(collective, "copying the baseline", lambda: Owner(OwnerId(collective.rank), owned, settings, stage))
    return Source(adapter, catalog, tasks, sources, owner, residual, _fingerprint(catalog, tasks))


def _reasons(converter: ResidualConverter) -> dict[str, str]:
    """The residual tensors, with what the converter says about each."""
    given = converter.reasons() if isinstance(converter, ExplainedConverter) else {}
    return {spec.name: given.get(spec.name, "computed by the export") for group in converter.groups() for spec in group}


def _sorted(tasks: Sequence[ConversionTask]) -> tuple[ConversionTask, ...]:
    return tuple(sorted(tasks, key=lambda task: task.key))


def _fingerprint(catalog: Catalog, tasks: Sequence[ConversionTask]) -> str:
    lines = "".join(f"{task.key}\0{task.spec.name}\0{task.num_elements}\0{task.replicas}\n" for task in tasks)
    return hashlib.blake2b(f"{catalog.digest}\n{lines}".encode(), digest_size=16).hexdigest()
