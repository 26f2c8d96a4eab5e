"""One rank of a real Megatron job on the CPU: proves a case against Bridge's own export, or records its facts.

Run by test_bridge and by ``record.py``: ``bridge_rank.py <case> <rank> <directory>``.
"""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron_cases import CASES, digest

from deltarefit import kernels, payload
from deltarefit.bits import logical_words
from deltarefit.canonical import TensorDigest
from deltarefit.ids import AttemptId, EncodingMode, OwnerId, PolicyVersion
from deltarefit.integrations.megatron import default_collective, megatron_adapter
from deltarefit.pieces import Piece, whole
from deltarefit.plan import RefitPlan
from deltarefit.records import Encoding
from deltarefit.source import SourceSettings, open_source
from deltarefit.testing import megatron_cpu

NAME, RANK, WORK = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
CASE = CASES[NAME]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{WORK / 'store'}", rank=RANK, world_size=CASE.world_size)
    bridge, chunks = megatron_cpu.make_model(
        WORK / "checkpoint", sizes=CASE.sizes, is_hybrid=CASE.is_hybrid, settings=CASE.settings
    )
    collective = default_collective(timeout_s=120)
    adapter = megatron_adapter(chunks, bridge=bridge, collective=collective)
    record(adapter)
    source = open_source(adapter, collective, SourceSettings(scan_threads=1))
    report = source.coverage(collective)
    held = exported(bridge, chunks, source.catalog)
    assert_digests(source, held, collective)
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), CASE.world_size)
    for number, mode in enumerate(EncodingMode):
        step(chunks, number)
        adapter.barrier()
        sent = [item for bucket in source.owner.build(plan, mode) for item in bucket.items]
        source.owner.commit()
        apply_all(held, sent, collective)
        expected = exported(bridge, chunks, source.catalog)
        wrong = [name for name in expected if not np.array_equal(held[name], expected[name])]
        assert not wrong, wrong
    summary = {
        "unmapped": sorted(adapter.unmapped),
        "residual": sorted(source.residual),
        "direct": report.tensors_direct,
        "total": report.tensors_total,
    }
    (WORK / f"summary{RANK}.json").write_text(json.dumps(summary))
    dist.destroy_process_group()


def record(adapter):
    """This rank's facts, with digests of the parameters' own elements as the checkpoint's dtype has them."""
    facts = []
    for held in adapter._read.held.values():
        local = adapter._tensors[held.facts.chunk, held.facts.local_name].live()
        entry = msgspec.to_builtins(held.facts)
        entry = {key: value for key, value in entry.items() if value not in ("", 0, -1, [], {}, False) or key == "shape"}
        facts.append({"facts": entry, "words": digest(logical_words(local.to(torch.bfloat16)))})
    manifest = {name: (spec.dtype, spec.shape) for name, spec in adapter.catalog().items()}
    (WORK / f"facts{RANK}.json").write_text(json.dumps({"manifest": manifest, "facts": facts}))


def exported(bridge, chunks, catalog):
    """What Bridge itself exports, in the checkpoint's dtype and without padding rows."""
    found = {}
    for name, tensor in bridge.export_hf_weights(chunks, cpu=True, show_progress=False):
        spec = catalog[name]
        assert spec.dtype == "BF16"
        assert tensor.shape[0] >= spec.shape[0]
        words = logical_words(tensor[: spec.shape[0]].to(torch.bfloat16)).copy()
        assert words.size == spec.num_elements
        found[name] = words
    assert sorted(found) == sorted(catalog)
    return found


def step(chunks, number):
    """Change about one in eight elements, by a rule that depends on the element's own bits: copies stay copies."""
    with torch.no_grad():
        for chunk in chunks:
            for tensor in chunk.state_dict(keep_vars=True).values():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    rounded = tensor.to(torch.bfloat16)
                    chosen = (rounded.view(torch.int16).to(torch.int32) * 40503 >> 7) % 8 == number
                    tensor.copy_(torch.where(chosen, rounded.float() * 1.02, rounded.float()).to(torch.bfloat16))


def assert_digests(source, held, collective):
    """The owners' digests, which a receiver that loaded the checkpoint must show before anything is sent."""
    mine = {name: found.hex() for name, found in source.owner.digests().items()}
    total = {}
    for part in collective.all_gather(msgspec.msgpack.encode(mine)):
        for name, text in msgspec.msgpack.decode(part, type=dict[str, str]).items():
            total[name] = total.get(name, TensorDigest()) + TensorDigest.from_hex(text)
    for name, words in held.items():
        view = whole(source.catalog[name].shape)
        assert total[name] == kernels.digest(words, [Piece(view, view)]), name


def apply_all(held, sent, collective):
    """Every rank receives what all ranks sent, as payloads."""
    data = b""
    if sent:
        data = payload.encode(
            sent,
            attempt=AttemptId("v000001-a1-test"),
            owner=OwnerId(RANK),
            sequence=0,
            base_version=PolicyVersion(0),
            target_version=PolicyVersion(1),
            plan_digest="0" * 32,
        )
    received = [part for part in collective.all_gather(data) if part]
    assert received, "a step changes something"
    for part in received:
        for item in payload.decode(part).items:
            view = whole(item.spec.shape)
            kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)


main()
