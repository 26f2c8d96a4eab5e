"""A very small S3 server in this process, that can be told to break the rules: for what a well-behaved server never does."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from obstore.store import S3Store


@dataclass
class TinyS3:
    """One bucket. Understands PUT with If-Match and If-None-Match, GET of whole objects, and deleting them."""

    port: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    ignores: frozenset[str] = frozenset()
    """Conditions that it ignores, as some gateways do: ``If-Match``, ``If-None-Match``."""
    answers: list[tuple[int, bool]] = field(default_factory=list)
    """(status, whether the write takes effect) of the next writes; then it behaves."""
    reads: list[int] = field(default_factory=list)
    """Statuses of the next reads; then it behaves."""
    has_etags: bool = True
    puts: int = 0

    def etag(self, key: str) -> str:
        return '"' + hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest() + '"'

    def refuses(self, key: str, match: str | None, none_match: str | None) -> bool:
        if none_match is not None and "If-None-Match" not in self.ignores and key in self.objects:
            return True
        if match is None or "If-Match" in self.ignores:
            return False
        return key not in self.objects or match != self.etag(key)

    def store(self, **retry: object) -> S3Store:
        return S3Store(
            "bucket",
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id="k",
            secret_access_key="s",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0, **retry},
        )


def _handler(server: TinyS3) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _reply(self, status: int, body: bytes = b"", etag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Sun, 29 Nov 2026 12:00:00 GMT")
            if etag and server.has_etags:
                self.send_header("ETag", etag)
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            server.puts += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, takes_effect = server.answers.pop(0) if server.answers else (200, True)
            refused = server.refuses(self.path, self.headers.get("If-Match"), self.headers.get("If-None-Match"))
            if takes_effect and not refused:
                server.objects[self.path] = body
            if refused and status == 200:
                return self._reply(412)
            return self._reply(status, etag=server.etag(self.path) if self.path in server.objects else '"none"')

        def do_GET(self) -> None:
            if server.reads:
                return self._reply(server.reads.pop(0))
            if self.path not in server.objects:
                return self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return self._reply(200, server.objects[self.path], server.etag(self.path))

        def do_POST(self) -> None:
            """Deletes come in bulk."""
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            for key in re.findall("<Key>(.*?)</Key>", body):
                server.objects.pop(f"/bucket/{key}", None)
            self._reply(200, b"<DeleteResult></DeleteResult>")

    return Handler


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no news."""


@pytest.fixture
def tiny_s3() -> Iterator[TinyS3]:
    server = TinyS3()
    with _Quiet(("127.0.0.1", 0), _handler(server)) as listening:
        server.port = listening.server_address[1]
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield server
        listening.shutdown()
        thread.join(10)
