"""The control record: the one durable authority on which policy version is committed (paper A.1, B; design note 0001).

Everything here is a value. ``commit.py`` holds the rules that make one value from another; ``control/`` stores the bytes.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol.chain import ChainLink, check_links

__all__ = [
    "CONTROL_FORMAT",
    "MAX_CONTROL_NBYTES",
    "AdmittedTransition",
    "AttemptState",
    "CommitOutcome",
    "CommitRecord",
    "ControlState",
    "decode_control",
    "encode_control",
]

CONTROL_FORMAT = 2
"""Format version of the encoded control record; a reader refuses any other."""
MAX_CONTROL_NBYTES = 1 << 20
"""A record with 10,000 required receivers of the longest names has about 0.7 MB; whatever is larger is not ours."""
RECENT_NONCES = 16
"""How many writers' nonces the record remembers. A writer whose reply was lost finds itself here unless more than this many
other writes came between; then the rules, which are repeatable, decide again."""


class CommitOutcome(Enum):
    """What a commit came to (paper B.2, outcome c)."""

    SUCCESS = "success"
    FAILED = "failed"
    """The record cannot have changed by this attempt any more."""
    UNKNOWN = "unknown"
    """No reply was had: the swap may have happened or may still happen. ``read_commit`` decides."""
    CONFLICT = "conflict"
    """Another coordinator owns the run or committed first."""


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The paper's K = (v, g), with the digest of the whole policy beside it."""

    policy_version: PolicyVersion
    baseline: BaselineId
    policy_digest: str = ""
    """32 hex digits over the digests of all canonical tensors; empty if it is not known."""

    def names_same(self, other: CommitRecord) -> bool:
        """Whether both name the same version and baseline. The digest follows from these and is not compared."""
        return self.policy_version == other.policy_version and self.baseline == other.baseline

    def __str__(self) -> str:
        return f"policy version {self.policy_version} (baseline {self.baseline})"


class AttemptState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attempt that is bound to the record. There is room for one only: binding another fences this one off."""

    attempt: AttemptId
    epoch: int
    """Epoch of the coordinator that prepared it."""
    ordinal: int
    """Counts the attempts of its transition, from 1."""
    mode: EncodingMode
    is_dense: bool
    """Every element is sent, as overwrites, so that the result does not depend on what receivers hold."""
    base: CommitRecord
    """The record that a commit of this attempt replaces (the paper's K^v)."""
    baseline: BaselineId
    """The candidate baseline g."""
    plan_digest: str
    required: tuple[ReceiverId, ...]
    """Required receivers in name order, fixed for this attempt."""
    is_obsolete: bool = False
    """The fence. Once it is in the record, no commit of this attempt can succeed: an earlier one loses its swap because the
    record changed, a later one is refused by the rule."""

    @property
    def target_version(self) -> PolicyVersion:
        return PolicyVersion(self.base.policy_version + 1)

    @property
    def target(self) -> CommitRecord:
        """What the record names once this attempt is committed; without the digest, which the commit adds."""
        return CommitRecord(self.target_version, self.baseline)


class AdmittedTransition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is remembered between attempts of one transition. Present from the first prepare that may have led to writes."""

    target_version: PolicyVersion
    candidate: str
    """Names the fixed candidate weights. Retries must carry the same, or send every element: a receiver may hold bits of it."""
    is_dense: bool
    """Sticky: once one attempt had to send every element, the later ones must too."""
    num_attempts: int


class ControlState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole control record of one run."""

    run: str
    """Name of the run; a record found under another run's name is refused."""
    setup_digest: str
    """What stays fixed over the whole run (the catalog's digest)."""
    record: CommitRecord
    epoch: int = 0
    """Grows by one each time a coordinator takes the run over; never falls. Fences every older coordinator."""
    coordinator: str = ""
    """Who holds the run; empty if it was released."""
    transition: AdmittedTransition | None = None
    attempt: AttemptState | None = None
    repair: str = ""
    """Not empty: receivers or owners cannot be trusted to hold the committed version, for this reason, and the next attempt
    must send every element."""
    abort: str = ""
    """Not empty: an operator asked for the current transition to be aborted, for this reason."""
    revision: int = 0
    """Grows by one with each write, so no two records of a run have equal bytes. Conditional writes compare by content on
    some stores (an ETag is often a digest), and this is what keeps A -> B -> A from looking like no change."""
    nonces: tuple[str, ...] = ()
    """Nonces of the latest writers, newest first."""
    links: tuple[ChainLink, ...] = ()
    """Committed attempts that are retained, oldest first. Each starts where the one before it ends, and the last one ends at
    the committed version: so from every version that a link starts from, a chain leads to the committed one."""

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and nothing is to be repaired: receivers that hold the committed version may serve."""
        return self.attempt is None and self.transition is None and not self.repair

    @property
    def committed_attempt(self) -> AttemptState | None:
        """The attempt that the record's commit came from, until its coordinator closed it."""
        if self.attempt is not None and self.record.names_same(self.attempt.target):
            return self.attempt
        return None

    @property
    def open_attempt(self) -> AttemptState | None:
        """The attempt that could still be committed."""
        attempt = self.attempt
        if attempt is None or attempt.is_obsolete or attempt.epoch != self.epoch or not self.record.names_same(attempt.base):
            return None
        return attempt


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    state: ControlState


class _FormatOnly(msgspec.Struct, frozen=True):
    format: int


def encode_control(state: ControlState) -> bytes:
    """JSON with a format version: small, and readable by the operator who opens the object."""
    return msgspec.json.encode(_Envelope(CONTROL_FORMAT, state))


def decode_control(data: bytes, *, where: str = "control record") -> ControlState:
    """Read a record strictly: unknown keys, wrong types and other format versions are refused.

    Raises:
        RejectedError: the bytes are not a control record of this format. ``where`` names the place in the text.
    """
    if len(data) > MAX_CONTROL_NBYTES:
        raise RejectedError(f"{where}: {len(data)} bytes, expected at most {MAX_CONTROL_NBYTES}; is this another file?")
    try:
        found = msgspec.json.decode(data, type=_FormatOnly).format
        if found != CONTROL_FORMAT:
            raise RejectedError(
                f"{where}: format version {found}, this deltarefit reads {CONTROL_FORMAT}; use the version that made the run"
            )
        state = msgspec.json.decode(data, type=_Envelope).state
    except msgspec.MsgspecError as error:
        raise RejectedError(f"{where}: not a control record ({error}); was the object changed by something else?") from error
    _check(state, where)
    return state


def _check(state: ControlState, where: str) -> None:
    """Refuse a record that no sequence of rules could have made."""
    attempt = state.attempt
    if state.epoch < 0 or state.revision < 0 or state.record.policy_version < 0:
        raise RejectedError(f"{where}: negative counter (epoch {state.epoch}, revision {state.revision}, {state.record})")
    if attempt is not None and attempt.epoch > state.epoch:
        raise RejectedError(f"{where}: attempt {attempt.attempt} of epoch {attempt.epoch}, but the run is in {state.epoch}")
    if attempt is not None and list(attempt.required) != sorted(set(attempt.required)):
        raise RejectedError(f"{where}: required receivers of {attempt.attempt} are not in order or named twice")
    check_links(state.links, state.record.policy_version, where)
