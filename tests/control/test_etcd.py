"""The etcd backend against answers that a healthy etcd never gives. The real one is in tests/conformance."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from dataclasses import dataclass, field

import pytest

from deltarefit.control import ABSENT, EtcdRecordStore, SwapUncertainError, Tag
from deltarefit.errors import RejectedError, TransportError


@dataclass
class Gateway:
    """Answers each request with the next planned (status, body); notes what was asked."""

    port: int = 0
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    asked: list[tuple[str, dict, str]] = field(default_factory=list)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def gateway():
    made = Gateway()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.asked.append((self.path, body, self.headers.get("Authorization", "")))
            status, answer = made.answers.pop(0)
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield made
        server.shutdown()
        thread.join(10)


def found(data: bytes, revision: int = 7) -> tuple[int, bytes]:
    value = base64.b64encode(data).decode()
    return 200, json.dumps({"kvs": [{"value": value, "mod_revision": str(revision)}]}).encode()


def test_a_swap_compares_the_revision_that_was_read(gateway):
    store = EtcdRecordStore([gateway.endpoint], "run/control")
    gateway.answers = [found(b"1"), (200, b'{"succeeded": true}'), (200, b"{}")]
    data, tag = store.read()
    assert (data, tag) == (b"1", Tag(generation="7"))
    assert store.swap(tag, b"2")
    assert not store.swap(ABSENT, b"3")
    paths = [path for path, _, _ in gateway.asked]
    assert paths == ["/v3/kv/range", "/v3/kv/txn", "/v3/kv/txn"]
    assert gateway.asked[1][1]["compare"][0]["mod_revision"] == "7"
    assert gateway.asked[2][1]["compare"][0]["mod_revision"] == "0"


def test_an_empty_value_is_a_record_and_not_an_absent_one(gateway):
    gateway.answers = [(200, b'{"kvs": [{"mod_revision": "3"}]}')]
    assert EtcdRecordStore([gateway.endpoint], "k").read() == (b"", Tag(generation="3"))


@pytest.mark.parametrize(
    "answer",
    [(500, b"overloaded"), (503, b""), (0, b""), (200, b"<html>"), (200, b"[]")],
    ids=["500", "503", "cut", "html", "list"],
)
def test_an_answer_that_is_none_is_uncertain_for_a_swap_and_an_error_for_a_read(gateway, answer):
    store = EtcdRecordStore([gateway.endpoint], "k")
    gateway.answers = [answer, answer]
    with pytest.raises(SwapUncertainError, match="key k: no answer"):
        store.swap(ABSENT, b"1")
    with pytest.raises(TransportError, match="key k: no answer"):
        store.read()


@pytest.mark.parametrize(
    "body", [b'{"kvs": [{}]}', b'{"kvs": [{"value": "!", "mod_revision": "1"}]}', b'{"kvs": [{"mod_revision": "x"}]}']
)
def test_a_reply_that_is_not_etcds_is_an_error(gateway, body):
    gateway.answers = [(200, body)]
    with pytest.raises(TransportError, match="not etcd's"):
        EtcdRecordStore([gateway.endpoint], "k").read()


def test_the_next_endpoint_is_tried_when_one_is_down(gateway):
    store = EtcdRecordStore(["http://127.0.0.1:9", gateway.endpoint], "k", timeout_s=2.0)
    gateway.answers = [found(b"1"), (200, b'{"succeeded": true}')]
    assert store.read()[0] == b"1"
    assert store.swap(ABSENT, b"2")


def test_a_swap_that_may_have_been_heard_is_not_sent_to_another_endpoint(gateway):
    store = EtcdRecordStore([gateway.endpoint, gateway.endpoint], "k")
    gateway.answers = [(500, b""), (200, b'{"succeeded": true}')]
    with pytest.raises(SwapUncertainError):
        store.swap(ABSENT, b"1")
    assert len(gateway.asked) == 1


def test_a_read_is_sent_to_another_endpoint(gateway):
    gateway.answers = [(500, b""), found(b"1")]
    assert EtcdRecordStore([gateway.endpoint, gateway.endpoint], "k").read()[0] == b"1"


def test_a_user_is_let_in_with_a_token_or_refused_by_name(gateway):
    store = EtcdRecordStore([gateway.endpoint], "k", user="trainer", password="secret")
    gateway.answers = [(200, b'{"token": "t0"}'), found(b"1"), (400, b"authentication failed"), (401, b"")]
    assert store.read()[0] == b"1"
    assert gateway.asked[1][2] == "t0"
    with pytest.raises(RejectedError, match="user 'trainer' is not let in") as caught:
        store.read()
    assert "secret" not in str(caught.value)
    with pytest.raises(RejectedError, match="not allowed"):
        EtcdRecordStore([gateway.endpoint], "k").read()


def test_a_reply_that_never_ends_is_cut_off(gateway):
    gateway.answers = [(200, b"x" * ((2 << 20) + 1))]
    with pytest.raises(RejectedError, match="a reply of more than"):
        EtcdRecordStore([gateway.endpoint], "k").read()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:2379", "ftp://host", "http://", "http://host/path"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(RejectedError, match="expected http://host:port"):
        EtcdRecordStore([endpoint], "k")


def test_no_endpoint_is_refused():
    with pytest.raises(RejectedError, match="at least one endpoint"):
        EtcdRecordStore([], "k")
