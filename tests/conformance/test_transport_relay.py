"""The relay tree passes the shipped suite: one relay, a tree, and a tree under mutual TLS with a key."""

from __future__ import annotations

import contextlib
import secrets
import subprocess

import pytest

from deltarefit.runtime.clock import SystemClock
from deltarefit.testing.transport_suite import TransportEnds, TransportTests
from deltarefit.transport.relay import RelayContext, RelayNode, RelaySender, RelaySettings, RelaySource
from deltarefit.transport.relay.tls import caller_tls, listener_tls

SETTINGS = RelaySettings(dead_after_s=2.0, call_s=10.0)


class EveryNode:
    """A source that fetches at every node, so that each test is about all of them."""

    def __init__(self, sender, sources):
        self.sender = sender
        self.sources = sources

    def fetch(self, payload_id, *, nbytes, digest):
        assert self.sender.wait_until_delivered(payload_id.attempt, 60)
        first, *others = [source.fetch(payload_id, nbytes=nbytes, digest=digest) for source in self.sources]
        assert all(other == first for other in others)
        return first


@contextlib.contextmanager
def relay_ends(tmp_path, count, **more):
    def context(name):
        return RelayContext("memory://run", name, lambda: secrets.token_bytes(16), SystemClock(), settings=SETTINGS, **more)

    with contextlib.ExitStack() as stack:
        folders = [tmp_path / f"node{number}" for number in range(count)]
        peers = []
        for folder in folders:
            node = RelayNode(context(folder.name), folder)
            peers.append(node.start())
            stack.callback(node.close)
        sources = [stack.enter_context(RelaySource(each, "engine", clock=SystemClock(), wait_s=0.05)) for each in folders]
        sender = stack.enter_context(RelaySender(context("owner"), lambda: peers))
        yield TransportEnds(
            sender,
            EveryNode(sender, sources),
            lambda attempt: [str(path) for each in folders for path in each.glob(f"{attempt}*/**/*")],
        )


class TestOneRelay(TransportTests):
    @pytest.fixture
    def ends(self, tmp_path):
        with relay_ends(tmp_path, 1) as ends:
            yield ends


class TestTreeOfFive(TransportTests):
    @pytest.fixture
    def ends(self, tmp_path):
        with relay_ends(tmp_path, 5) as ends:
            yield ends


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """An authority and one certificate for 127.0.0.1 that it signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "2")
    openssl("req", *curve, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext"]
    openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem", "-days", "2")
    return {"authority": folder / "ca.pem", "certificate": folder / "node.pem", "key": folder / "node.key"}


class TestTreeUnderTls(TransportTests):
    @pytest.fixture
    def ends(self, tmp_path, certificates):
        tls = {"client_tls": caller_tls(**certificates), "server_tls": listener_tls(**certificates)}
        with relay_ends(tmp_path, 3, key=b"the run's secret", **tls) as ends:
            yield ends
