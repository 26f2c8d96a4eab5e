"""Repeat what may pass when repeated: one policy for every transport."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.errors import RejectedError, TransportError
from deltarefit.transport.base import Clock

__all__ = ["RetryPolicy", "retry"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and how long to wait in between: each wait is twice the one before, up to a limit."""

    attempts: int = 4
    """Calls in all; 1 means never to repeat."""
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_delay_s < 0 or self.max_delay_s < self.first_delay_s:
            raise RejectedError(f"retry policy {self}: expected attempts >= 1 and 0 <= first_delay_s <= max_delay_s")

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after that many failures (from 1)."""
        return float(min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 30)))


def retry(what: str, call: Callable[[], _T], *, policy: RetryPolicy, clock: Clock) -> _T:
    """Call until it returns; ``TransportError`` is repeated as the policy says, every other error passes at once."""
    failures = 0
    while True:
        try:
            return call()
        except TransportError as error:
            failures += 1
            if failures >= policy.attempts:
                if policy.attempts == 1:
                    raise
                raise TransportError(f"{what}: gave up after {failures} tries: {error}") from error
            _LOG.warning("%s: try %d of %d failed: %s", what, failures, policy.attempts, error)
            clock.sleep(policy.delay_s(failures))
