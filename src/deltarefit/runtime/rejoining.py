"""How a receiver catches up from the run's store alone: committed payloads since its own version, folded into one change.

Everything is fetched, checked and merged before the first write, so whatever is missing or wrong by then costs nothing. From
the first write on, what the engine holds counts as unknown until its digests have proved the committed version. See design
note 0009.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deltarefit import payload
from deltarefit.canonical import Catalog, TensorDigest, TensorSpec
from deltarefit.errors import AttemptFailedError, BaseMismatchError, PayloadInvalidError, PayloadMissingError, RejectedError
from deltarefit.ids import AttemptId, OwnerId
from deltarefit.payload.compose import Changes
from deltarefit.plan import RefitPlan
from deltarefit.protocol import ChainLink
from deltarefit.records import CodedItem, Encoding
from deltarefit.runtime.engine import EngineDriver
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.receiver_desk import MAX_PLAN_NBYTES
from deltarefit.runtime.retaining import read_digests
from deltarefit.transport import PayloadEntry, PayloadSource, RunStore, keys, read_manifest

__all__ = ["Rejoining"]

_LOG = logging.getLogger(__name__)
_BUCKET_NBYTES = 64 * 2**20
_BUCKET_ITEMS = 8192
Shown = Mapping[str, TensorDigest | None]
"""Per tensor that the engine holds, the digest of its bits; None where they prove nothing."""


@dataclass(frozen=True, slots=True)
class _Folded:
    """A chain as one attempt of one owner."""

    plan: RefitPlan
    payloads: tuple[bytes, ...]


class Rejoining:
    """Brings one receiver's engine to the committed version. Used by the receiver's thread, while no attempt is at hand."""

    def __init__(
        self,
        *,
        engine: EngineDriver,
        store: RunStore,
        source: PayloadSource,
        log: EventLog,
        may_act: Callable[[], bool],
        request_timeout_s: float,
        max_nbytes: int,
        num_threads: int,
    ) -> None:
        """Store the arguments.

        Args:
            engine: prewarmed, its request gate closed.
            store: the run's.
            source: where payloads are fetched.
            log: hears of the stages.
            may_act: whether this receiver's lease holds.
            request_timeout_s: how long requests that are still running may take to end.
            max_nbytes: longer chains are not taken: all of one is held in memory.
            num_threads: fetching and decoding.
        """
        self._engine = engine
        self._store = store
        self._source = source
        self._log = log
        self._may_act = may_act
        self._request_timeout_s = request_timeout_s
        self._max_nbytes = max_nbytes
        self._num_threads = num_threads

    def catch_up(
        self,
        links: Sequence[ChainLink],
        shown: Shown,
        catalog: Catalog,
        *,
        begins: Callable[[], None],
        survey: Callable[[], Shown],
    ) -> bool:
        """Bring the engine from the version that it holds to the one that the last link leads to.

        Args:
            links: what the control record retains; at least one.
            shown: what the engine holds.
            catalog: the run's, prewarmed for.
            begins: called right before the first write.
            survey: tells what the engine holds then.

        Returns:
            True once the engine has proved that it holds it; False, and nothing was written, if no link starts from what it
            holds.

        Raises:
            RefitError: it did not work. Nothing was written unless ``begins`` was called.
        """
        chain, target = self._find(links, shown, catalog)
        if chain is None:
            return False
        if not chain:
            return True
        first, last = chain[0], chain[-1]
        _LOG.info("catching up from policy version %d to %d", first.base_version, last.target_version)
        folded = self._fold(chain, shown, catalog)
        self._engine.close_gate(self._request_timeout_s)
        self._engine.prepare(folded.plan)
        begins()
        for number, data in enumerate(folded.payloads):
            if not self._may_act():
                raise AttemptFailedError(f"its lease ran out on the way to policy version {last.target_version}")
            with self._log.stage("apply", _name(chain), nbytes=len(data), payload=str(number)):
                self._engine.apply(data)
        self._engine.synchronize()
        with self._log.stage("verify", _name(chain)):
            self._prove(survey(), target, last)
        return True

    # --- where it stands --------------------------------------------------------------------------------------------

    def _find(
        self, links: Sequence[ChainLink], shown: Shown, catalog: Catalog
    ) -> tuple[tuple[ChainLink, ...] | None, Mapping[str, TensorDigest]]:
        """The shortest chain from what the engine holds, empty if it needs none; and the digests at its end."""
        base, target = read_digests(self._store, links[-1], catalog)
        if all(digest == target[name] for name, digest in shown.items()):
            return (), target
        for number in reversed(range(len(links))):
            if number < len(links) - 1:
                base, _ = read_digests(self._store, links[number], catalog)
            if all(digest is None or digest == base[name] for name, digest in shown.items()):
                return self._affordable(tuple(links[number:])), target
        _LOG.warning(
            "what the engine holds is none of policy versions %d to %d: payloads up to version %d are not retained any more; "
            "nothing is written",
            links[0].base_version,
            links[-1].target_version,
            links[0].base_version,
        )
        return None, target

    def _affordable(self, chain: tuple[ChainLink, ...]) -> tuple[ChainLink, ...] | None:
        nbytes = sum(link.nbytes for link in chain)
        if nbytes <= self._max_nbytes:
            return chain
        _LOG.info("a chain of %d bytes is retained, staging_nbytes allows %d: not taken", nbytes, self._max_nbytes)
        return None

    def _prove(self, shown: Shown, target: Mapping[str, TensorDigest], last: ChainLink) -> None:
        wrong = [name for name, digest in shown.items() if digest != target[name]]
        if wrong:
            raise BaseMismatchError(
                f"after catching up to policy version {last.target_version}, {len(wrong)} tensors are not those of it, first "
                f"{wrong[0]}; the next refit() sends them whole"
            )

    # --- the chain --------------------------------------------------------------------------------------------------

    def _fold(self, chain: tuple[ChainLink, ...], shown: Shown, catalog: Catalog) -> _Folded:
        """All of it as one set of changes.

        Raises:
            RejectedError: it cannot be merged, or leaves a tensor unproven.
        """
        changes = self._changes(chain, shown, catalog)
        folded: dict[str, list[CodedItem]] = {}
        for name in catalog:
            if name in changes:
                folded[name] = _merged(catalog[name], changes.pop(name), _name(chain))
        whole = frozenset(name for name, items in folded.items() if _is_whole(catalog[name], items))
        if unproven := [name for name, digest in shown.items() if digest is None and name not in whole]:
            raise RejectedError(
                f"{_name(chain)}: it does not send all of {unproven[0]}, and only a whole load of that can be proved"
            )
        encodings = {name: _encoding_of(folded.get(name, ()), f"{_name(chain)}, tensor {name}") for name in catalog}
        # A tensor without changes is as good as sent whole: the engine already holds all of it.
        plan = RefitPlan(catalog, encodings, 1, whole.union(name for name in catalog if not folded.get(name)))
        return _Folded(plan, tuple(self._encoded(chain, plan, folded)))

    def _changes(self, chain: tuple[ChainLink, ...], shown: Shown, catalog: Catalog) -> dict[str, list[list[CodedItem]]]:
        """Per tensor that the engine holds, the items of each link that changes it, oldest first."""
        changes: dict[str, list[list[CodedItem]]] = {}
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="deltarefit-chain") as pool:
            for link in chain:
                found: dict[str, list[CodedItem]] = {}
                for decoded in self._decoded(pool, link, catalog):
                    for item in decoded.items:
                        if item.spec.name in shown:
                            found.setdefault(item.spec.name, []).append(item)
                for name, items in found.items():
                    changes.setdefault(name, []).append(items)
        return changes

    def _decoded(self, pool: ThreadPoolExecutor, link: ChainLink, catalog: Catalog) -> Iterator[payload.Payload]:
        """All payloads of a link.

        Raises:
            PayloadMissingError: not all of them are there.
        """
        plan = self._store.get_as(keys.plan(link.plan_digest), RefitPlan.from_wire, max_nbytes=MAX_PLAN_NBYTES)
        if plan.catalog != catalog or plan.digest != link.plan_digest:
            raise PayloadInvalidError(f"{link.attempt}: its plan {link.plan_digest} is for another catalog")
        manifest = read_manifest(self._store, link.attempt)
        if lacking := manifest.lacks(plan.num_owners):
            raise PayloadMissingError(f"{link.attempt}: owner {lacking[0]} never ended, or its manifest is gone")
        return pool.map(lambda entry: self._decode(link, entry, catalog), manifest.entries)

    def _decode(self, link: ChainLink, entry: PayloadEntry, catalog: Catalog) -> payload.Payload:
        name = entry.payload_id(link.attempt)
        data = self._source.fetch(name, nbytes=entry.nbytes, digest=entry.digest)
        with self._log.stage("decode", link.attempt, nbytes=len(data), payload=str(name)):
            decoded = payload.decode(data, catalog=catalog, key=self._engine.key)
        header = decoded.header
        found = (header.payload_id, header.base_version, header.target_version, header.plan_digest)
        if found != (name, link.base_version, link.target_version, link.plan_digest):
            raise PayloadInvalidError(f"{name}: its header says {found}, the control record {link}")
        return decoded

    def _encoded(self, chain: tuple[ChainLink, ...], plan: RefitPlan, folded: Mapping[str, list[CodedItem]]) -> Iterator[bytes]:
        for sequence, bucket in enumerate(_buckets(item for items in folded.values() for item in items)):
            yield payload.encode(
                bucket,
                attempt=_name(chain),
                owner=OwnerId(0),
                sequence=sequence,
                base_version=chain[0].base_version,
                target_version=chain[-1].target_version,
                plan_digest=plan.digest,
                key=self._engine.key,
            )


def _name(chain: tuple[ChainLink, ...]) -> AttemptId:
    """What the folded chain's payloads and events go by. No attempt has such a name."""
    return AttemptId(f"chain-{chain[0].base_version}-{chain[-1].target_version}")


def _merged(spec: TensorSpec, steps: Iterable[list[CodedItem]], where: str) -> list[CodedItem]:
    """What several links do to one tensor, as items of disjoint elements. Takes about four times its bytes meanwhile."""
    changes = Changes(spec.word_dtype, spec.num_elements, spec.num_elements)
    for items in steps:
        changes.then(items, f"{where}, tensor {spec.name}")
    return changes.coded(spec)


def _encoding_of(items: Iterable[CodedItem], where: str) -> Encoding:
    """What a plan says of a tensor with these items: a plan has one encoding that is not repeatable, or none.

    Raises:
        RejectedError: the items need more than one.
    """
    relative = {item.encoding for item in items if not item.encoding.is_repeatable}
    if len(relative) > 1:
        named = " and ".join(sorted(encoding.name.lower() for encoding in relative))
        raise RejectedError(f"{where}: its retained payloads need {named} together, which one plan cannot say")
    return relative.pop() if relative else Encoding.OVERWRITE


def _is_whole(spec: TensorSpec, items: Iterable[CodedItem]) -> bool:
    return spec.num_elements == sum(item.count for item in items if item.encoding is Encoding.OVERWRITE)


def _buckets(items: Iterable[CodedItem]) -> Iterator[list[CodedItem]]:
    """Cut into what goes into one payload each."""
    bucket: list[CodedItem] = []
    nbytes = 0
    for item in items:
        if bucket and (nbytes >= _BUCKET_NBYTES or len(bucket) == _BUCKET_ITEMS):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(item)
        nbytes += sum(plane.size for plane in (*item.location_planes, *item.value_planes))
    if bucket:
        yield bucket
