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


def run(
    *,
    num_tensors: int = 4000,
    change_rates: Sequence[float] = (0.01, 0.03),
    scales: Sequence[int] = (1, 4, 16),
    rounds: int = 5,
) -> dict[str, Any]:
    """Both paths at each rate; then the compiled path at equal changes on models ``scales`` times as large.

    Returns:
        ``{"rows": [...]}`` with path, change_rate, tensors, changed, model_nbytes, decoded_nbytes, median_s and
        peak_extra_nbytes (memory beyond resident weights: the decoded payload, scratch, and the most that Python and numpy
        allocated while applying).
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
    return {"rows": rows}
