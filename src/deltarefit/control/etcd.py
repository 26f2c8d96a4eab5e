"""The control record under one etcd key, through etcd's own JSON gateway: for clusters that have an etcd and no bucket.

Plain HTTP from the standard library, because the Python clients are asynchronous or carry a copy of the protocol buffers that
collides with others in the same process, and two requests are all that is needed. A transaction
compares the key's ``mod_revision``, which never repeats. Reads are linearizable, which is etcd's default.

Works with etcd 3.4 and newer (path ``/v3``; https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/).
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from deltarefit.control.store import ABSENT, SwapUncertainError, Tag, check_nbytes
from deltarefit.errors import RejectedError, TransportError
from deltarefit.protocol.record import MAX_CONTROL_NBYTES

__all__ = ["EtcdRecordStore"]

_MAX_REPLY_NBYTES = 2 * MAX_CONTROL_NBYTES
"""Base64 makes a record a third longer; the rest is a few hundred bytes."""


class EtcdRecordStore:
    """One key that is only ever put in a transaction."""

    def __init__(
        self,
        endpoints: Sequence[str],
        key: str,
        *,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """Store the settings; nothing is contacted.

        Args:
            endpoints: ``http://host:2379`` or ``https://...``, tried in turn.
            key: the key, for example ``deltarefit/run7/control``.
            user: for servers with authentication; empty without.
            password: of ``user``.
            tls: for ``https`` endpoints; default: the machine's trusted certificates.
            timeout_s: of one request.
        """
        if not endpoints or not key:
            raise RejectedError("etcd: at least one endpoint and a key are needed")
        self._endpoints = tuple(_parsed(endpoint) for endpoint in endpoints)
        self._key = key
        self._user = user
        self._password = password
        self._tls = tls
        self._timeout_s = timeout_s

    @property
    def place(self) -> str:
        return f"etcd {', '.join(f'{host}:{port}' for _, host, port in self._endpoints)} key {self._key}"

    def read(self) -> tuple[bytes | None, Tag]:
        reply = self._ask("kv/range", {"key": _encoded(self._key.encode())}, TransportError)
        found = reply.get("kvs") or []
        if not found:
            return None, ABSENT
        try:
            data = base64.b64decode(found[0].get("value", ""), validate=True)
            tag = Tag(generation=str(int(found[0]["mod_revision"])))
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(f"{self.place}: a reply that is not etcd's: {error}") from error
        check_nbytes(self.place, len(data))
        return data, tag

    def swap(self, tag: Tag, new: bytes) -> bool:
        check_nbytes(self.place, len(new))
        key = _encoded(self._key.encode())
        # A key that does not exist has mod_revision 0, so creating and replacing are one comparison.
        expected = "0" if tag == ABSENT else tag.generation
        if expected is None or not expected.isdigit():
            return False
        body = {
            "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": expected}],
            "success": [{"request_put": {"key": key, "value": _encoded(new)}}],
        }
        return self._ask("kv/txn", body, SwapUncertainError).get("succeeded") is True

    def _ask(self, path: str, body: Mapping[str, Any], unanswered: type[TransportError]) -> Mapping[str, Any]:
        """One request to the first endpoint that answers. A swap is sent to one endpoint only once it may have been heard."""
        last: Exception | None = None
        for endpoint in self._endpoints:
            try:
                token = self._token(endpoint)
                connection = self._connected(endpoint)
            except (OSError, http.client.HTTPException) as error:
                last = error
                continue
            try:
                return self._request(connection, path, body, token)
            except (OSError, http.client.HTTPException, _ServerError) as error:
                last = error
                if unanswered is SwapUncertainError:
                    break
            finally:
                connection.close()
        raise unanswered(f"{self.place}: no answer: {last}") from last

    def _token(self, endpoint: tuple[bool, str, int]) -> str:
        if not self._user:
            return ""
        connection = self._connected(endpoint)
        try:
            reply = self._request(connection, "auth/authenticate", {"name": self._user, "password": self._password}, "")
        except _ServerError as error:
            raise RejectedError(f"{self.place}: user {self._user!r} is not let in: {error}") from error
        finally:
            connection.close()
        return str(reply.get("token", ""))

    def _connected(self, endpoint: tuple[bool, str, int]) -> http.client.HTTPConnection:
        is_secure, host, port = endpoint
        connection: http.client.HTTPConnection
        if is_secure:
            context = self._tls or ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        connection.connect()
        return connection

    def _request(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any], token: str
    ) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        with connection.getresponse() as response:
            data = response.read(_MAX_REPLY_NBYTES + 1)
        if len(data) > _MAX_REPLY_NBYTES:
            raise RejectedError(f"{self.place}: a reply of more than {_MAX_REPLY_NBYTES} bytes; is something else there?")
        text = data[:200].decode(errors="replace")
        if response.status in (401, 403):
            raise RejectedError(f"{self.place}: not allowed ({response.status}): {text}")
        if response.status != 200:
            raise _ServerError(f"status {response.status}: {text}")
        try:
            reply = json.loads(data)
        except ValueError as error:
            raise _ServerError(f"not JSON: {text}") from error
        if not isinstance(reply, dict):
            raise _ServerError(f"not an object: {text}")
        return reply


class _ServerError(Exception):
    """The server answered, but not with a result."""


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _parsed(endpoint: str) -> tuple[bool, str, int]:
    try:
        parts = urlsplit(endpoint)
        port = parts.port or 2379
    except ValueError as error:
        raise RejectedError(f"etcd endpoint {endpoint!r}: {error}; expected http://host:port or https://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise RejectedError(f"etcd endpoint {endpoint!r}: expected http://host:port or https://host:port")
    return parts.scheme == "https", parts.hostname, port
