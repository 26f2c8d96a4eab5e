"""The relay tree passes the shipped suite: one relay, a tree, and a tree under mutual TLS with a key."""

from __future__ import annotations

import contextlib
import secrets
import ssl
import subprocess

import pytest

from deltarefit.errors import RejectedError, TransportError
from deltarefit.runtime.clock import SystemClock
from deltarefit.testing.transport_suite import TransportEnds, TransportTests
from deltarefit.transport.relay import RelayContext, RelayNode, RelaySender, RelaySettings, RelaySource
from deltarefit.transport.relay.channel import connect
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
    """Makes certificates for 127.0.0.1: of one authority, expired, or of another authority."""
    folder = tmp_path_factory.mktemp("tls")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    def make(name, authority, days):
        if not (folder / f"{authority}.pem").exists():
            files = ["-keyout", f"{authority}.key", "-out", f"{authority}.pem"]
            openssl("req", "-x509", *curve, *files, "-subj", f"/CN={authority}", "-days", "2")
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", "ext"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem", "-days", str(days))
        return {"authority": folder / "ours.pem", "certificate": folder / f"{name}.pem", "key": folder / f"{name}.key"}

    return {"good": make("good", "ours", 2), "expired": make("expired", "ours", -1), "strange": make("strange", "theirs", 2)}


class TestTreeUnderTls(TransportTests):
    @pytest.fixture
    def ends(self, tmp_path, certificates):
        tls = {"client_tls": caller_tls(**certificates["good"]), "server_tls": listener_tls(**certificates["good"])}
        with relay_ends(tmp_path, 3, key=b"the run's secret", **tls) as ends:
            yield ends


def reach(tmp_path, caller, listener):
    """Let one participant connect to another; each is a context for ``RelayContext``."""

    def context(name, **tls):
        return RelayContext("memory://run", name, lambda: secrets.token_bytes(16), SystemClock(), settings=SETTINGS, **tls)

    node = RelayNode(context("node", **listener), tmp_path / "node")
    peer = node.start()
    try:
        channel = connect(peer, context("caller", **caller))
        channel.receive_message()  # under TLS 1.3 a listener refuses a caller's certificate only after the caller is content
        channel.close()
    finally:
        node.close()


@pytest.mark.parametrize(("kind", "why"), [("expired", "certificate has expired"), ("strange", "certificate is not accepted")])
def test_relay_with_a_bad_certificate_is_refused_by_name(tmp_path, certificates, kind, why):
    caller, listener = caller_tls(**certificates["good"]), listener_tls(**certificates[kind])
    with pytest.raises(RejectedError, match=why):
        reach(tmp_path, {"client_tls": caller}, {"server_tls": listener})


@pytest.mark.parametrize("kind", ["expired", "strange", None])
def test_caller_with_a_bad_certificate_or_none_is_refused(tmp_path, certificates, kind, caplog):
    if kind is None:
        caller = ssl.create_default_context(cafile=str(certificates["good"]["authority"]))
    else:
        caller = caller_tls(**certificates[kind])
    with pytest.raises((OSError, RejectedError)):
        reach(tmp_path, {"client_tls": caller}, {"server_tls": listener_tls(**certificates["good"])})
    assert "refused a connection" in caplog.text


@pytest.mark.parametrize(("caller", "listener"), [("good", None), (None, "good")])
def test_plain_and_tls_do_not_talk(tmp_path, certificates, caller, listener):
    with pytest.raises((OSError, TransportError)):
        reach(
            tmp_path,
            {"client_tls": caller_tls(**certificates[caller])} if caller else {},
            {"server_tls": listener_tls(**certificates[listener])} if listener else {},
        )


def test_good_certificates_meet(tmp_path, certificates):
    """The refusals above can fail: this one is let in."""
    good = certificates["good"]
    reach(tmp_path, {"client_tls": caller_tls(**good)}, {"server_tls": listener_tls(**good)})


def test_files_that_are_no_certificates_are_rejected(tmp_path, certificates):
    (tmp_path / "text").write_text("no certificate")
    for wrong in ("authority", "certificate", "key"):
        with pytest.raises(RejectedError, match="expected PEM files"):
            caller_tls(**{**certificates["good"], wrong: tmp_path / "text"})
