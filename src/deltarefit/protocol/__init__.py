"""The refit protocol as pure machines and rules: events in, commands out (paper App. B; PROTOCOL.md beside this file).

No I/O, no threads, no clock, no randomness, no tensors: every fact comes in as an argument and every act goes out as a value.
May import ``errors``, ``ids``, msgspec and the standard library's values; import-linter checks that.
"""

from deltarefit.protocol.commands import Command, TransitionOutcome
from deltarefit.protocol.commit import CommitRequest, PrepareRequest
from deltarefit.protocol.events import Event, UnfinishedAttempt
from deltarefit.protocol.lease import LeaseSettings, LeaseVerdict, LeaseWatch, SelfFence
from deltarefit.protocol.record import (
    AdmittedTransition,
    AttemptState,
    CommitOutcome,
    CommitRecord,
    ControlState,
    decode_control,
    encode_control,
)
from deltarefit.protocol.transition import (
    NEXT_STATE,
    IllegalEventError,
    Signal,
    TransitionMachine,
    TransitionSettings,
    TransitionState,
)

__all__ = [
    "NEXT_STATE",
    "AdmittedTransition",
    "AttemptState",
    "Command",
    "CommitOutcome",
    "CommitRecord",
    "CommitRequest",
    "ControlState",
    "Event",
    "IllegalEventError",
    "LeaseSettings",
    "LeaseVerdict",
    "LeaseWatch",
    "PrepareRequest",
    "SelfFence",
    "Signal",
    "TransitionMachine",
    "TransitionOutcome",
    "TransitionSettings",
    "TransitionState",
    "UnfinishedAttempt",
    "decode_control",
    "encode_control",
]
