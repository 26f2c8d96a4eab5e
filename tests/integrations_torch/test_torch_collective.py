"""The process group as the source side sees it, between real processes."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from deltarefit.errors import RejectedError
from deltarefit.integrations.torch import TorchCollective, default_collective
from deltarefit.source import LocalCollective

pytestmark = [pytest.mark.torch]

SCRIPT = """
import sys
import torch.distributed as dist
from deltarefit.integrations.torch import default_collective
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
collective = default_collective()
assert (collective.rank, collective.world_size) == (rank, world)
assert collective.all_gather(b"x" * (3 * rank)) == [b"x" * (3 * other) for other in range(world)]
assert collective.all_gather(b"") == [b""] * world
assert collective.broadcast(b"plan" if rank == 1 else None, root=1) == b"plan"
assert collective.broadcast(b"" if rank == 0 else None) == b""
sent = [bytes([rank, other]) * other for other in range(world)]
assert collective.all_to_all(sent) == [bytes([other, rank]) * rank for other in range(world)]
collective.barrier()
dist.destroy_process_group()
"""


@pytest.mark.process
def test_ranks_exchange_bytes_of_any_length(tmp_path):
    store = str(tmp_path / "store")
    processes = [subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), "2", store]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


def test_without_a_process_group_the_world_is_this_process():
    assert isinstance(default_collective(), LocalCollective)
    with pytest.raises(RejectedError, match="not initialised"):
        TorchCollective()
