"""Mailboxes pass the shipped suite on every kind of store."""

from __future__ import annotations

import itertools

import pytest

from deltarefit.runtime.clock import SystemClock
from deltarefit.testing.transport_suite import MailboxTests
from deltarefit.transport import Mailbox, open_run

RUN = itertools.count()


class _Mailboxes(MailboxTests):
    def open_mailbox(self, store, me, nonce="00000001"):
        return Mailbox(store, me, clock=SystemClock(), nonce=nonce)


class TestFiles(_Mailboxes):
    @pytest.fixture
    def store(self, tmp_path):
        return open_run(f"file://{tmp_path}/run", clock=SystemClock())


class TestMemoryStore(_Mailboxes):
    @pytest.fixture
    def store(self):
        return open_run(f"memory://mail-{next(RUN)}", clock=SystemClock())


@pytest.mark.process
class TestS3(_Mailboxes):
    @pytest.fixture
    def store(self, s3_server):
        return open_run(s3_server.run_url(f"mail-{next(RUN)}"), clock=SystemClock(), options=s3_server.options)
