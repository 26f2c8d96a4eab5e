"""The residual stage of a refit: which computed tensors must be converted, and what changed in them (paper 4.3, Fig. A.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deltarefit import kernels
from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.pieces import Piece, whole
from deltarefit.plan import RefitPlan
from deltarefit.records import CodedItem, Encoding
from deltarefit.source.assembly import assemble, decode_parts, encode_parts
from deltarefit.source.baseline import allocate, count_changed
from deltarefit.source.buckets import cut_into_chunks
from deltarefit.source.collective import Collective, together
from deltarefit.source.conversion import ResidualConverter, ResidualPart, assembler_of, check_dependencies, required_tensors
from deltarefit.source.ownership import owned_tasks
from deltarefit.source.settings import SourceSettings
from deltarefit.source.task import ConversionTask
from deltarefit.source.trackers import TrackerSet

__all__ = ["Converted", "ResidualBaseline", "ResidualStage"]

_Incoming = dict[str, list[tuple[int, ResidualPart]]]
"""Parts by tensor name, each with the rank it came from."""
_LIST = msgspec.msgpack.Decoder(list[str])


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """One residual tensor that this rank assembled and compared."""

    spec: TensorSpec
    items: tuple[CodedItem, ...]
    num_changed: int


@dataclass(slots=True, eq=False)
class _Held:
    """The committed bits of one residual tensor, and what the candidate changes in them."""

    words: Words
    digest: TensorDigest = field(default_factory=TensorDigest)
    change: TensorDigest | None = None
    """None until the tensor is converted in this transition."""
    num_nans: int = 0
    overwrite: CodedItem | None = None
    """New bits of the changed elements, kept until the commit."""


class ResidualBaseline:
    """Committed canonical bits of the residual tensors that one rank assembles."""

    def __init__(self, specs: Sequence[TensorSpec], directory: Path | None) -> None:
        arena = allocate(sum(spec.nbytes for spec in specs) + 8 * len(specs), directory)
        self._specs = {spec.name: spec for spec in specs}
        self._held: dict[str, _Held] = {}
        start = 0
        for spec in specs:
            start += -start % spec.element_nbytes
            self._held[spec.name] = _Held(arena[start : start + spec.nbytes].view(spec.word_dtype))
            start += spec.nbytes
        self.nbytes = sum(spec.nbytes for spec in specs)

    def fill(self, spec: TensorSpec, words: Words) -> None:
        """Take these bits for committed."""
        held = self._held[spec.name]
        held.words[:] = words
        held.digest = kernels.digest(words, _pieces(spec))
        held.num_nans = kernels.count_nans(held.words, spec.dtype)

    def compare(self, spec: TensorSpec, words: Words, encoding: Encoding, *, everything: bool) -> Converted:
        """What differs from the committed bits; remembered until ``commit`` or ``forget``.

        Raises:
            OperatorRequiredError: an earlier attempt of this transition converted other bits.
        """
        held = self._held[spec.name]
        found = kernels.scan(spec, words, held.words, _pieces(spec), Encoding.OVERWRITE)
        if held.change is not None and held.change != found.digest_change:
            raise OperatorRequiredError(
                f"residual tensor {spec}: an earlier attempt of this transition converted it to other bits; expected the "
                "candidate to stay as it is and the conversion to depend on nothing else. End the transition with "
                "'deltarefit abort'"
            )
        held.change, held.overwrite = found.digest_change, found.item
        item = found.item
        num_changed = 0 if item is None else count_changed(item, words, held.words, _pieces(spec))
        if everything or (item is not None and encoding is not Encoding.OVERWRITE):
            item = kernels.scan(spec, words, held.words, _pieces(spec), encoding, everything=everything).item
        return Converted(spec, () if item is None else (item,), num_changed)

    def commit(self) -> None:
        """Write the new bits; may be repeated after an interruption."""
        for held in self._held.values():
            if held.overwrite is not None:
                view = whole(held.overwrite.spec.shape)
                kernels.apply_item(held.words, [Piece(view, view)], held.overwrite)
                held.num_nans = kernels.count_nans(held.words, held.overwrite.spec.dtype)
            if held.change is not None:
                held.digest = held.digest + held.change
                held.change = held.overwrite = None

    def forget(self) -> None:
        for held in self._held.values():
            held.change = held.overwrite = None

    @property
    def has_candidate(self) -> bool:
        return any(held.change is not None for held in self._held.values())

    def words(self, name: str) -> Words:
        """Committed bits. Not to be written to."""
        return self._held[name].words

    def digests(self) -> dict[str, TensorDigest]:
        return {name: held.digest for name, held in self._held.items()}

    def nans(self) -> dict[str, int]:
        """Tensors of which committed elements are NaN, and how many."""
        return {name: held.num_nans for name, held in self._held.items() if held.num_nans}

    def recount(self) -> dict[str, TensorDigest]:
        """``digests``, counted anew from the committed words."""
        return {name: kernels.digest(held.words, _pieces(self._specs[name])) for name, held in self._held.items()}

    def candidate_digests(self) -> dict[str, TensorDigest]:
        return {name: held.digest + (held.change or TensorDigest()) for name, held in self._held.items()}


class ResidualStage:
    """One rank's part in residual conversion. Every rank of the training job makes the same calls together."""

    def __init__(
        self,
        converter: ResidualConverter,
        sources: Sequence[ConversionTask],
        collective: Collective,
        settings: SourceSettings,
    ) -> None:
        """Watch those of the converter's sources that this rank owns, convert everything once, and keep it as committed.

        Raises:
            RejectedError: dependencies name what is not there, or a conversion failed; on every rank.
        """
        self._converter = converter
        self._collective = collective
        self._settings = settings
        self._groups = [tuple(group) for group in converter.groups()]
        self.specs: tuple[TensorSpec, ...] = tuple(spec for group in self._groups for spec in group)
        self._dependencies = converter.dependencies()
        mine = [spec for spec in self.specs if assembler_of(spec.name, collective.world_size) == collective.rank]
        self._watched, self.baseline = together(
            collective,
            "copying the sources of residual tensors",
            lambda: (
                TrackerSet(owned_tasks(sources, collective.rank), settings),
                ResidualBaseline(mine, settings.baseline_directory),
            ),
        )
        names = self._gather_names({tracker.task.spec.name for tracker in self._watched.baseline.trackers})
        check_dependencies({spec.name for spec in self.specs}, names, self._dependencies)
        self._convert({spec.name for spec in self.specs}, self.baseline.fill)

    @property
    def has_candidate(self) -> bool:
        return self._watched.has_candidate or self.baseline.has_candidate

    def build(self, plan: RefitPlan, mode: EncodingMode, *, before: Callable[[], None]) -> list[Converted]:
        """Convert what changed sources require, and compare what this rank assembles. Holds all collectives of an attempt.

        Raises:
            RefitError: whatever failed on any rank, ``before`` included, fails on all.
        """

        def changed_here() -> set[str]:
            before()
            return self._changed_sources()

        changed = self._gather_names(together(self._collective, "comparing residual sources", changed_here))
        required = required_tensors(changed, (spec.name for spec in self.specs), self._dependencies)
        wanted = {spec.name for spec in self.specs if spec.name in required or spec.name in plan.dense}
        found: list[Converted] = []

        def compare(spec: TensorSpec, words: Words) -> None:
            encoding = plan.encoding(spec.name, mode)
            found.append(self.baseline.compare(spec, words, encoding, everything=spec.name in plan.dense))

        self._convert(wanted, compare)
        return found

    def verify(self) -> None:
        """See TrackerSet."""
        self._watched.verify()

    def doubt(self) -> None:
        """See TrackerSet."""
        self._watched.doubt()

    def commit(self) -> None:
        """Make the candidate the baseline. Not collective; may be repeated after an interruption."""
        self.baseline.commit()
        self._watched.commit()

    def forget(self) -> None:
        self.baseline.forget()
        self._watched.forget()

    def digests(self) -> dict[str, TensorDigest]:
        return self.baseline.digests()

    def candidate_digests(self) -> dict[str, TensorDigest]:
        return self.baseline.candidate_digests()

    def _changed_sources(self) -> set[str]:
        """Names of watched sources of which any bit differs from the committed ones."""
        changed: set[str] = set()
        for chunk in self._watched.over_chunks(
            lambda trackers: [(tracker, tracker.scan(Encoding.OVERWRITE)) for tracker in trackers]
        ):
            for tracker, scanned in chunk:
                self._watched.pin(tracker, scanned.change)
                if scanned.items:
                    changed.add(tracker.task.spec.name)
        return changed

    def _gather_names(self, mine: set[str]) -> set[str]:
        """Change flags reduced over all ranks, by name: order does not matter, and a rank without any takes part."""
        gathered = self._collective.all_gather(msgspec.msgpack.encode(sorted(mine)))
        return {name for data in gathered for name in _LIST.decode(data)}

    def _convert(self, names: set[str], use: Callable[[TensorSpec, Words], None]) -> None:
        """Convert in rounds of bounded size, and hand each assembled tensor of this rank to ``use``."""
        groups = [tuple(spec for spec in group if spec.name in names) for group in self._groups]
        sized = [(group, sum(spec.nbytes for spec in group)) for group in groups if group]
        for groups_of_round in cut_into_chunks(sized, self._settings.chunk_nbytes * self._collective.world_size):
            self._convert_round([spec for group in groups_of_round for spec in group], use)

    def _convert_round(self, specs: Sequence[TensorSpec], use: Callable[[TensorSpec, Words], None]) -> None:
        def convert() -> list[ResidualPart]:
            return list(self._converter.convert(specs))

        parts = together(self._collective, "converting residual tensors", convert)
        incoming = self._exchange(specs, parts)

        def assemble_mine() -> None:
            for spec in specs:
                if assembler_of(spec.name, self._collective.world_size) == self._collective.rank:
                    use(spec, assemble(spec, incoming.get(spec.name, [])))

        together(self._collective, "assembling residual tensors", assemble_mine)

    def _exchange(self, specs: Sequence[TensorSpec], parts: Sequence[ResidualPart]) -> _Incoming:
        """Send each part to its assembler; the parts for this rank by name, with the rank each came from."""
        expected = {spec.name for spec in specs}
        world_size, rank = self._collective.world_size, self._collective.rank
        outgoing: list[list[ResidualPart]] = [[] for _ in range(world_size)]
        for part in parts:
            if part.spec.name not in expected:
                raise RejectedError(f"conversion gave {part.spec}, which was not asked for")
            outgoing[assembler_of(part.spec.name, world_size)].append(part)
        own, outgoing[rank] = outgoing[rank], []
        received = self._collective.all_to_all([encode_parts(listed) for listed in outgoing])
        by_name: _Incoming = {}
        for sender, data in enumerate(received):
            for part in own if sender == rank else decode_parts(data, sender):
                by_name.setdefault(part.spec.name, []).append((sender, part))
        return by_name


def _pieces(spec: TensorSpec) -> tuple[Piece, ...]:
    if not spec.num_elements:
        return ()
    view = whole(spec.shape)
    return (Piece(view, view),)
