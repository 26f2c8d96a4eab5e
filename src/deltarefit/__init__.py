"""deltarefit: a policy's new weights, from a training cluster into every rollout server, exactly and fast.

Only the bits that changed travel; every receiver ends with the very bits that a full reload would have left. This package
places nothing itself: the serving engine's own loader says where an element belongs. It is not a checkpoint store and not a
collective library.

``Publisher`` and ``Receiver`` need torch and are imported when they are first named; everything else imports without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltarefit.errors import (
    AttemptFailedError,
    CommitConflictError,
    OperatorRequiredError,
    RefitError,
    RejectedError,
)
from deltarefit.ids import EncodingMode
from deltarefit.run_key import read_key

if TYPE_CHECKING:
    from deltarefit.runtime.auditing import AuditReport
    from deltarefit.runtime.publisher import Publisher
    from deltarefit.runtime.receiver_agent import Receiver
    from deltarefit.runtime.relay_service import RelayService
    from deltarefit.runtime.report import RefitReport
    from deltarefit.runtime.settings import PublisherSettings, ReceiverAgentSettings, RelayServiceSettings

__all__ = [
    "AttemptFailedError",
    "AuditReport",
    "CommitConflictError",
    "EncodingMode",
    "OperatorRequiredError",
    "Publisher",
    "PublisherSettings",
    "Receiver",
    "ReceiverAgentSettings",
    "RefitError",
    "RefitReport",
    "RejectedError",
    "RelayService",
    "RelayServiceSettings",
    "read_key",
]

__version__ = "0.1.0"

_LAZY = {
    "AuditReport": "deltarefit.runtime.auditing",
    "Publisher": "deltarefit.runtime.publisher",
    "PublisherSettings": "deltarefit.runtime.settings",
    "Receiver": "deltarefit.runtime.receiver_agent",
    "ReceiverAgentSettings": "deltarefit.runtime.settings",
    "RefitReport": "deltarefit.runtime.report",
    "RelayService": "deltarefit.runtime.relay_service",
    "RelayServiceSettings": "deltarefit.runtime.settings",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"deltarefit.{name} needs torch, which is not installed here: install deltarefit with the extra 'torch'"
            ) from error
    raise AttributeError(f"module 'deltarefit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
