"""How the control plane paces itself, and what it says when the store holds something else."""

from __future__ import annotations

import pytest

from deltarefit.control import ABSENT, ControlPlane, ControlSettings, MemoryRecordStore, SwapUncertainError
from deltarefit.errors import RejectedError, TransportError
from deltarefit.ids import BaselineId, PolicyVersion
from deltarefit.protocol import CommitRecord
from deltarefit.testing.control_faults import FaultyRecordStore, SwapFault

K0 = CommitRecord(PolicyVersion(0), BaselineId("b0"))


def plane(store, pauses, **changes):
    numbers = iter(range(1000))
    settings = ControlSettings(**{"max_tries": 5, "first_pause_s": 0.1, "max_pause_s": 0.5, **changes})
    return ControlPlane(store, new_nonce=lambda: f"n{next(numbers)}", pause=pauses.append, settings=settings)


def test_pauses_double_up_to_the_cap_and_end():
    pauses = []
    faulty = FaultyRecordStore(MemoryRecordStore("here"))
    control = plane(faulty, pauses)
    control.create("run", "setup", K0)
    faulty.plan(*[SwapFault.LOSE_REQUEST] * 5)
    with pytest.raises(SwapUncertainError, match=r"here: no change of the record went through in 5 tries; last: .*no reply"):
        control.acquire("x", "setup")
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_cut_store_is_out_of_reach_and_says_where():
    faulty = FaultyRecordStore(MemoryRecordStore("here"))
    faulty.cut()
    with pytest.raises(TransportError, match="here: out of reach after 5 tries: here: cut off"):
        plane(faulty, []).read()


def test_a_store_cut_after_the_swap_was_sent_is_uncertain_not_unreached():
    inner = MemoryRecordStore("here")
    faulty = FaultyRecordStore(inner)
    control = plane(faulty, [])
    control.create("run", "setup", K0)
    faulty.plan(SwapFault.LOSE_REPLY)
    faulty.before_swap = faulty.cut
    with pytest.raises(SwapUncertainError, match="out of reach after a change was sent"):
        control.acquire("x", "setup")
    faulty.cut(False)
    assert control.read().coordinator == "x"


def test_something_else_in_the_records_place_is_refused():
    store = MemoryRecordStore("here")
    store.swap(ABSENT, b"<html>404</html>")
    with pytest.raises(RejectedError, match="here: not a control record"):
        plane(store, []).read()


class Cutting(MemoryRecordStore):
    """Gives half of the record as often as it is told to."""

    num_cuts = 0

    def read(self):
        data, tag = super().read()
        if self.num_cuts and data is not None:
            self.num_cuts -= 1
            return data[: len(data) // 2], tag
        return data, tag


def test_a_record_whose_body_ended_early_is_read_again():
    store = Cutting("here")
    control = plane(store, [])
    control.create("run", "setup", K0)
    store.num_cuts = 1
    assert control.read().run == "run"
    store.num_cuts = 2
    assert control.acquire("x", "setup").coordinator == "x"
    assert store.num_cuts == 0


def test_a_request_that_is_already_fulfilled_writes_nothing():
    store = MemoryRecordStore()
    control = plane(store, [])
    control.create("run", "setup", K0)
    control.acquire("x", "setup")
    before = store.read()
    control.acquire("x", "setup")
    control.release(99, "nobody")
    control.mark_obsolete("no such attempt")
    assert store.read() == before


@pytest.mark.parametrize("wrong", [{"max_tries": 0}, {"first_pause_s": -1.0}, {"max_pause_s": 0.01}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(RejectedError, match="expected max_tries >= 1"):
        ControlSettings(**{"first_pause_s": 0.1, "max_pause_s": 0.5, **wrong})
