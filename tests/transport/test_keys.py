"""Keys: their order is the declared order, and no name leaves its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, OwnerId, PayloadId, attempt_id
from deltarefit.transport import keys

ATTEMPT = attempt_id(1, 1, "00000000")
IDS = st.builds(PayloadId, st.just(ATTEMPT), st.integers(0, 2**31 - 1), st.integers(0, 99_999).map(OwnerId))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
MAIL_KEYS = st.builds(
    keys.MailKey, NAMES, st.integers(0, 10**8 - 1), st.integers(0, 2**32 - 1).map("{:08x}".format), st.integers(0, 10**12 - 1)
)


@given(st.lists(IDS, unique=True))
def test_payload_keys_sort_in_the_declared_order(ids):
    assert sorted(ids) == sorted(ids, key=keys.payload)


@given(IDS)
def test_payloads_lie_under_their_attempt(payload_id):
    key = keys.payload(payload_id)
    assert key.startswith(keys.attempt_prefix(ATTEMPT) + "/")
    assert keys.attempt_of(key) == ATTEMPT


@given(NAMES, MAIL_KEYS)
def test_mail_keys_say_what_they_were_made_of(recipient, parts):
    key = keys.mail(recipient, parts)
    assert keys.parse_mail(key) == parts
    assert key.startswith(keys.mail_prefix(recipient) + "/")


@pytest.mark.parametrize("key", ["mail/me/x", "mail/me/00000001-1-00000000-a", "mail/me/README", "", "a/b/c"])
def test_other_keys_are_no_mail(key):
    assert keys.parse_mail(key) is None


@pytest.mark.parametrize("text", ["", "..", "a/b", "a b", "-a", "é", "x" * 65, "a\n"])
def test_names_that_would_leave_their_place_are_refused(text):
    for spell in (keys.member, keys.control, keys.plan, keys.mail_prefix, lambda t: keys.attempt_prefix(AttemptId(t))):
        with pytest.raises(RejectedError, match="expected 1 to 64"):
            spell(text)


@pytest.mark.parametrize("key", ["attempts", "members/x", "attempts/../x", "attempts//x"])
def test_key_of_no_attempt(key):
    assert keys.attempt_of(key) is None
