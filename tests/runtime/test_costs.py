"""What refits cost at the most: memory for few changes in much, bytes for many changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import deltarefit
from deltarefit import kernels, payload
from deltarefit.canonical import TensorSpec
from deltarefit.ids import OwnerId, PolicyVersion, attempt_id
from deltarefit.pieces import Piece, whole
from deltarefit.records import DeltaRecords, Encoding

from .pair import RECEIVER_SETTINGS, SETTINGS, raw

pytestmark = pytest.mark.torch


class Many(torch.nn.Module):
    """One large tensor among many small ones, each copied to its own place."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(8 * 2**20, dtype=torch.bfloat16), requires_grad=False)
        for number in range(200):
            small = torch.nn.Parameter(torch.zeros(64, 512, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(f"small_{number}", small)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_a_change_of_each_tensor_costs_no_memory_of_the_tensors_size(tmp_path):
    """Trainer and engine in one process: what the system counts, for torch's memory is not Python's."""
    run = (tmp_path / "run").as_uri()
    policy, model = Many(), Many()
    settings = msgspec.structs.replace(SETTINGS, chunk_nbytes=1 << 20)
    with (
        deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=run, settings=RECEIVER_SETTINGS),
        deltarefit.Publisher(policy, run=run, settings=settings) as publisher,
    ):
        for step in range(3):
            for tensor in policy.parameters():
                tensor.data.view(-1)[step] = 1
            Path("/proc/self/clear_refs").write_text("5")  # forgets the highest mark so far
            before_kib = resident_kib("VmRSS")
            assert publisher.refit().changed_elements == 201
            peak_kib = resident_kib("VmHWM") - before_kib
        assert raw(model) == raw(policy)
    assert peak_kib < 6 * 1024 < policy.large.nbytes // 1024, "expected no copy of a tensor, nor of many"


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "BF16", "F32", "F64"])
@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda encoding: encoding.name)
def test_dense_changes_cost_no_more_than_the_tensor(dtype, share, encoding):
    """Random bits, the worst that can be: locations are left out where they cost more than unchanged elements do."""
    spec = TensorSpec("w", dtype, (40_000,))
    generator = np.random.default_rng(7)
    old, noise = (generator.integers(0, 2**63, 40_000).astype(spec.word_dtype) for _ in range(2))
    new = np.where(generator.random(40_000) < share, noise, old)
    if share == 1:
        new = np.where(new == old, new ^ np.ones(1, new.dtype), new)
    view = whole(spec.shape)
    scanned = kernels.scan(spec, new, old, [Piece(view, view)], encoding).item
    assert scanned is not None
    changed = np.flatnonzero(new != old)
    converted = kernels.code_records(DeltaRecords(spec, changed, new[changed], old[changed]), encoding)
    for item in (scanned, converted):
        data = payload.encode(
            [item],
            attempt=attempt_id(1, 1, "00000000"),
            owner=OwnerId(0),
            sequence=0,
            base_version=PolicyVersion(0),
            target_version=PolicyVersion(1),
            plan_digest="0" * 32,
        )
        assert len(data) <= spec.nbytes + 512
