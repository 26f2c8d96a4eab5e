"""What a driver asks of a running engine, and a small client for engines behind HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from deltarefit.errors import AttemptFailedError, DeadlineError, RefitError, RejectedError

__all__ = ["EngineCalls", "JsonServer", "ServerRefusalError", "run_in_loop"]

_MAX_ANSWER_NBYTES = 2**20
_SHOWN_NBYTES = 200


class EngineCalls(Protocol):
    """What the driver needs of a running engine. Every call returns once it has taken effect on all ranks."""

    is_thread_safe: bool
    """Whether calls may come from a thread other than the one that generates, while it generates."""

    def engine_version(self) -> str:
        """Such as ``0.32.0``."""

    def init(self, info: Mapping[str, Any]) -> None:
        """Have every rank meet the driver (``RankEndpoint.meet``)."""

    def start(self) -> None:
        """Begin a session of operations."""

    def update(self, info: Mapping[str, Any]) -> None:
        """Have every rank carry out one operation (``RankEndpoint.receive``)."""

    def finish(self) -> None:
        """End the session."""

    def set_weight_version(self, weight_version: str) -> None:
        """Label answers with it from now on."""

    def pause(self, timeout_s: float) -> None:
        """Raises DeadlineError if requests did not end in time; the engine then stays closed to new ones."""

    def resume(self) -> None:
        """Admit requests again."""

    def reset_caches(self) -> bool:
        """Drop prefix, KV connector and encoder caches; False if the engine could not."""


def run_in_loop(
    coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, timeout_s: float, *, engine: str, what: str
) -> Any:
    """Run a coroutine in the event loop of another thread, and wait for what it returns.

    Raises:
        DeadlineError: it did not return in time. It is cancelled; what it asked of the engine may still happen.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        if future.done() and not future.cancelled():
            raise AttemptFailedError(f"{engine} timed out by itself at {what}: {error}") from error
        future.cancel()
        raise DeadlineError(f"{engine} did not finish {what} within {timeout_s} s") from error


class ServerRefusalError(AttemptFailedError):
    """The server answered with an error."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class JsonServer:
    """Asks a server on this node for JSON, or tells it what to do."""

    def __init__(self, url: str, *, timeout_s: float, if_missing: str) -> None:
        """``if_missing``: what to do if the server lacks a route, for the error's text."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise RejectedError(f"engine URL {url!r}: expected something like http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._if_missing = if_missing

    def ask(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The decoded answer, an object.

        Raises:
            RejectedError: the server has no such route.
            DeadlineError: no answer in time.
            ServerRefusalError: the server answered with an error.
            AttemptFailedError: nobody answers, or the answer is no JSON object or longer than any that is expected.
        """
        text = self._exchange(method, route, body, timeout_s)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
        shown = text[:_SHOWN_NBYTES].decode(errors="replace")
        raise AttemptFailedError(
            f"{method} {self._url}{route}: expected a JSON object, got {len(text)} bytes that are none: {shown!r}; "
            "is another server at this address?"
        )

    def tell(self, method: str, route: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> None:
        """The same where only success counts, and the answer may be of any kind. Some servers say that they failed in a body
        with status 200; that is a refusal too."""
        text = self._exchange(method, route, body, timeout_s)
        try:
            answer = json.loads(text)
        except ValueError:
            return
        if isinstance(answer, dict) and answer.get("success", True) is not True:
            shown = text[:_SHOWN_NBYTES].decode(errors="replace")
            raise ServerRefusalError(f"{method} {self._url}{route}: answered with status 200, but {shown}", status=200)

    def _exchange(self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> bytes:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self._url + route, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                text: bytes = answer.read(_MAX_ANSWER_NBYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(method, route, error) from error
        except TimeoutError as error:
            raise DeadlineError(f"{method} {self._url}{route}: no answer within {limit_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise AttemptFailedError(f"{method} {self._url}{route}: {error}; is the server running?") from error
        if len(text) > _MAX_ANSWER_NBYTES:
            raise AttemptFailedError(
                f"{method} {self._url}{route}: the answer is longer than the {_MAX_ANSWER_NBYTES} bytes that are read of one"
            )
        return text

    def _refusal(self, method: str, route: str, error: urllib.error.HTTPError) -> RefitError:
        if error.code == 404:
            return RejectedError(f"{method} {route}: the server has no such route; {self._if_missing}")
        text = error.read(_MAX_ANSWER_NBYTES).decode(errors="replace")[:500]
        return ServerRefusalError(f"{method} {route}: the server answered {error.code}: {text}", error.code)
