"""The phases of an attempt at a receiver, as one table (paper B.1, Figure B.2; PROTOCOL.md draws it).

An attempt is *active* in RECEIVING, APPLYING and COMPLETED; only then anything of it is heard. Writes happen in APPLYING only.
Nothing leads back from FAILED or OBSOLETE into the same attempt: the retry is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

__all__ = ["NEXT_PHASE", "Phase", "Verb"]


class Phase(Enum):
    """Where the attempt at hand stands, seen by this receiver."""

    IDLE = "idle"
    RECEIVING = "receiving"
    """Bound by prepare; nothing may be written yet."""
    APPLYING = "applying"
    """After open_apply."""
    COMPLETED = "completed"
    """Everything is applied and acknowledged; the commit is awaited."""
    FAILED = "failed"
    OBSOLETE = "obsolete"
    """Marked obsolete or fenced: nothing of it may be written any more."""


class Verb(Enum):
    """What moves a reception from phase to phase."""

    PREPARE = "prepare"
    OPEN_APPLY = "open_apply"
    COMPLETE = "complete"
    FAIL = "fail"
    MARK_OBSOLETE = "mark_obsolete"
    COMMITTED = "committed"
    CLEANUP = "cleanup"
    RESTORED = "restored"


_P = Phase
_V = Verb
NEXT_PHASE: Mapping[Phase, Mapping[Verb, Phase]] = {
    _P.IDLE: {_V.PREPARE: _P.RECEIVING, _V.RESTORED: _P.IDLE},
    _P.RECEIVING: {
        _V.OPEN_APPLY: _P.APPLYING,
        _V.FAIL: _P.FAILED,
        _V.MARK_OBSOLETE: _P.OBSOLETE,
        _V.PREPARE: _P.RECEIVING,
    },
    _P.APPLYING: {
        _V.COMPLETE: _P.COMPLETED,
        _V.FAIL: _P.FAILED,
        _V.MARK_OBSOLETE: _P.OBSOLETE,
        _V.PREPARE: _P.RECEIVING,
    },
    _P.COMPLETED: {
        _V.COMMITTED: _P.IDLE,
        _V.FAIL: _P.FAILED,
        _V.MARK_OBSOLETE: _P.OBSOLETE,
        _V.PREPARE: _P.RECEIVING,
    },
    _P.FAILED: {
        _V.MARK_OBSOLETE: _P.OBSOLETE,
        _V.CLEANUP: _P.IDLE,
        _V.PREPARE: _P.RECEIVING,
        _V.RESTORED: _P.IDLE,
    },
    _P.OBSOLETE: {
        _V.COMMITTED: _P.IDLE,
        _V.CLEANUP: _P.IDLE,
        _V.PREPARE: _P.RECEIVING,
        _V.RESTORED: _P.IDLE,
    },
}
"""Where each verb leads. A verb that names another attempt than the active one, or is not listed, is ignored."""
