"""Where things lie under a run's URL. No other module spells a key.

::

    control/…                              the control record and what belongs to it
    members/<name>                         one beacon per member
    mail/<recipient>/<boot>-<sequence>-<nonce>-<sender>
    attempts/<attempt>/payloads/<sequence>-<owner>
    attempts/<attempt>/manifest/<owner>    each owner writes its own part, so no part has two writers
    attempts/<attempt>/halt                there once the coordinator has given the attempt up, while owners still build
    attempts/<attempt>/broken/<owner>      why an owner's payloads do not all get through, where only the owner knows
    attempts/<attempt>/progress/<who>      how far each participant is, for people
    attempts/<attempt>/digests             what the policy is before and after, for receivers that come back over the attempt
    relays/<name>                          one beacon per relay
    plans/<digest>                         refit plans, by content

Numbers have fixed widths, so the order of keys is the declared order of payloads and the order of a sender's messages.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, PayloadId

__all__ = [
    "ATTEMPTS",
    "CONTROL",
    "MAIL",
    "MEMBERS",
    "PLANS",
    "RELAYS",
    "MailKey",
    "attempt_of",
    "attempt_prefix",
    "broken",
    "broken_prefix",
    "control",
    "digests",
    "halt",
    "is_link",
    "mail",
    "mail_prefix",
    "manifest_part",
    "manifest_prefix",
    "member",
    "name_of_member",
    "parse_mail",
    "payload",
    "payload_prefix",
    "plan",
    "progress",
    "progress_prefix",
    "relay",
    "slug",
]

CONTROL = "control"
MEMBERS = "members"
MAIL = "mail"
ATTEMPTS = "attempts"
PLANS = "plans"
RELAYS = "relays"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAIL = re.compile(r"(\d{8})-(\d{12})-([0-9a-f]{8})-([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def _checked(kind: str, text: str) -> str:
    """The same rule as in ``ids``: a name that passes can be one segment of a key in every store."""
    if not _NAME.fullmatch(text):
        raise RejectedError(
            f"{kind} {text[:80]!r}: expected 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return text


def control(name: str) -> str:
    """An object that belongs to the control plane, e.g. ``control/coordinator``."""
    return f"{CONTROL}/{_checked('control object', name)}"


def member(name: str) -> str:
    """The beacon of a receiver."""
    return f"{MEMBERS}/{_checked('member', name)}"


def name_of_member(key: str) -> str:
    """The last segment of a beacon's key."""
    return key.rsplit("/", 1)[-1]


def attempt_prefix(attempt: AttemptId) -> str:
    """Everything of one attempt lies under this prefix, so one deletion cleans it up."""
    return f"{ATTEMPTS}/{_checked('attempt', attempt)}"


def attempt_of(key: str) -> AttemptId | None:
    """The attempt whose prefix holds this key, or None."""
    parts = key.split("/", 2)
    return AttemptId(parts[1]) if len(parts) > 1 and parts[0] == ATTEMPTS and _NAME.fullmatch(parts[1]) else None


def payload_prefix(attempt: AttemptId) -> str:
    """All payloads of an attempt."""
    return f"{attempt_prefix(attempt)}/payloads"


def payload(payload_id: PayloadId) -> str:
    """One payload; keys sort as payload ids do: by sequence, then owner."""
    return f"{payload_prefix(payload_id.attempt)}/{payload_id.sequence:010d}-{payload_id.owner:06d}"


def manifest_prefix(attempt: AttemptId) -> str:
    """All parts of an attempt's manifest."""
    return f"{attempt_prefix(attempt)}/manifest"


def manifest_part(attempt: AttemptId, owner: int) -> str:
    """The part of the manifest that this owner writes."""
    return f"{manifest_prefix(attempt)}/{owner:06d}"


def halt(attempt: AttemptId) -> str:
    """Tells owners in the middle of a build that it is in vain."""
    return f"{attempt_prefix(attempt)}/halt"


def broken_prefix(attempt: AttemptId) -> str:
    """What owners say about payloads that do not get through."""
    return f"{attempt_prefix(attempt)}/broken"


def broken(attempt: AttemptId, owner: int) -> str:
    """What this owner says."""
    return f"{broken_prefix(attempt)}/{owner:06d}"


def progress_prefix(attempt: AttemptId) -> str:
    """How far the participants of an attempt are."""
    return f"{attempt_prefix(attempt)}/progress"


def progress(attempt: AttemptId, who: str) -> str:
    """How far one participant is."""
    return f"{progress_prefix(attempt)}/{_checked('participant', who)}"


def digests(attempt: AttemptId) -> str:
    """Digests of all tensors before and after the attempt."""
    return f"{attempt_prefix(attempt)}/digests"


def is_link(key: str) -> bool:
    """Whether an object of a committed attempt is of use to receivers that come back over it."""
    return key.split("/")[2:3] in (["payloads"], ["manifest"], ["digests"])


def relay(name: str) -> str:
    """The beacon of a relay."""
    return f"{RELAYS}/{_checked('relay', name)}"


def slug(text: str) -> str:
    """``receiver rollout-0`` as one segment of a key, cut to the length that names may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:64]


def plan(digest: str) -> str:
    """A refit plan, by its digest."""
    return f"{PLANS}/{_checked('plan', digest)}"


def mail_prefix(recipient: str) -> str:
    """All messages that wait for this recipient."""
    return f"{MAIL}/{_checked('recipient', recipient)}"


class MailKey(NamedTuple):
    """What a message's key says about it. Tuples of one sender sort in the order of posting."""

    sender: str
    boot: int
    """Counts the sender's starts, as far as its messages still wait: a later start's messages come after an earlier one's."""
    nonce: str
    """Eight hex digits of one start of the sender."""
    sequence: int
    """0-based within that start."""


def mail(recipient: str, parts: MailKey) -> str:
    """The key of one message."""
    name = f"{parts.boot:08d}-{parts.sequence:012d}-{parts.nonce}-{_checked('sender', parts.sender)}"
    return f"{mail_prefix(recipient)}/{name}"


def parse_mail(key: str) -> MailKey | None:
    """Read a message's key; None if it is not one of ours."""
    match = _MAIL.fullmatch(key.rsplit("/", 1)[-1])
    if match is None:
        return None
    return MailKey(match[4], int(match[1]), match[3], int(match[2]))
