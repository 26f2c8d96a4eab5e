"""Time axes, lower bounds, traces: from hand-made intervals with hand-computed answers."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.runtime.events import StageEvent, union_s
from deltarefit.runtime.trace import chrome_trace, lanes, places
from deltarefit.runtime.trace_bounds import lower_bounds
from deltarefit.runtime.trace_clock import ClockReading, ClockShift, TimeAxis, on_axis
from deltarefit.runtime.trace_picture import timeline_svg


def event(stage, where, t0_s, t1_s, *, nbytes=0, payload="", attempt="v000001-a1-0"):
    return StageEvent(stage, where, attempt, t0_s, t1_s, nbytes, payload)


# --- lower bounds (paper App. C, Fig. C.5) ----------------------------------------------------------------------------------


def test_overlap_counts_once_and_gaps_not_at_all():
    assert union_s([(0, 2), (1, 3), (5, 6)]) == 4


def test_each_bound_is_the_longest_union_in_one_process():
    bounds = lower_bounds(
        [
            event("scan", "owner 0", 0, 2),
            event("encode", "owner 0", 1, 3),
            event("encode", "owner 0", 5, 6),
            event("scan", "owner 1", 0, 3),
            event("send", "owner 1", 3, 8),
            event("fetch", "receiver a", 4, 8),
            event("apply", "receiver a", 8, 9),
            event("verify", "receiver a", 9, 9.5),
            event("baseline", "owner 0", 10, 10.5),
            event("baseline", "owner 1", 10, 11),
        ]
    )
    assert (bounds.construction.seconds, bounds.construction.where) == (4, "owner 0")
    assert (bounds.transport.seconds, bounds.transport.where) == (5, "owner 1")
    assert (bounds.apply.seconds, bounds.apply.where) == (1, "receiver a")
    assert (bounds.window_s, bounds.check_s, bounds.latency_s) == (11, 0.5, 10.5)
    assert bounds.finalization_s == 1.5  # from the last application at 9 to 11, without the check
    assert bounds.binding == "transport"
    assert bounds.unexplained_s == pytest.approx(10.5 - 5 - 1.5)


def test_a_slow_application_does_not_lengthen_the_transport_bound():
    def bounds(apply_s):
        events = [event("scan", "owner 0", 0, 1), event("send", "owner 0", 1, 3), event("baseline", "owner 0", 9, 9.1)]
        return lower_bounds([*events, event("apply", "receiver a", 3, 3 + apply_s)])

    assert bounds(1).transport == bounds(4).transport


def test_what_lies_outside_the_window_does_not_count():
    bounds = lower_bounds(
        [
            event("send", "owner 0", -5, 1),
            event("scan", "owner 0", 0, 1),
            event("baseline", "owner 0", 2, 3),
            event("apply", "receiver a", 2.5, 30),
            event("fetch", "receiver a", 50, 60),
        ]
    )
    assert (bounds.transport.seconds, bounds.apply.seconds) == (1, 0.5)


def test_no_refit_no_bounds():
    assert lower_bounds([]).binding == ""
    assert lower_bounds([event("scan", "owner 0", 0, 1)]).window_s == 0


_INTERVAL = st.tuples(st.floats(-10, 10), st.floats(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    st.lists(
        st.tuples(st.sampled_from(["scan", "encode", "send", "fetch", "apply", "baseline"]), st.integers(0, 2), _INTERVAL)
    ),
    st.lists(st.floats(-1000, 1000), min_size=3, max_size=3),
)
def test_no_bound_exceeds_the_window_whatever_the_clocks_say(intervals, ahead_s):
    """Each process reports on a clock of its own; mapped to one axis, every bound fits the window."""
    shifts = {f"owner {n}": ClockShift(ahead_s[n], 0.0) for n in range(3)}
    seen = [event(stage, f"owner {n}", t0 + ahead_s[n], t1 + ahead_s[n]) for stage, n, (t0, t1) in intervals]
    bounds = lower_bounds(on_axis(seen, shifts))
    for bound in (bounds.construction, bounds.transport, bounds.apply):
        assert 0 <= bound.seconds <= bounds.window_s + 1e-6
    assert bounds.finalization_s <= bounds.window_s + 1e-6


# --- one axis ---------------------------------------------------------------------------------------------------------------


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(st.floats(0, 100), st.floats(1e-4, 2), st.floats(0, 5), st.floats(1e-4, 2)), min_size=1, max_size=8),
)
def test_the_true_shift_is_always_within_the_stated_error(ahead_s, exchanges):
    """Requests take ``way``, work takes ``work``, answers take ``back``: whatever these are, the bounds hold."""
    axis = TimeAxis()
    for asked_s, way_s, work_s, back_s in exchanges:
        received_s = asked_s + way_s
        sent_s = received_s + work_s
        axis.observe(
            "r", asked_s=asked_s, reading=ClockReading(received_s + ahead_s, sent_s + ahead_s), answered_s=sent_s + back_s
        )
    shift = axis.shift("r")
    assert abs(shift.shift_s - ahead_s) <= shift.error_s + 1e-6
    tightest = min(way + back for _, way, _, back in exchanges) / 2
    assert shift.error_s <= tightest + 1e-6


def test_processes_of_one_boot_share_a_clock():
    axis = TimeAxis("boot")
    axis.observe("r", asked_s=1, reading=ClockReading(1.9, 2.0, "boot"), answered_s=2.1)
    assert axis.shift("r") == ClockShift(0.0, 0.0)
    axis.observe("s", asked_s=1, reading=ClockReading(1.9, 2.0, "another"), answered_s=2.1)
    assert axis.shift("s").error_s == pytest.approx(0.5)


def test_one_boot_is_not_believed_against_the_exchanges():
    """A container may have a clock of its own (time namespaces) and still name the same boot."""
    axis = TimeAxis("boot")
    axis.observe("r", asked_s=1, reading=ClockReading(101, 101.1, "boot"), answered_s=1.2)
    assert axis.shift("r").shift_s == pytest.approx(99.95)


def test_a_process_that_was_never_heard_of_says_so():
    assert math.isinf(TimeAxis().shift("nobody").error_s)


def test_a_restarted_process_gets_new_bounds():
    axis = TimeAxis()
    axis.observe("r", asked_s=0, reading=ClockReading(100.1, 100.1), answered_s=0.2)
    axis.observe("r", asked_s=1, reading=ClockReading(5.1, 5.1), answered_s=1.2)
    assert axis.shift("r").shift_s == pytest.approx(4.0)


# --- the trace file ---------------------------------------------------------------------------------------------------------


def refit():
    return [
        event("scan", "owner 0", 10.0, 10.4),
        event("scan", "owner 10", 10.0, 10.2),
        event("scan", "owner 2", 10.0, 10.2),
        event("encode", "owner 0", 10.1, 10.3, nbytes=100, payload="p0"),
        event("send", "owner 0", 10.3, 10.8, nbytes=1_000_000, payload="p0"),
        event("send", "owner 0", 10.5, 10.9, nbytes=10, payload="p1"),
        event("fetch", "receiver a", 10.8, 10.9, nbytes=1_000_000, payload="p0"),
        event("apply", "receiver a", 10.9, 11.0, nbytes=1_000_000, payload="p0"),
        event("prepare", "coordinator", 9.5, 9.9),
        event("baseline", "owner 0", 11.1, 11.2),
    ]


def test_trace_has_every_stage_on_one_axis_from_zero():
    trace = msgspec.json.decode(chrome_trace(refit(), shifts={"receiver a": ClockShift(1.0, 0.25)}))
    complete = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert len(complete) == len(refit())
    assert min(row["ts"] for row in complete) == 0
    sent = next(row for row in complete if row["name"] == "send")
    assert (sent["ts"], sent["dur"]) == (pytest.approx(0.8e6), pytest.approx(0.5e6))
    assert sent["args"] == {"attempt": "v000001-a1-0", "payload": "p0", "nbytes": 1_000_000, "MB/s": pytest.approx(2.0)}
    assert trace["otherData"]["clock_shifts_s"] == {"receiver a": [1.0, 0.25]}


def test_processes_are_named_and_in_order():
    assert places(refit()) == ["coordinator", "owner 0", "owner 2", "owner 10", "receiver a"]
    trace = msgspec.json.decode(chrome_trace(refit()))
    names = {row["pid"]: row["args"]["name"] for row in trace["traceEvents"] if row["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == places(refit())


def test_an_arrow_follows_a_payload_through_marks_that_hold_it():
    rows = msgspec.json.decode(chrome_trace(refit()))["traceEvents"]
    arrow = [row for row in rows if row["ph"] in "stf"]
    assert [row["ph"] for row in arrow] == ["s", "t", "f"]
    assert len({row["id"] for row in arrow}) == 1
    for stop in arrow:
        holding = [
            row
            for row in rows
            if row["ph"] == "X"
            and (row["pid"], row["tid"]) == (stop["pid"], stop["tid"])
            and row["ts"] <= stop["ts"] <= row["ts"] + row["dur"]
        ]
        assert len(holding) == 1
    assert [row["ts"] for row in arrow] == sorted(row["ts"] for row in arrow)


@given(st.lists(st.tuples(st.sampled_from(["send", "apply"]), st.integers(0, 1), _INTERVAL), max_size=30))
def test_marks_of_one_track_never_overlap(intervals):
    tracks = defaultdict(list)
    for placed, track in lanes([event(stage, f"owner {n}", *span) for stage, n, span in intervals]):
        tracks[placed.where, track].append(placed)
    assert sum(map(len, tracks.values())) == len(intervals)
    for marks in tracks.values():
        ordered = sorted(marks, key=lambda mark: (mark.t0_s, mark.t1_s))
        assert all(a.t1_s <= b.t0_s for a, b in itertools.pairwise(ordered))


def test_picture_is_well_formed_and_shows_every_stage():
    from xml.etree import ElementTree as ET

    svg = timeline_svg(refit(), bounds=lower_bounds(refit()), title="a < b & c")
    root = ET.fromstring(svg)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "a < b & c"
    assert len(titles) == 1 + len(refit())
    text = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "construction" in text
    assert "the binding one is transport" in text


def test_an_empty_trace_is_still_a_trace():
    assert msgspec.json.decode(chrome_trace([]))["traceEvents"] == []
    assert "<svg" in timeline_svg([])
