"""What a trainer does beside a serving engine: two refits, the second while a request runs, and an audit."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

import deltarefit
from deltarefit.errors import AttemptFailedError, DeadlineError
from deltarefit.runtime.auditing import AuditReport
from deltarefit.runtime.report import RefitReport
from deltarefit.testing.server_process import ServerProcess

__all__ = ["Refitted", "StreamedRequest", "refit_twice"]

_JOIN_S = 120.0
_BEGIN_S = 60.0
_ANSWER_S = 120.0
_SHOWN_NBYTES = 1000


class StreamedRequest(threading.Thread):
    """One request whose answer comes as server-sent events; ``events`` holds the JSON of those that came."""

    def __init__(self, url: str, route: str, body: Mapping[str, Any]) -> None:
        """``start`` sends it."""
        super().__init__(daemon=True)
        self._netloc = urllib.parse.urlsplit(url).netloc
        self._route = route
        self._body = json.dumps(body)
        self._has_begun = threading.Event()
        self.events: list[Any] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Read to the end."""
        try:
            with closing(http.client.HTTPConnection(self._netloc, timeout=_ANSWER_S)) as connection:
                connection.request("POST", self._route, self._body, {"Content-Type": "application/json"})
                with connection.getresponse() as answer:
                    self._read(answer)
        except Exception as error:
            self.error = error
        self._has_begun.set()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        if answer.status != http.HTTPStatus.OK:
            raise AttemptFailedError(f"{self._route} answered {answer.status}: {answer.read(_SHOWN_NBYTES)!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                self.events.append(json.loads(line[6:]))
                self._has_begun.set()

    def wait_begun(self) -> None:
        """Until its first tokens are there, or it has failed.

        Raises:
            DeadlineError: neither in time.
        """
        if not self._has_begun.wait(_BEGIN_S):
            raise DeadlineError(f"{self._route}: no event after {_BEGIN_S:.0f} s")


@dataclass(frozen=True, slots=True)
class Refitted:
    """What the trainer was told."""

    reports: tuple[RefitReport, RefitReport]
    audit: AuditReport


def refit_twice(
    model: torch.nn.Module,
    policies: Sequence[Mapping[str, torch.Tensor]],
    run: str,
    request: StreamedRequest,
    receiver: ServerProcess,
) -> Refitted:
    """Refit a run's engine from the first of three policies to the second and, while the request runs, to the third."""
    settings = deltarefit.PublisherSettings(join_timeout_s=_JOIN_S)
    with deltarefit.Publisher(model, run=run, settings=settings) as publisher:
        model.load_state_dict(policies[1])
        receiver.require_alive()
        first = publisher.refit()
        model.load_state_dict(policies[2])
        request.start()
        request.wait_begun()
        second = publisher.refit()
        request.join(_ANSWER_S)
        return Refitted((first, second), publisher.audit())
