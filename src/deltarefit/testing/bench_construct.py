"""Seconds and bytes of building a delta at the source: the paper's three modes (8.3, Table 3) and ours, in one run.

Layers of Qwen3-30B-A3B's shapes as two tensor-parallel ranks of Megatron hold them: queries, keys and values fused group by
group, gate and up projections fused, whole experts. Weights are normal; at each rate random elements are multiplied by
1 + 0.01 z, as in the paper's stress cases. Modes:

* ``X``: the five mapping classes of the paper go directly, the rest is assembled and converted; xor masks, overwrites.
* ``P``: the same, overwrites only.
* ``F``: every tensor is assembled and converted before it is compared; overwrites only.
* ``ours``: everything is a list of pieces and goes directly; differences.

All modes run on the same kernels, threads and payload format, so that seconds differ by what is assembled and what is encoded.
Bytes of X, P and F are those of the paper's layout, computed apart: gaps in the smallest width per item and whole words, under
zstd level 1. Assembling is one copy of the tensor here; between real ranks it is a collective.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from deltarefit import kernels, payload
from deltarefit.canonical import TensorSpec, Words
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.pieces import Piece, StridedView, strided, whole
from deltarefit.records import Bucket, CodedItem, Encoding
from deltarefit.runtime.clock import SystemClock
from deltarefit.source import (
    ConversionTask,
    SourceBaseline,
    SourceSettings,
    TaskTracker,
    cut_into_buckets,
    cut_into_chunks,
    onto_shard,
)
from deltarefit.source.baseline import fill
from deltarefit.testing.bench_codec import changed_words, rounded_to_bfloat16

__all__ = ["run"]

HIDDEN, HEADS, GROUPS, HEAD, EXPERT = 2048, 32, 4, 128, 768
"""Of config.json of Qwen/Qwen3-30B-A3B, as is the default of 128 experts."""
_RANKS = 2
_PAPER_BYTES_PER_CHANGE: Mapping[tuple[str, float], float] = {
    ("X", 0.03): 1.63, ("X", 0.05): 1.50, ("P", 0.03): 2.66, ("P", 0.05): 2.49, ("F", 0.03): 2.66, ("F", 0.05): 2.49,
}  # fmt: skip
"""Table 3: GB of payload over changed elements of the 30B model."""
_Job = Callable[[], list[CodedItem]]
Part = tuple[tuple[CodedItem, ...], int]
"""Items of one chunk and its input bytes."""


@dataclass(frozen=True, slots=True)
class _Mode:
    name: str
    encoding: Encoding
    assembles: Callable[[str], bool]
    """Whether a tensor of this name is assembled first."""


def _is_fused(name: str) -> bool:
    """Outside the paper's mapping classes."""
    return any(part in name for part in ("q_proj", "k_proj", "v_proj"))


_MODES = (
    _Mode("X", Encoding.XOR, _is_fused),
    _Mode("P", Encoding.OVERWRITE, _is_fused),
    _Mode("F", Encoding.OVERWRITE, lambda name: True),
    _Mode("ours", Encoding.DIFFERENCE, lambda name: False),
)


class _Model:
    """Parameters of two ranks, the committed bits of every piece of them, and those of every canonical tensor."""

    def __init__(self, num_layers: int, num_experts: int, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self.tasks = [task for layer in range(num_layers) for task in self._layer(f"layers.{layer}.", num_experts)]
        self.baseline = SourceBaseline(self.tasks)
        self.by_name: dict[str, list[ConversionTask]] = {}
        for task in self.tasks:
            self.by_name.setdefault(task.spec.name, []).append(task)
        self.converted: dict[str, Words] = {}

    def convert(self) -> None:
        """Commit everything, and keep the canonical tensors that modes need which assemble."""
        fill(self.baseline.trackers)
        self.converted = {name: assemble(tasks) for name, tasks in self.by_name.items()}

    @property
    def storages(self) -> list[Words]:
        """Every parameter once."""
        return list({id(words): words for words in (task.words() for task in self.tasks)}.values())

    def restore(self) -> None:
        """Put the committed bits back into the parameters."""
        for name, tasks in self.by_name.items():
            for task in tasks:
                for piece in task.pieces:
                    strided(task.words(), piece.storage)[...] = strided(self.converted[name], piece.canonical)

    def change(self, rate: float) -> None:
        """Multiply random elements by 1 + 0.01 z, again and again until they differ."""
        for words in self.storages:
            for start in range(0, words.size, 2**22):
                part = words[start : start + 2**22]
                part[:] = changed_words(part, rate, self._generator)

    def _layer(self, at: str, num_experts: int) -> Iterator[ConversionTask]:
        rows = (HEADS + 2 * GROUPS) * HEAD
        for rank in range(_RANKS):
            fused = self._normal(rows // _RANKS * HIDDEN)
            held = (((rank * rows // _RANKS, (rank + 1) * rows // _RANKS),), ((0, HIDDEN),))
            for part, pieces in _attention(at):
                yield self._task(part, pieces, (rows, HIDDEN), held, fused, rank)
            spec = TensorSpec(at + "self_attn.o_proj.weight", "BF16", (HIDDEN, HEADS * HEAD))
            each = HEADS * HEAD // _RANKS
            held = (((0, HIDDEN),), ((rank * each, (rank + 1) * each),))
            yield self._task(spec, (Piece(whole(spec.shape), whole(spec.shape)),), spec.shape, held, None, rank)
        yield self._whole(at + "mlp.gate.weight", (num_experts, HIDDEN))
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield self._whole(f"{at}{name}.weight", (HIDDEN,))
        for expert in range(num_experts):
            gate_up = self._normal(2 * EXPERT * HIDDEN)
            for place, name in enumerate(("gate_proj", "up_proj")):
                spec = TensorSpec(f"{at}mlp.experts.{expert}.{name}.weight", "BF16", (EXPERT, HIDDEN))
                here = StridedView(place * spec.num_elements, spec.shape, whole(spec.shape).stride)
                pieces = (Piece(whole(spec.shape), here),)
                yield ConversionTask(spec.name, spec, pieces, functools.partial(_itself, gate_up), (0,))
            yield self._whole(f"{at}mlp.experts.{expert}.down_proj.weight", (HIDDEN, EXPERT))

    def _whole(self, name: str, shape: tuple[int, ...]) -> ConversionTask:
        spec = TensorSpec(name, "BF16", shape)
        words = self._normal(spec.num_elements)
        pieces = (Piece(whole(shape), whole(shape)),)
        return ConversionTask(name, spec, pieces, functools.partial(_itself, words), (0,))

    def _task(
        self,
        spec: TensorSpec,
        pieces: Sequence[Piece],
        shape: tuple[int, ...],
        held: tuple[tuple[tuple[int, int], ...], ...],
        words: Words | None,
        rank: int,
    ) -> ConversionTask:
        """One rank's shard of a gathered parameter of this shape."""
        local = tuple(sum(stop - start for start, stop in intervals) for intervals in held)
        stored = self._normal(int(np.prod(local))) if words is None else words
        placed = onto_shard(pieces, shape, held, whole(local))
        return ConversionTask(f"{spec.name}@{rank}", spec, placed, functools.partial(_itself, stored), (0,))

    def _normal(self, count: int) -> Words:
        words = np.empty(count, np.uint16)
        for start in range(0, count, 2**22):
            values = self._generator.standard_normal(min(2**22, count - start), np.float32)
            words[start : start + 2**22] = rounded_to_bfloat16(values * np.float32(0.02))
        return words


def _attention(at: str) -> Iterator[tuple[TensorSpec, tuple[Piece, ...]]]:
    """Query, key and value, and where they lie in the fused parameter: per group its queries, its key, its value."""
    in_group = (HEADS // GROUPS + 2) * HEAD * HIDDEN
    offset = 0
    for name, heads in (("q_proj", HEADS), ("k_proj", GROUPS), ("v_proj", GROUPS)):
        block = heads // GROUPS * HEAD * HIDDEN
        spec = TensorSpec(f"{at}self_attn.{name}.weight", "BF16", (heads * HEAD, HIDDEN))
        here = StridedView(offset, (GROUPS, block), (in_group, 1))
        yield spec, (Piece(StridedView(0, (GROUPS, block), (block, 1)), here),)
        offset += block


def _itself(words: Words) -> Words:
    return words


def assemble(tasks: Sequence[ConversionTask]) -> Words:
    """The canonical tensor from the shards of all ranks: one copy."""
    canonical = np.empty(tasks[0].spec.num_elements, tasks[0].spec.word_dtype)
    for task in tasks:
        storage = task.words()
        for piece in task.pieces:
            strided(canonical, piece.canonical)[...] = strided(storage, piece.storage)
    return canonical


class _Construction:
    """One mode on one model."""

    def __init__(self, model: _Model, mode: _Mode, settings: SourceSettings) -> None:
        self._model = model
        self._mode = mode
        self._settings = settings
        direct: list[tuple[_Job, int]] = [
            (functools.partial(self._compared, tracker), tracker.task.nbytes)
            for tracker in model.baseline.trackers
            if not mode.assembles(tracker.task.spec.name)
        ]
        assembled: list[tuple[_Job, int]] = [
            (functools.partial(self._converted, name), tasks[0].spec.nbytes)
            for name, tasks in model.by_name.items()
            if mode.assembles(name)
        ]
        sized = [((job, nbytes), nbytes) for job, nbytes in (*direct, *assembled)]
        self._total_nbytes = sum(nbytes for _, nbytes in sized)
        self._jobs = cut_into_chunks(sized, settings.chunk_nbytes, total_nbytes=self._total_nbytes)

    def payloads(self) -> Iterator[tuple[Bucket, int]]:
        """Every payload's bucket and bytes, scanned by all threads and encoded on one more, as an owner does."""
        with ThreadPoolExecutor(self._settings.num_threads) as pool:
            chunks = pool.map(self._run, self._jobs)
            buckets = cut_into_buckets(chunks, self._settings.bucket_nbytes, total_nbytes=self._total_nbytes)
            for sequence, bucket in enumerate(buckets):
                yield bucket, len(_encode(bucket, sequence))

    @staticmethod
    def _run(jobs: Sequence[tuple[_Job, int]]) -> Part:
        return tuple(item for job, _ in jobs for item in job()), sum(nbytes for _, nbytes in jobs)

    def _compared(self, tracker: TaskTracker) -> list[CodedItem]:
        return list(tracker.scan(self._mode.encoding).items)

    def _converted(self, name: str) -> list[CodedItem]:
        tasks = self._model.by_name[name]
        view = whole(tasks[0].spec.shape)
        pieces = (Piece(view, view).normalised(),)
        found = kernels.scan(tasks[0].spec, assemble(tasks), self._model.converted[name], pieces, Encoding.OVERWRITE)
        return [] if found.item is None else [found.item]


def _encode(bucket: Bucket, sequence: int) -> bytes:
    return payload.encode(
        bucket.items,
        attempt=AttemptId("v000001-a1-bench"),
        owner=OwnerId(0),
        sequence=sequence,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest="0" * 32,
    )


def paper_layout_nbytes(bucket: Bucket) -> int:
    """A bucket's locations and values as the paper lays them out (D): gaps in the smallest width that holds an item's largest,
    whole words, all items behind each other, under zstd level 1. Names and headers are not counted, in the paper's favour.
    """
    locations: list[bytes] = []
    values: list[bytes] = []
    for item in bucket.items:
        gaps = np.diff(kernels.decode_positions(item), prepend=-1) - 1
        width = next(width for width in (1, 2, 4, 8) if gaps.max() < 2 ** (8 * width))
        locations.append(gaps.astype(f"<u{width}").tobytes())
        values.append(kernels.decode_values(item).tobytes())
    writer = zstandard.ZstdCompressor(level=1)
    joined = [b"".join(locations), b"".join(values)]
    return min(len(writer.compress(b"".join(joined))), sum(len(writer.compress(part)) for part in joined))


def run(
    *,
    num_layers: int = 1,
    num_experts: int = 128,
    change_rates: Sequence[float] = (0.03, 0.05),
    rounds: int = 5,
    threads: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Every mode at every rate, the modes taking turns.

    Returns:
        ``{"rows": [...], "memory": {...}}``. Rows have mode, change_rate, median_s, payload_nbytes (X, P and F in the paper's
        layout), planes_nbytes (the same items in our format), order0_nbytes (the entropy of its planes), changed,
        bytes_per_change, paper_bytes_per_change (Table 3), speed_over_f (median of F's seconds over this mode's, round by
        round), to_x and to_p (payload bytes over theirs).
        Memory has what the owner of mode ``ours`` held beyond the parameters.
    """
    settings = SourceSettings(scan_threads=threads)
    model = _Model(num_layers, num_experts, seed)
    memory = _memory(model, settings, change_rates[0])
    model.convert()
    rows: list[dict[str, Any]] = []
    for rate in change_rates:
        model.restore()
        model.change(rate)
        rows += _compare(model, settings, rate, rounds)
    return {"rows": rows, "memory": memory}


def _compare(model: _Model, settings: SourceSettings, rate: float, rounds: int) -> list[dict[str, Any]]:
    clock = SystemClock()
    constructions = {mode.name: _Construction(model, mode, settings) for mode in _MODES}
    sizes = {name: _sizes(name, one) for name, one in constructions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in constructions}
    for _ in range(rounds):
        for name, one in constructions.items():
            began_s = clock.monotonic_s()
            for _ in one.payloads():
                pass
            seconds[name].append(clock.monotonic_s() - began_s)
    rows = []
    for name, taken_s in seconds.items():
        changed, nbytes, planes_nbytes, order0_nbytes = sizes[name]
        rows.append(
            {
                "mode": name,
                "change_rate": rate,
                "median_s": statistics.median(taken_s),
                "payload_nbytes": nbytes,
                "planes_nbytes": planes_nbytes,
                "order0_nbytes": round(order0_nbytes),
                "changed": changed,
                "bytes_per_change": nbytes / changed,
                "paper_bytes_per_change": _PAPER_BYTES_PER_CHANGE.get((name, rate)),
                "speed_over_f": statistics.median(f / mine for f, mine in zip(seconds["F"], taken_s, strict=True)),
                "to_x": nbytes / sizes["X"][1],
                "to_p": nbytes / sizes["P"][1],
            }
        )
    return rows


def order0_nbytes(bucket: Bucket) -> float:
    """Bytes of a bucket's planes at the order-0 entropy of each: the least that coding their bytes one by one can reach."""
    counts: dict[tuple[object, ...], NDArray[np.int64]] = {}
    for item in bucket.items:
        kinds = ((item.location_form, item.location_planes), (item.encoding, item.value_planes))
        for kind, planes in kinds:
            for number, plane in enumerate(planes):
                found = np.bincount(plane, minlength=256)
                key = (kind.name, len(planes), number)
                counts[key] = counts[key] + found if key in counts else found
    bits = 0.0
    for found in counts.values():
        present = found[found > 0]
        bits += float((present * np.log2(present.sum() / present)).sum())
    return bits / 8


def _sizes(name: str, one: _Construction) -> tuple[int, int, int, float]:
    """Changed elements; bytes as the mode's own layout has them, in our format, and at the order-0 entropy of our planes."""
    changed = nbytes = planes_nbytes = 0
    entropy_nbytes = 0.0
    for bucket, encoded_nbytes in one.payloads():
        changed += bucket.num_changed
        planes_nbytes += encoded_nbytes
        nbytes += encoded_nbytes if name == "ours" else paper_layout_nbytes(bucket)
        entropy_nbytes += order0_nbytes(bucket)
    return changed, nbytes, planes_nbytes, entropy_nbytes


def _memory(model: _Model, settings: SourceSettings, rate: float) -> dict[str, Any]:
    """What an owner of everything adds to the parameters: its baseline, and the most that building adds to that."""
    before = _resident_nbytes()
    fill(model.baseline.trackers)
    filled = _resident_nbytes()
    model.change(rate)
    resident = _reset_peak()
    for _ in _Construction(model, _MODES[-1], settings).payloads():
        pass
    peak = _peak_nbytes()
    owned = sum(task.nbytes for task in model.tasks)
    buffers = settings.num_threads * settings.chunk_nbytes
    return {
        "owned_nbytes": owned,
        "baseline_nbytes": model.baseline.nbytes,
        "baseline_resident_nbytes": filled - before,
        "build_peak_nbytes": max(0, peak - resident),
        "chunk_buffers_nbytes": buffers,
        "to_owned": (model.baseline.nbytes + max(0, peak - resident)) / owned,
        "limit_to_owned": 1.05 + buffers / owned,
    }


def _status_nbytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _resident_nbytes() -> int:
    return _status_nbytes("VmRSS")


def _peak_nbytes() -> int:
    return _status_nbytes("VmHWM")


def _reset_peak() -> int:
    """Forget the process's peak so far, where the kernel allows it; what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return _peak_nbytes()
    return _resident_nbytes()
