"""What a driver asks of a running engine, and a small client for engines behind HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from deltarefit.errors import AttemptFailedError, DeadlineError, RefitError, RejectedError

__all__ = ["EngineCalls", "JsonServer"]

_MAX_ANSWER_NBYTES = 2**20


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


class JsonServer:
    """Asks a server on this node for JSON."""

    def __init__(self, url: str, *, timeout_s: float, if_missing: str) -> None:
        """``if_missing``: what to do if the server lacks a route, for the error's text."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise RejectedError(f"engine URL {url!r}: expected something like http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._if_missing = if_missing

    def ask(self, method: str, route: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """The decoded answer, or its text if it is no JSON; None if it is empty.

        Raises:
            RejectedError: the server has no such route.
            DeadlineError: no answer in time.
            AttemptFailedError: nobody answers, or the server refuses.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self._url + route, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                text = answer.read(_MAX_ANSWER_NBYTES)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(method, route, error) from error
        except TimeoutError as error:
            raise DeadlineError(f"{method} {self._url}{route}: no answer within {limit_s} s") from error
        except OSError as error:
            raise AttemptFailedError(f"{method} {self._url}{route}: {error}; is the server running?") from error
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text.decode(errors="replace")

    def _refusal(self, method: str, route: str, error: urllib.error.HTTPError) -> RefitError:
        if error.code == 404:
            return RejectedError(f"{method} {route}: the server has no such route; {self._if_missing}")
        text = error.read(_MAX_ANSWER_NBYTES).decode(errors="replace")[:500]
        return AttemptFailedError(f"{method} {route}: the server answered {error.code}: {text}")
