"""A real S3 server behind a proxy that misbehaves: every fault ends in success after repeating, or in a clear error."""

from __future__ import annotations

import itertools
import random

import pytest

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError, TransportError
from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import SystemClock
from deltarefit.testing.http_faults import FaultKind, FaultyProxy, HttpFault
from deltarefit.testing.transport_suite import TransportEnds, TransportTests
from deltarefit.transport import (
    ObjectStoreSender,
    ObjectStoreSource,
    PayloadEntry,
    RetryPolicy,
    StoreSettings,
    keys,
    open_run,
)

pytestmark = pytest.mark.process

MIB = 1 << 20
RUN = itertools.count()
ATTEMPT = attempt_id(1, 1, "00000000")
PAYLOAD = PayloadId(ATTEMPT, 0, OwnerId(0))
SETTINGS = StoreSettings(
    part_nbytes=5 * MIB,
    retry=RetryPolicy(attempts=3, first_delay_s=0.01, max_delay_s=0.05),
    request_retries=0,  # every repetition is ours, and counted
    read_timeout_s=2.0,  # a slow disk takes longer than one would think
)


@pytest.fixture
def proxy(s3_server):
    with FaultyProxy(s3_server.endpoint).running() as running:
        yield running


def open_through(proxy, s3_server, settings=SETTINGS, **more):
    options = {**s3_server.options, "endpoint": proxy.endpoint, **more}
    return open_run(s3_server.run_url(f"faults-{next(RUN)}"), clock=SystemClock(), settings=settings, options=options)


@pytest.fixture
def store(proxy, s3_server):
    return open_through(proxy, s3_server)


def content(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def put(store, data) -> PayloadEntry:
    ObjectStoreSender(store).send(PAYLOAD, data)
    return PayloadEntry.of(PAYLOAD, data)


def fetch(store, entry) -> bytes:
    return ObjectStoreSource(store).fetch(PAYLOAD, nbytes=entry.nbytes, digest=entry.digest)


def payloads(method, path):
    return "payloads" in path


UPLOADS = [FaultKind.STATUS, FaultKind.RESET_BEFORE, FaultKind.RESET_AFTER]
DOWNLOADS = [*UPLOADS, FaultKind.CUT, FaultKind.SHORTEN, FaultKind.DAMAGE, FaultKind.STALL, FaultKind.TRICKLE]


@pytest.mark.parametrize("nbytes", [300_000, 6 * MIB], ids=["single", "multipart"])
@pytest.mark.parametrize("kind", UPLOADS, ids=lambda kind: kind.name)
def test_upload_survives(proxy, store, kind, nbytes):
    fault = HttpFault(kind, lambda method, path: method == "PUT" and payloads(method, path), times=2)
    proxy.faults.append(fault)
    data = content(nbytes)
    entry = put(store, data)
    assert fault.fired == 2
    assert fetch(store, entry) == data


@pytest.mark.parametrize("kind", UPLOADS, ids=lambda kind: kind.name)
def test_completing_a_multipart_upload_survives(proxy, store, kind):
    fault = HttpFault(kind, lambda method, path: method == "POST" and "uploadId=" in path)
    proxy.faults.append(fault)
    data = content(6 * MIB)
    entry = put(store, data)
    assert fault.fired == 1
    assert fetch(store, entry) == data


@pytest.mark.parametrize("nbytes", [300_000, 6 * MIB], ids=["whole", "ranges"])
@pytest.mark.parametrize("kind", DOWNLOADS, ids=lambda kind: kind.name)
def test_download_survives(proxy, store, kind, nbytes):
    data = content(nbytes)
    entry = put(store, data)
    fault = HttpFault(kind, lambda method, path: method == "GET" and payloads(method, path), times=1)
    proxy.faults.append(fault)
    assert fetch(store, entry) == data
    assert fault.fired == 1


def test_range_answered_as_if_it_were_the_whole_object_is_repeated(proxy, store):
    data = content(6 * MIB)
    entry = put(store, data)
    fault = HttpFault(FaultKind.IGNORE_RANGE, lambda method, path: method == "GET")
    proxy.faults.append(fault)
    assert fetch(store, entry) == data
    assert fault.fired == 1


def test_interrupted_range_is_fetched_again_alone(proxy, store):
    data = content(17 * MIB)
    entry = put(store, data)
    proxy.requests.clear()
    proxy.faults.append(HttpFault(FaultKind.CUT, lambda method, path: method == "GET"))
    assert fetch(store, entry) == data
    downloaded = sum(r.response_nbytes for r in proxy.requests if r.method == "GET")
    assert downloaded <= len(data) + 3 * MIB, "half a part twice, not the payload twice"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FaultKind.STATUS, TransportError),
        (FaultKind.RESET_BEFORE, TransportError),
        (FaultKind.CUT, TransportError),
        (FaultKind.STALL, TransportError),
        (FaultKind.SHORTEN, PayloadInvalidError),
        (FaultKind.DAMAGE, PayloadInvalidError),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_download_that_never_works_ends_in_an_error_that_names_the_payload(proxy, store, kind, error):
    entry = put(store, content(300_000))
    fault = HttpFault(kind, lambda method, path: method == "GET", times=None, status=503)
    proxy.faults.append(fault)
    with pytest.raises(error, match=r"0000000000-000000|owner 0/payload 0"):
        fetch(store, entry)
    assert fault.fired == (2 if error is PayloadInvalidError else 3)


def test_upload_that_never_works_leaves_nothing_visible(proxy, store):
    fault = HttpFault(FaultKind.STATUS, lambda method, path: "partNumber=2" in path, times=None, status=503)
    proxy.faults.append(fault)
    with pytest.raises(TransportError, match="gave up after 3 tries"):
        put(store, content(6 * MIB))
    assert fault.fired >= 3
    proxy.faults.clear()
    assert store.listing(keys.ATTEMPTS) == []
    aborted = proxy.count("DELETE", "uploadId=")
    begun = proxy.count("POST", "uploads")
    assert (begun, aborted) == (3, 3), "every begun upload is aborted: its parts would be billed for ever"


@pytest.mark.parametrize("status", [401, 403])
def test_refusal_is_final_at_once(proxy, store, status):
    fault = HttpFault(FaultKind.STATUS, times=None, status=status)
    proxy.faults.append(fault)
    with pytest.raises(RejectedError, match="credentials"):
        store.get("k", max_nbytes=10)
    assert fault.fired == 1


def test_wrong_credentials_are_refused_by_the_server_and_named(proxy, s3_server):
    store = open_through(proxy, s3_server, secret_access_key="wrong")
    for use in (lambda: store.put("k", b"x"), lambda: store.get("k", max_nbytes=1), lambda: store.listing("d")):
        with pytest.raises(RejectedError, match="credentials"):
            use()
    with pytest.raises(RejectedError, match="credentials"):
        store.delete(["k"])


def test_missing_bucket_is_named(s3_server):
    store = open_run("s3://no-such-bucket-here/x", clock=SystemClock(), settings=SETTINGS, options=s3_server.options)
    with pytest.raises(RejectedError, match="bucket"):
        store.listing("d")


def test_server_that_is_not_there_is_a_transport_error(s3_server):
    options = {**s3_server.options, "endpoint": "http://127.0.0.1:9"}
    store = open_run(s3_server.run_url("x"), clock=SystemClock(), settings=SETTINGS, options=options)
    with pytest.raises(TransportError, match="gave up after 3 tries"):
        store.put("k", b"x")


def test_deleting_survives_and_the_payload_is_gone(proxy, store):
    entry = put(store, b"x")
    fault = HttpFault(FaultKind.RESET_AFTER, lambda method, path: method in {"DELETE", "POST"}, times=2)
    proxy.faults.append(fault)
    ObjectStoreSender(store).cleanup(ATTEMPT)
    assert fault.fired == 2
    assert store.listing(keys.ATTEMPTS) == []
    with pytest.raises(PayloadMissingError):
        fetch(store, entry)


@pytest.mark.parametrize("others", [False, True], ids=["nobody else wrote", "somebody else wrote"])
def test_a_conflict_with_a_write_in_flight_is_no_defeat(proxy, store, others):
    """409 says that somebody else is just writing, not that anything is there; 412 says that something is."""
    if others:
        store.put("plans/one", b"theirs")
    fault = HttpFault(FaultKind.STATUS, lambda method, path: method == "PUT", status=409)
    proxy.faults.append(fault)
    assert store.put_if_absent("plans/one", b"ours") is not others
    assert fault.fired == 1
    assert store.get("plans/one", max_nbytes=100) == (b"theirs" if others else b"ours")


def test_create_once_knows_its_own_object_after_a_lost_reply(proxy, store):
    fault = HttpFault(FaultKind.RESET_AFTER, lambda method, path: method == "PUT")
    proxy.faults.append(fault)
    assert store.put_if_absent("plans/x", b"mine") is True
    assert fault.fired == 1
    assert store.put_if_absent("plans/x", b"theirs") is False


def wait_until_logged(proxy, method: str, count: int) -> None:
    """The proxy logs a request after its answer was sent, so the client may be ahead of the log for a moment."""
    clock = SystemClock()
    end_s = clock.monotonic_s() + 5.0
    while proxy.count(method, "/payloads/") < count and clock.monotonic_s() < end_s:
        clock.sleep(0.01)


def test_each_payload_is_uploaded_once_and_downloaded_once_per_fetch(proxy, store):
    ids = [PayloadId(ATTEMPT, sequence, OwnerId(0)) for sequence in range(4)]
    sender, source = ObjectStoreSender(store), ObjectStoreSource(store)
    data = content(50_000)
    for payload_id in ids:
        sender.send(payload_id, data)
    for payload_id in ids:
        source.fetch(payload_id, nbytes=len(data), digest=PayloadEntry.of(payload_id, data).digest)
    wait_until_logged(proxy, "GET", 4)
    assert proxy.count("PUT", "/payloads/") == 4
    assert proxy.count("GET", "/payloads/") == 4
    crossed = sum(r.response_nbytes for r in proxy.requests if r.method == "GET")
    assert crossed == 4 * len(data)


class TestS3OnABadDay(TransportTests):
    """The whole suite while one request in six meets a fault."""

    @pytest.fixture
    def ends(self, proxy, s3_server):
        settings = StoreSettings(
            part_nbytes=5 * MIB, retry=RetryPolicy(attempts=12, first_delay_s=0.002, max_delay_s=0.05), request_retries=0
        )
        store = open_through(proxy, s3_server, settings)
        direct = open_run(store.url, clock=SystemClock(), options=s3_server.options)
        dice = random.Random(6)
        kinds = (FaultKind.STATUS, FaultKind.RESET_BEFORE, FaultKind.RESET_AFTER, FaultKind.CUT)
        proxy.faults += [HttpFault(kind, lambda m, p: dice.random() < 1 / 24, times=None, status=503) for kind in kinds]
        yield TransportEnds(
            ObjectStoreSender(store),
            ObjectStoreSource(store),
            lambda attempt: direct.listing(keys.attempt_prefix(attempt)),
        )
        if len(proxy.requests) > 40:
            assert sum(fault.fired for fault in proxy.faults) > 0
