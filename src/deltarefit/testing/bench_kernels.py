"""Measure the kernels and the two ends of a refit, one thread, against copying and against reading the same bytes.

CPU seconds of this thread, not wall time: machines are shared. All rows of a change rate use the same arrays, and every round
runs every row once, so a ratio is taken between neighbours; what is reported is the median of the rounds' ratios. Compare
ratios, never seconds of two machines.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltarefit import kernels, payload
from deltarefit.canonical import Catalog, TensorSpec, Words
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.kernels import BoundPieces, Isa, native
from deltarefit.pieces import Piece, StridedView
from deltarefit.records import CodedItem, Encoding
from deltarefit.runtime.clock import SystemClock
from deltarefit.source.buckets import cut_into_chunks
from deltarefit.source.settings import SourceSettings

__all__ = ["run"]

_TENSOR_ELEMENTS = 1_500_000
"""An expert's matrix, as in the paper's payload figures; the owner's and the receiver's rows work on such tensors."""
_PAYLOAD_TENSORS = 10
_BASE_ELEMENTS = 1 << 24

Name = tuple[str, str]
"""What a row measures and on which instruction set; empty: the best here."""
Jobs = Mapping[Name, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor before and after a step, as bf16 words, with what an owner keeps of it from refit to refit."""

    spec: TensorSpec
    before: Words
    after: Words
    table: kernels.PieceTable

    @classmethod
    def of(cls, name: str, before: Words, after: Words) -> _Tensor:
        return cls(TensorSpec(name, "BF16", (before.size,)), before, after, kernels.PieceTable(_whole(before.size)))


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard before and after a step, as bf16 words."""

    before: Words
    after: Words

    def tensors(self) -> list[_Tensor]:
        count = self.before.size // _TENSOR_ELEMENTS
        cuts = [slice(i * _TENSOR_ELEMENTS, (i + 1) * _TENSOR_ELEMENTS) for i in range(count)]
        return [_Tensor.of(f"layer.{i}", self.before[cut], self.after[cut]) for i, cut in enumerate(cuts)]

    def whole(self) -> _Tensor:
        return _Tensor.of("shard", self.before, self.after)


def _shard(num_elements: int, change_rate: float, seed: int) -> _Shard:
    """Normal values; at random places a relative change of about 1e-2, at least one bit (paper 8.1)."""
    rng = np.random.default_rng(seed)
    base = (rng.standard_normal(min(num_elements, _BASE_ELEMENTS), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    before = np.resize(base, num_elements)
    after = before.copy()
    places = rng.integers(0, num_elements, int(change_rate * num_elements * (1 + change_rate / 2)))
    old = (before[places].astype(np.uint32) << 16).view(np.float32)
    moved = old * (1 + 0.01 * rng.standard_normal(places.size).astype(np.float32))
    new = ((moved.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    after[places] = np.where(new == before[places], new ^ 1, new)
    return _Shard(before, after)


def _encode(items: Sequence[CodedItem]) -> bytes:
    """Byte planes, zstd and the keyless BLAKE2b digest of a payload."""
    return payload.encode(
        items,
        attempt=AttemptId("v000001-a1-bench"),
        owner=OwnerId(0),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest="0" * 32,
    )


def _scan(tensor: _Tensor, isa: Isa | None = None) -> CodedItem | None:
    return kernels.scan(tensor.spec, tensor.after, tensor.before, tensor.table, Encoding.DIFFERENCE, isa=isa).item


def _owner(tensors: Sequence[_Tensor], isa: Isa | None = None) -> bytes:
    """As owners do it: a chunk of tensors in one call."""
    items = []
    for chunk in cut_into_chunks([(tensor, tensor.spec.nbytes) for tensor in tensors], SourceSettings().chunk_nbytes):
        jobs = [kernels.ScanJob(one.spec, one.after, one.before, one.table, Encoding.DIFFERENCE) for one in chunk]
        items += [result.item for result in kernels.scan_many(jobs, isa=isa)]
    return _encode([item for item in items if item is not None])


def _whole(num_elements: int) -> tuple[Piece, ...]:
    view = StridedView(0, (num_elements,), (1,))
    return (Piece(view, view),)


def _bind(resident: Words, shard: _Shard, isa: Isa | None) -> list[BoundPieces]:
    pieces = _whole(_TENSOR_ELEMENTS)
    return [
        BoundPieces(resident[number * _TENSOR_ELEMENTS : (number + 1) * _TENSOR_ELEMENTS], pieces, tensor.spec, isa=isa)
        for number, tensor in enumerate(shard.tensors())
    ]


def _apply(bound: Sequence[BoundPieces], items: Sequence[CodedItem]) -> None:
    """As receivers do it."""
    kernels.PreparedApply(bound, items).run(num_threads=1)


def _receiver(bound: Sequence[BoundPieces], data: bytes, catalog: Catalog) -> None:
    _apply(bound, payload.decode(data, catalog=catalog).items)


def _jobs(shard: _Shard) -> dict[Name, Callable[[], object]]:
    """Everything that is measured on one shard. ``receiver`` includes checking the payload's digest and decompressing."""
    whole, tensors = shard.whole(), shard.tensors()
    copy, tracker, resident = np.empty_like(shard.before), shard.before.copy(), shard.before.copy()
    data = _owner(tensors)
    catalog = Catalog(tensor.spec for tensor in tensors)
    items = payload.decode(data, catalog=catalog).items
    fastest = kernels.available_isas()[-1]
    jobs: dict[Name, Callable[[], object]] = {("memcpy", ""): lambda: np.copyto(copy, shard.after)}
    if fastest is Isa.NUMPY:
        jobs["read", ""] = lambda: (np.add.reduce(shard.before), np.add.reduce(shard.after))
    else:
        jobs["read", ""] = lambda: native.read_both(shard.before, shard.after, fastest)
    for isa in kernels.available_isas():
        if isa is Isa.NUMPY and isa is not fastest:
            continue
        bound = _bind(resident, shard, isa)
        measured = {
            "scan": lambda isa=isa: _scan(whole, isa),
            "owner": lambda isa=isa: _owner(tensors, isa),
            "receiver": lambda bound=bound: _receiver(bound, data, catalog),
            "apply": lambda bound=bound: _apply(bound, items),
            "digest": lambda isa=isa: kernels.digest(shard.after, whole.table.pieces, isa=isa),
            "commit": lambda isa=isa: kernels.commit_many([(tracker, shard.after, whole.table, "")], isa=isa),
        }
        jobs |= {(name, isa.name.lower()): job for name, job in measured.items()}
    return jobs


def _rounds(jobs: Jobs, rounds: int) -> list[dict[Name, float]]:
    """Seconds of every job in every round; the first, unmeasured, round warms memory and caches."""
    measured: list[dict[Name, float]] = []
    for number in range(-1, rounds):
        spent: dict[Name, float] = {}
        for name, job in jobs.items():
            start_s = time.thread_time()
            job()
            spent[name] = time.thread_time() - start_s
        if number >= 0:
            measured.append(spent)
    return measured


def _extra_memory(shard: _Shard) -> float:
    """Peak memory of one scan beyond its inputs, as a multiple of the columns that it returns."""
    whole = shard.whole()
    tracemalloc.start()
    try:
        item = _scan(whole)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planes = () if item is None else (*item.location_planes, *item.value_planes)
    return peak_nbytes / max(1, sum(plane.nbytes for plane in planes))


def _speedup_of_two_threads(shard: _Shard, rounds: int = 5) -> float:
    """Wall time of scanning both halves of the shard one after the other, over that of two threads: 2 on two idle cores."""
    half = shard.before.size // 2
    cuts = (slice(0, half), slice(half, 2 * half))
    halves = [_Tensor.of("half", shard.before[cut], shard.after[cut]) for cut in cuts]
    clock = SystemClock()
    ratios = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(rounds):
            start_s = clock.monotonic_s()
            for tensor in halves:
                _scan(tensor)
            one_s = clock.monotonic_s() - start_s
            start_s = clock.monotonic_s()
            list(pool.map(_scan, halves))
            ratios.append(one_s / (clock.monotonic_s() - start_s))
    return statistics.median(ratios)


def _receiver_on_two_threads(shard: _Shard, rounds: int = 7) -> float:
    """Wall time of decoding and applying on two threads, a payload each as receivers do, over that of one copy of the shard."""
    copy, resident = np.empty_like(shard.before), shard.before.copy()
    bound, tensors = _bind(resident, shard, None), shard.tensors()
    cuts = [slice(start, start + _PAYLOAD_TENSORS) for start in range(0, len(tensors), _PAYLOAD_TENSORS)]
    payloads = [_owner(tensors[cut]) for cut in cuts]
    catalog = Catalog(tensor.spec for tensor in tensors)

    def receive(number: int) -> None:
        _receiver(bound[cuts[number]], payloads[number], catalog)

    clock = SystemClock()
    ratios = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(rounds):
            start_s = clock.monotonic_s()
            np.copyto(copy, shard.after)
            copy_s = clock.monotonic_s() - start_s
            start_s = clock.monotonic_s()
            list(pool.map(receive, range(len(payloads))))
            ratios.append((clock.monotonic_s() - start_s) / copy_s)
    return statistics.median(ratios)


def _row(name: Name, change_rate: float, rounds: Sequence[Mapping[Name, float]]) -> dict[str, object]:
    return {
        "name": name[0],
        "isa": name[1],
        "change_rate": change_rate,
        "median_s": statistics.median(spent[name] for spent in rounds),
        "ratio_to_memcpy": statistics.median(spent[name] / spent["memcpy", ""] for spent in rounds),
        "ratio_to_read": statistics.median(spent[name] / spent["read", ""] for spent in rounds),
    }


def run(
    *, nbytes: int = 512 * 2**20, change_rates: Sequence[float] = (0.01, 0.03, 0.05), rounds: int = 7, seed: int = 7
) -> dict[str, Any]:
    """Rows with ``name``, ``isa``, ``change_rate``, ``median_s`` and the two ratios; needs about six times ``nbytes``.

    ``ratio_to_memcpy`` compares with copying the shard once; ``ratio_to_read`` with reading shard and baseline once each.
    ``scan_memory_to_outputs`` is the peak memory of a scan over the columns that it returns, ``two_threads_speedup`` how much
    faster two threads scan it than one, ``receiver_two_threads_to_memcpy`` is the row ``receiver`` as receivers run it; all by
    change rate. The last two are wall time and want two idle cores.
    """
    rows: list[dict[str, object]] = []
    memory: dict[str, float] = {}
    speedup: dict[str, float] = {}
    receiver: dict[str, float] = {}
    for change_rate in change_rates:
        shard = _shard(nbytes // 2 // 4 * 4, change_rate, seed)
        jobs = _jobs(shard)
        measured = _rounds(jobs, rounds)
        memory[f"{change_rate:g}"] = _extra_memory(shard)
        speedup[f"{change_rate:g}"] = _speedup_of_two_threads(shard)
        receiver[f"{change_rate:g}"] = _receiver_on_two_threads(shard)
        rows += [_row(name, change_rate, measured) for name in jobs]
    return {
        "rows": rows,
        "scan_memory_to_outputs": memory,
        "two_threads_speedup": speedup,
        "receiver_two_threads_to_memcpy": receiver,
    }
