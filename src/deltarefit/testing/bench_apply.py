"""Measure how a receiver applies changes: through pieces, and through scratch and loader as the paper does.

The model is a mixture of experts: one fused parameter for gate and up, one for down, and a canonical tensor per expert and
matrix. Its loader searches a parameter dictionary and slices, as engines' loaders do.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from deltarefit import kernels
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.payload import Payload, decode, encode
from deltarefit.placement.after_load import PostLoadStep
from deltarefit.plan import RefitPlan
from deltarefit.receiver import ApplyPath, RankReceiver, ReceiverSettings, merge_reports
from deltarefit.records import CodedItem, DeltaRecords, Encoding
from deltarefit.runtime.clock import Clock, SystemClock

__all__ = ["run"]

_ROWS, _COLUMNS = 128, 64
"""A small expert: per-tensor costs then weigh most, which is what the two paths differ in."""


class _Experts(torch.nn.Module):
    """Stacked experts and a loader that places one expert's matrix at a time."""

    def __init__(self, num_experts: int, rows: int) -> None:
        super().__init__()
        half = torch.zeros(num_experts, 2 * rows, _COLUMNS, dtype=torch.bfloat16)
        down = torch.zeros(num_experts, _COLUMNS, rows, dtype=torch.bfloat16)
        self.w13 = torch.nn.Parameter(half, requires_grad=False)
        self.w2 = torch.nn.Parameter(down, requires_grad=False)
        self._rows = rows

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            expert, matrix = name.split(".")
            if matrix == "down":
                parameters["w2"].data[int(expert)].copy_(tensor)
            else:
                parameters["w13"].data[int(expert)].narrow(0, self._rows * (matrix == "up"), self._rows).copy_(tensor)
        return set(parameters)


def _catalog(num_tensors: int, rows: int) -> Catalog:
    matrices = {"gate": (rows, _COLUMNS), "up": (rows, _COLUMNS), "down": (_COLUMNS, rows)}
    names = [
        (f"{number // 3}.{matrix}", matrices[matrix])
        for number in range(num_tensors)
        for matrix in [list(matrices)[number % 3]]
    ]
    return Catalog(TensorSpec(name, "BF16", shape) for name, shape in names)


def _payload(plan: RefitPlan, change_rate: float, generator: np.random.Generator) -> Payload:
    items: list[CodedItem] = []
    for name, spec in plan.catalog.items():
        count = max(1, round(spec.num_elements * change_rate))
        places = np.sort(generator.choice(spec.num_elements, count, replace=False)).astype(np.int64)
        old = np.zeros(count, spec.word_dtype)
        new = generator.integers(1, 4, count).astype(spec.word_dtype)
        items.append(kernels.code_records(DeltaRecords(spec, places, new, old), plan.encodings[name]))
    data = encode(
        items,
        attempt=AttemptId("v000001-a1-bench"),
        owner=OwnerId(0),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest=plan.digest,
    )
    return decode(data, catalog=plan.catalog)


def _decoded_nbytes(payload: Payload) -> int:
    return sum(plane.nbytes for item in payload.items for plane in (*item.location_planes, *item.value_planes))


def _measure(num_tensors: int, rows: int, change_rate: float, path: ApplyPath, rounds: int, clock: Clock) -> dict[str, Any]:
    model = _Experts(-(-num_tensors // 3), rows)
    catalog = _catalog(num_tensors, rows)
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(path=path, may_lack=("*",)))
    report = receiver.prewarm(catalog)
    plan = RefitPlan(catalog, {name: Encoding(code) for name, code in merge_reports([report], catalog).encodings.items()}, 1)
    receiver.prepare(plan)
    payload = _payload(plan, change_rate, np.random.default_rng(0))
    seconds: list[float] = []
    receiver.apply(payload)  # caches warm
    for _ in range(rounds):
        start = clock.monotonic_s()
        receiver.apply(payload)
        seconds.append(clock.monotonic_s() - start)
    tracemalloc.start()
    receiver.apply(payload)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "path": path.value,
        "change_rate": change_rate,
        "tensors": num_tensors,
        "changed": sum(item.count for item in payload.items),
        "model_nbytes": catalog.nbytes,
        "decoded_nbytes": _decoded_nbytes(payload),
        "median_s": statistics.median(seconds),
        "peak_extra_nbytes": peak_nbytes + report.scratch_nbytes + _decoded_nbytes(payload),
    }


class _Packed(torch.nn.Module):
    """One fused expert matrix that a post-load step packs into tiles of 32 rows by 2 columns, as CPU kernels do."""

    def __init__(self, num_experts: int, rows: int, columns: int) -> None:
        super().__init__()
        zeros = torch.zeros(num_experts, rows, columns, dtype=torch.bfloat16)
        self.weight = torch.nn.Parameter(zeros, requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)

    def pack(self) -> None:
        experts, rows, columns = self.weight.shape
        tiled = self.weight.data.view(experts, rows // 32, 32, columns // 2, 2).permute(0, 1, 3, 2, 4)
        self.weight = torch.nn.Parameter(tiled.contiguous(), requires_grad=False)


class _PackedEngine:
    """The adapter of an engine that serves ``_Packed``."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = shape

    def build(self) -> torch.nn.Module:
        return _Packed(*self._shape)

    def load(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return model.load_weights(weights)  # type: ignore[operator]

    def steps(self, model: torch.nn.Module) -> list[PostLoadStep]:
        return [PostLoadStep(model, model.pack)]  # type: ignore[arg-type]


def _probing(shape: tuple[int, int, int], rounds: int, clock: Clock) -> dict[str, Any]:
    """What prewarm costs where a post-load step has to be learnt, on one layer; and what refits of it cost afterwards."""
    served = _Packed(*shape)
    start = clock.monotonic_s()
    served.pack()
    pack_s = clock.monotonic_s() - start
    catalog = Catalog([TensorSpec("weight", "BF16", shape)])
    receiver = RankReceiver(served, served.load_weights, after_load=_PackedEngine(shape))
    tracemalloc.start()
    start = clock.monotonic_s()
    report = receiver.prewarm(catalog)
    prewarm_s = clock.monotonic_s() - start
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    plan = RefitPlan(catalog, {name: Encoding(code) for name, code in merge_reports([report], catalog).encodings.items()}, 1)
    receiver.prepare(plan)
    payload = _payload(plan, 0.01, np.random.default_rng(0))
    seconds: list[float] = []
    for _ in range(rounds):
        start = clock.monotonic_s()
        receiver.apply(payload)
        seconds.append(clock.monotonic_s() - start)
    return {
        "path": "packed, learnt after load",
        "change_rate": 0.01,
        "tensors": 1,
        "changed": sum(item.count for item in payload.items),
        "model_nbytes": catalog.nbytes,
        "decoded_nbytes": _decoded_nbytes(payload),
        "median_s": statistics.median(seconds),
        "peak_extra_nbytes": peak_nbytes,
        "prewarm_s": prewarm_s,
        "pack_s": pack_s,
        "pieces": report.routes["weight"].num_pieces,
    }


def run(
    *,
    num_tensors: int = 4000,
    change_rates: Sequence[float] = (0.01, 0.03),
    scales: Sequence[int] = (1, 4, 16),
    rounds: int = 5,
    packed: tuple[int, int, int] = (64, 768, 512),
) -> dict[str, Any]:
    """Both paths at each rate; then the compiled path at equal changes on models ``scales`` times as large; then one layer of
    shape ``packed`` (25 million elements) whose weights were packed after loading.

    Returns:
        ``{"rows": [...]}`` with path, change_rate, tensors, changed, model_nbytes, decoded_nbytes, median_s and
        peak_extra_nbytes (memory beyond resident weights: the decoded payload, scratch, and the most that Python and numpy
        allocated while applying). The last row also has prewarm_s, the time to learn the layer with all its checks; pack_s,
        that of packing it once; and pieces, all that is kept of what was learnt. Its peak_extra_nbytes is that of prewarm.
    """
    clock = SystemClock()
    rows = [
        _measure(num_tensors, _ROWS, rate, path, rounds, clock)
        for rate in change_rates
        for path in (ApplyPath.SCRATCH, ApplyPath.COMPILED)
    ]
    rows.extend(
        _measure(num_tensors, _ROWS * scale, change_rates[0] / scale, ApplyPath.COMPILED, rounds, clock) for scale in scales[1:]
    )
    rows.append(_probing(packed, rounds, clock))
    return {"rows": rows}
