"""Every error that deltarefit raises on purpose, grouped by what the caller must do (design note 0003).

* ``RejectedError``: nothing was changed; correct the set-up and call again.
* ``AttemptFailedError``: one attempt failed; the coordinator retries it with overwrites by itself.
* ``CommitConflictError``: another coordinator owns the run; stop.
* ``OperatorRequiredError``: no retry can repair this; the text names the command to run.

Inside the library always raise the most specific kind. Foreign exceptions are translated once, at the edge of the room
that called the foreign code, with ``raise ... from``.
"""

from __future__ import annotations

__all__ = [
    "AttemptFailedError",
    "BaseMismatchError",
    "CommitConflictError",
    "DeadlineError",
    "LoaderContractError",
    "OperatorRequiredError",
    "PayloadInvalidError",
    "PayloadMissingError",
    "RefitError",
    "RejectedError",
    "TransportError",
]


class RefitError(Exception):
    """Root of all errors that deltarefit raises on purpose."""


class RejectedError(RefitError):
    """Nothing was changed anywhere: the set-up, the input or the settings must be corrected first."""


class AttemptFailedError(RefitError):
    """One attempt failed. Inside a refit it is retried with overwrites; offline it ends the command."""


class PayloadInvalidError(AttemptFailedError):
    """A payload's bytes are not what they must be; nothing of that payload was applied."""


class PayloadMissingError(AttemptFailedError):
    """An expected payload did not arrive, or its object is gone."""


class LoaderContractError(AttemptFailedError):
    """The engine's loader did something that prewarm had not seen; the receiver must be repaired by overwrites."""


class BaseMismatchError(AttemptFailedError):
    """Resident bits are not those of the base version, so a difference against it would give wrong weights."""


class TransportError(AttemptFailedError):
    """Payloads or messages could not be carried."""


class DeadlineError(AttemptFailedError):
    """A wait ended at its deadline; the text names what was waited for and from whom."""


class CommitConflictError(RefitError):
    """Another coordinator took the run over or committed first. Stop; leave its request gates alone."""


class OperatorRequiredError(RefitError):
    """Retries cannot repair this. The request gate stays as it is; the text names the command to run."""
