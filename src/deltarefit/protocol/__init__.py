"""The refit protocol as pure machines and rules: events in, commands out (paper App. B; PROTOCOL.md beside this file).

No I/O, no threads, no clock, no randomness, no tensors: every fact comes in as an argument and every act goes out as a value.
May import ``errors``, ``ids``, msgspec and the standard library's values; import-linter checks that.
"""

from deltarefit.protocol.chain import ChainLink, Retention
from deltarefit.protocol.commands import Command, TransitionOutcome
from deltarefit.protocol.commit import CommitRequest, PrepareRequest
from deltarefit.protocol.delivery import Arrival, Completion, Delivery, EndMarker, PrepareAttempt, Verdict, end_digest
from deltarefit.protocol.events import Event, UnfinishedAttempt
from deltarefit.protocol.lease import LeaseSettings, LeaseVerdict, LeaseWatch, SelfFence
from deltarefit.protocol.membership import Member, Membership, MemberStatus, RetirementProof
from deltarefit.protocol.owner import BindOwner, OwnerMachine, OwnerPhase
from deltarefit.protocol.reception import NEXT_PHASE, Phase, Reception, ReceptionSettings
from deltarefit.protocol.record import (
    AdmittedTransition,
    AttemptState,
    CommitOutcome,
    CommitRecord,
    ControlState,
    decode_control,
    encode_control,
)
from deltarefit.protocol.resident import Doubt, Resident
from deltarefit.protocol.transition import (
    NEXT_STATE,
    IllegalEventError,
    Signal,
    TransitionMachine,
    TransitionSettings,
    TransitionState,
)

__all__ = [
    "NEXT_PHASE",
    "NEXT_STATE",
    "AdmittedTransition",
    "Arrival",
    "AttemptState",
    "BindOwner",
    "ChainLink",
    "Command",
    "CommitOutcome",
    "CommitRecord",
    "CommitRequest",
    "Completion",
    "ControlState",
    "Delivery",
    "Doubt",
    "EndMarker",
    "Event",
    "IllegalEventError",
    "LeaseSettings",
    "LeaseVerdict",
    "LeaseWatch",
    "Member",
    "MemberStatus",
    "Membership",
    "OwnerMachine",
    "OwnerPhase",
    "Phase",
    "PrepareAttempt",
    "PrepareRequest",
    "Reception",
    "ReceptionSettings",
    "Resident",
    "Retention",
    "RetirementProof",
    "SelfFence",
    "Signal",
    "TransitionMachine",
    "TransitionOutcome",
    "TransitionSettings",
    "TransitionState",
    "UnfinishedAttempt",
    "Verdict",
    "decode_control",
    "encode_control",
    "end_digest",
]
