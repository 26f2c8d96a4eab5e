"""Measure the kernels and the two ends of a refit, one thread, against copying and against reading the same bytes.

CPU seconds of this thread, not wall time: machines are shared. All rows of one run use the same arrays, rounds are interleaved,
and medians are reported; compare ratios, never seconds of two machines.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltarefit import kernels, payload
from deltarefit.canonical import TensorSpec, Words
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.kernels import Isa
from deltarefit.pieces import Piece, StridedView
from deltarefit.records import CodedItem, Encoding

__all__ = ["run"]

_TENSOR_ELEMENTS = 1_500_000
"""An expert's matrix, as in the paper's payload figures; the owner's and the receiver's rows work on such tensors."""
_BASE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard before and after a step, as bf16 words."""

    change_rate: float
    before: Words
    after: Words

    def tensors(self) -> list[tuple[TensorSpec, Words, Words]]:
        count = self.before.size // _TENSOR_ELEMENTS
        cuts = [slice(i * _TENSOR_ELEMENTS, (i + 1) * _TENSOR_ELEMENTS) for i in range(count)]
        return [
            (TensorSpec(f"layer.{i}", "BF16", (_TENSOR_ELEMENTS,)), self.before[cut], self.after[cut])
            for i, cut in enumerate(cuts)
        ]


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
    return _Shard(change_rate, before, after)


def _whole(num_elements: int) -> Piece:
    view = StridedView(0, (num_elements,), (1,))
    return Piece(view, view)


def _encode(items: Sequence[CodedItem]) -> bytes:
    return payload.encode(
        items,
        attempt=AttemptId("v000001-a1-bench"),
        owner=OwnerId(0),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest="0" * 32,
    )


def _scan(spec: TensorSpec, before: Words, after: Words, isa: Isa | None) -> CodedItem | None:
    return kernels.scan(spec, after, before, [_whole(before.size)], Encoding.DIFFERENCE, isa=isa).item


def _owner(shard: _Shard) -> bytes:
    items = [_scan(spec, before, after, None) for spec, before, after in shard.tensors()]
    return _encode([item for item in items if item is not None])


def _receiver(resident: Words, data: bytes) -> None:
    pieces = [_whole(_TENSOR_ELEMENTS)]
    for number, item in enumerate(payload.decode(data).items):
        kernels.apply_item(resident[number * _TENSOR_ELEMENTS : (number + 1) * _TENSOR_ELEMENTS], pieces, item)


def _apply_ready(resident: Words, items: Sequence[CodedItem]) -> None:
    pieces = [_whole(_TENSOR_ELEMENTS)]
    for number, item in enumerate(items):
        kernels.apply_item(resident[number * _TENSOR_ELEMENTS : (number + 1) * _TENSOR_ELEMENTS], pieces, item)


def _jobs(shard: _Shard) -> dict[tuple[str, str], Callable[[], object]]:
    """What is measured, by (name, isa)."""
    spec = TensorSpec("shard", "BF16", (shard.before.size,))
    piece = [_whole(shard.before.size)]
    copy, tracker, resident = np.empty_like(shard.before), shard.before.copy(), shard.before.copy()
    data = _owner(shard)
    items = payload.decode(data).items
    before, after = shard.before.view(np.uint64), shard.after.view(np.uint64)
    jobs: dict[tuple[str, str], Callable[[], object]] = {
        ("memcpy", ""): lambda: np.copyto(copy, shard.after),
        ("read", ""): lambda: (np.add.reduce(before), np.add.reduce(after)),
        ("owner", ""): lambda: _owner(shard),
        ("receiver", ""): lambda: _receiver(resident, data),
        ("apply", ""): lambda: _apply_ready(resident, items),
        ("digest", ""): lambda: kernels.digest(shard.after, piece),
        ("commit", ""): lambda: kernels.commit(tracker, shard.after, piece),
    }
    for isa in kernels.available_isas():
        if isa is not Isa.NUMPY:
            jobs["scan", isa.name.lower()] = lambda isa=isa: _scan(spec, shard.before, shard.after, isa)  # type: ignore[misc]
    return jobs


def _medians(jobs: Mapping[tuple[str, str], Callable[[], object]], rounds: int) -> dict[tuple[str, str], float]:
    spent: dict[tuple[str, str], list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start_s = time.thread_time()
            job()
            spent[name].append(time.thread_time() - start_s)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def _extra_memory(shard: _Shard) -> float:
    """Peak memory of one scan beyond its inputs, as a multiple of the columns that it returns."""
    spec = TensorSpec("shard", "BF16", (shard.before.size,))
    tracemalloc.start()
    try:
        item = _scan(spec, shard.before, shard.after, None)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planes = () if item is None else (*item.location_planes, *item.value_planes)
    return peak_nbytes / max(1, sum(plane.nbytes for plane in planes))


def run(
    *, nbytes: int = 512 * 2**20, change_rates: Sequence[float] = (0.01, 0.03, 0.05), rounds: int = 5, seed: int = 7
) -> dict[str, Any]:
    """Rows with ``name``, ``isa`` (empty: the best here), ``change_rate``, ``median_s`` and the two ratios.

    ``ratio_to_memcpy`` compares with copying the shard once; ``ratio_to_read`` with reading shard and baseline once each.
    """
    rows: list[dict[str, object]] = []
    memory: dict[str, float] = {}
    for change_rate in change_rates:
        shard = _shard(nbytes // 2 // 4 * 4, change_rate, seed)
        medians = _medians(_jobs(shard), rounds)
        memory[f"{change_rate:g}"] = _extra_memory(shard)
        for (name, isa), median_s in medians.items():
            rows.append(
                {
                    "name": name,
                    "isa": isa,
                    "change_rate": change_rate,
                    "median_s": median_s,
                    "ratio_to_memcpy": median_s / medians["memcpy", ""],
                    "ratio_to_read": median_s / medians["read", ""],
                }
            )
    return {"rows": rows, "scan_memory_to_outputs": memory}
