"""One rank of a real FSDP2 job: trains, refits, and checks against gathered tensors. Run by test_fsdp_processes."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deltarefit import kernels
from deltarefit.bits import logical_words
from deltarefit.ids import EncodingMode
from deltarefit.integrations.fsdp import default_collective, fsdp_adapter
from deltarefit.pieces import Piece, whole
from deltarefit.plan import RefitPlan
from deltarefit.records import Encoding
from deltarefit.source import SourceSettings, open_source
from deltarefit.testing.checkpoints import tiny_model

RANK, WORLD_SIZE, STORE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def scaled(state):
    """An export that computes the norms and hands on everything else."""
    return {name: tensor * 2 if name.endswith("layernorm.weight") else tensor for name, tensor in state.items()}


def exported(model):
    """What the checkpoint would hold, from gathered tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return {name: logical_words(tensor).copy() for name, tensor in scaled(revert_weight_conversion(model, full)).items()}


def step(model):
    tokens = torch.randint(0, 250, (2, 8), generator=torch.Generator().manual_seed(RANK))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def gather_the_outermost(model, source):
    """FSDP2 leaves the outermost parameters gathered after a forward pass. Their shards stay as they are, and are read."""
    outermost = next(task for task in source.tasks if "embed_tokens" in task.spec.name)
    before = outermost.words().copy()
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    assert not hasattr(model.get_input_embeddings().weight, "placements")
    assert np.array_equal(outermost.words(), before)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=WORLD_SIZE)
    model = tiny_model("qwen3_moe")
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    collective = default_collective()
    adapter = fsdp_adapter(model, collective=collective, export=scaled, export_by_layer=True)
    source = open_source(adapter, collective, SourceSettings(scan_threads=1))
    assert source.residual_names, "the scaled norms are residual"
    held = exported(model)
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), WORLD_SIZE)
    for mode in EncodingMode:
        step(model)
        adapter.barrier()
        gather_the_outermost(model, source)  # as training does while a policy is published
        sent = [item for bucket in source.owner.build(plan, mode) for item in bucket.items]
        assert sent, "a step changes something on every rank"
        source.owner.commit()
        adapter.barrier()
        apply_all(held, sent, collective)
        expected = exported(model)
        assert sorted(held) == sorted(expected)
        assert all(np.array_equal(held[name], expected[name]) for name in expected)
    dist.destroy_process_group()


def apply_all(held, sent, collective):
    """Every rank receives what all ranks sent, as payloads."""
    from deltarefit import payload
    from deltarefit.ids import AttemptId, OwnerId, PolicyVersion

    data = payload.encode(
        sent,
        attempt=AttemptId("v000001-a1-test"),
        owner=OwnerId(RANK),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest="0" * 32,
    )
    for received in collective.all_gather(data):
        for item in payload.decode(received).items:
            view = whole(item.spec.shape)
            kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)


main()
