"""The receiver's pipeline: what is held stays bounded whoever is slow, and nothing waits for ever."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, perturb

import deltarefit
from deltarefit.errors import AttemptFailedError, PayloadInvalidError, TransportError
from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.protocol import EndMarker
from deltarefit.runtime.clock import Deadline, Pace, RandomIds, SystemClock
from deltarefit.runtime.feeds import Brought, Look, ManifestFeed, Offer
from deltarefit.runtime.intake import Intake
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.runtime.sizing import source_settings
from deltarefit.runtime.staging import Decoded, Staging
from deltarefit.transport import ManifestWriter, MemoryTransport, PayloadEntry, keys, open_run

CLOCK = SystemClock()
ATTEMPT = attempt_id(1, 1, "00000000")
MIB = 1 << 20


def name(sequence, owner=0):
    return PayloadId(ATTEMPT, sequence, OwnerId(owner))


def wait_until(condition, timeout_s=20.0):
    deadline = Deadline(CLOCK, timeout_s)
    while not condition():
        assert not deadline.expired
        CLOCK.sleep(0.002)


class ListFeed:
    """Offers what it is given, and notes what was fetched and how much at a time."""

    patience_s = 1.0

    def __init__(self, offers=(), failure=None):
        self.looks = [Look(tuple(offers))]
        self.failure = failure
        self.fetched = []
        self.gate = threading.Event()
        self.gate.set()

    def look(self, wanted):
        return self.looks.pop(0) if self.looks else Look()

    def bring(self, offer):
        self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        self.fetched.append(offer.name)
        return Brought(offer.name, bytes(offer.nbytes), "")


@pytest.fixture
def intake_of():
    opened = []

    def make(feed, *, max_held_nbytes=1000, num_threads=2):
        pace = Pace(CLOCK, first_s=0.002, most_s=0.01)
        intake = Intake(
            feed, clock=CLOCK, pace=pace, news=threading.Event(), max_held_nbytes=max_held_nbytes, num_threads=num_threads
        )
        opened.append(intake)
        return intake

    yield make
    for intake in opened:
        intake.close(wait_s=5.0)


# --- intake ----------------------------------------------------------------------------------------------------------------


def test_fetching_stops_at_the_limit_and_goes_on_as_room_is_made(intake_of):
    feed = ListFeed([Offer(name(n), 400) for n in range(6)])
    intake = intake_of(feed)
    wait_until(lambda: len(feed.fetched) == 2)
    CLOCK.sleep(0.05)
    assert (len(feed.fetched), intake.held_nbytes) == (2, 800)
    intake.release(400)
    wait_until(lambda: len(feed.fetched) == 3)
    CLOCK.sleep(0.05)
    assert intake.held_nbytes == 800


def test_the_wanted_payload_is_fetched_even_if_later_ones_have_taken_all_room(intake_of):
    """Without the exception nothing would ever move: later ones hold the room, and only the wanted one can free it."""
    feed = ListFeed([Offer(name(n), 500) for n in (1, 2)])
    intake = intake_of(feed)
    intake.want(name(0))
    wait_until(lambda: len(feed.fetched) == 2)
    feed.looks.append(Look((Offer(name(0), 500), Offer(name(3), 500))))
    wait_until(lambda: name(0) in feed.fetched)
    CLOCK.sleep(0.05)
    assert name(3) not in feed.fetched


def test_a_payload_larger_than_the_limit_goes_alone(intake_of):
    feed = ListFeed([Offer(name(0), 5000), Offer(name(1), 5000)])
    intake = intake_of(feed)
    wait_until(lambda: feed.fetched == [name(0)])
    CLOCK.sleep(0.05)
    assert feed.fetched == [name(0)]
    intake.release(5000)
    wait_until(lambda: feed.fetched == [name(0), name(1)])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(1, 3))
def test_every_payload_comes_whatever_the_order_of_arrival(sizes, rng, num_threads):
    """Payloads are released in the declared order only, so each must get through with 1000 bytes of room."""
    offers = [Offer(name(n), size) for n, size in enumerate(sizes)]
    shuffled = rng.sample(offers, len(offers))
    feed = ListFeed()
    feed.looks = [Look((offer,)) for offer in shuffled]
    intake = Intake(
        feed,
        clock=CLOCK,
        pace=Pace(CLOCK, first_s=0.0005, most_s=0.001),
        news=threading.Event(),
        max_held_nbytes=1000,
        num_threads=num_threads,
    )
    try:
        here, most_nbytes = {}, 0
        deadline = Deadline(CLOCK, 20)
        for offer in offers:
            intake.want(offer.name)
            while offer.name not in here:
                assert not deadline.expired
                here.update({one.name: one for one in intake.arrived()[0]})
                most_nbytes = max(most_nbytes, intake.held_nbytes)
                CLOCK.sleep(0.0005)
            intake.release(offer.nbytes)
        assert most_nbytes <= 1000 + 900  # the limit, and the wanted one
    finally:
        intake.close(wait_s=5.0)


def test_a_failure_surfaces_after_what_came_before_it(intake_of):
    intake = intake_of(ListFeed([Offer(name(0), 1)], failure=PayloadInvalidError("bad")))
    wait_until(lambda: intake._failure is not None)
    with pytest.raises(PayloadInvalidError, match="bad"):
        intake.arrived()


def test_threads_end_when_it_is_closed(intake_of):
    feed = ListFeed([Offer(name(0), 1)])
    feed.gate.clear()
    others = set(threading.enumerate())
    intake = intake_of(feed)
    before = set(threading.enumerate()) - others
    assert before
    intake.close()  # does not wait for a fetch that is under way
    feed.gate.set()
    wait_until(lambda: not any(thread.is_alive() for thread in before))
    assert intake.arrived() == ([], [])


# --- staging ---------------------------------------------------------------------------------------------------------------


def test_staged_bytes_come_back_from_memory_and_disk(tmp_path):
    staging = Staging(lambda _, data: Decoded(data[::-1], 2 * len(data)), num_threads=2, directory=str(tmp_path))
    staging.keep(name(0), b"abc")
    staging.spill(name(1), b"defg")
    assert len(list(tmp_path.glob("*/*"))) == 1
    for number in range(2):
        staging.begin_decoding(name(number))
    wait_until(lambda: staging.is_decoded(name(0)) and staging.is_decoded(name(1)))
    assert (staging.num_decoding, staging.num_undecoded, staging.decoded_nbytes) == (2, 0, 14)
    assert staging.take(name(1)) == (b"gfed", 4)
    assert staging.take(name(0)) == (b"cba", 3)
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_what_decoding_raises_is_raised_when_it_is_taken(tmp_path):
    def decode(_, data):
        raise PayloadInvalidError("its digest is wrong")

    staging = Staging(decode, num_threads=1)
    staging.keep(name(0), b"x")
    staging.begin_decoding(name(0))
    wait_until(lambda: not staging.num_undecoded)
    with pytest.raises(PayloadInvalidError, match="digest"):
        _ = staging.decoded_nbytes
    with pytest.raises(PayloadInvalidError, match="digest"):
        staging.take(name(0))
    staging.close()
    staging.close()


def test_a_disk_that_takes_nothing_names_the_remedy(tmp_path):
    staging = Staging(lambda _, data: Decoded(data, 0), num_threads=1, directory=str(tmp_path / "absent"))
    with pytest.raises(AttemptFailedError, match=r"5 bytes cannot be staged on disk in .*spill_directory"):
        staging.spill(name(0), b"12345")
    staging.close()


# --- the manifest's feed ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store():
    return open_run(f"memory://{RandomIds().nonce()}", clock=CLOCK)


def test_manifest_is_followed_part_by_part_and_nothing_is_named_twice(store):
    transport = MemoryTransport()
    feed = ManifestFeed(store, transport, ATTEMPT)
    assert feed.look(None) == Look()
    writers = [ManifestWriter(store, ATTEMPT, OwnerId(owner)) for owner in range(2)]
    entries = []
    for owner, data in ((0, b"one"), (1, b"three"), (0, b"five5")):
        entry = PayloadEntry.of(name(sum(e.owner == owner for e in entries), owner), data)
        entries.append(entry)
        transport.send(entry.payload_id(ATTEMPT), data)
        writers[owner].add(entry)
    look = feed.look(None)
    assert [offer.name for offer in look.offers] == [name(0, 0), name(0, 1), name(1, 0)]
    assert feed.bring(look.offers[1]).data == b"three"
    assert feed.look(None) == Look()
    writers[1].end()
    ended = feed.look(None).ended
    assert [(marker.owner, marker.count) for marker in ended] == [(1, 1)]
    assert isinstance(ended[0], EndMarker)
    assert feed.look(None) == Look()


def test_a_part_that_did_not_grow_is_not_read_again(store):
    reads = []
    get = store.get
    store.get = lambda key, **options: (reads.append(key), get(key, **options))[1]
    feed = ManifestFeed(store, MemoryTransport(), ATTEMPT)
    ManifestWriter(store, ATTEMPT, OwnerId(0)).add(PayloadEntry.of(name(0), b"x"))
    for _ in range(5):
        feed.look(None)
    assert reads == [keys.manifest_part(ATTEMPT, 0)]


def test_an_id_that_is_used_again_is_refused(store):
    feed = ManifestFeed(store, MemoryTransport(), ATTEMPT)
    ManifestWriter(store, ATTEMPT, OwnerId(0)).add(PayloadEntry.of(name(0), b"x"))
    feed.look(None)
    other = ManifestWriter(store, ATTEMPT, OwnerId(0))
    other.add(PayloadEntry.of(name(0), b"another"))
    other.add(PayloadEntry.of(name(1), b"x"))
    with pytest.raises(PayloadInvalidError, match="ids are never reused"):
        feed.look(None)


def test_a_store_out_of_reach_for_a_moment_is_forgiven(intake_of):
    class Flaky(ListFeed):
        def look(self, wanted):
            if self.looks and self.looks[0] is None:
                self.looks.pop(0)
                raise TransportError("no route")
            return super().look(wanted)

    feed = Flaky()
    feed.looks = [None, None, Look((Offer(name(0), 1),))]
    intake_of(feed)
    wait_until(lambda: feed.fetched == [name(0)])


# --- sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share_nbytes", "bucket_nbytes", "chunk_nbytes"),
    [(0, 4 * MIB, MIB), (512 * MIB, 32 * MIB, 8 * MIB), (16 << 30, 512 * MIB, 64 * MIB), (1 << 40, 512 * MIB, 64 * MIB)],
)
def test_sizes_are_the_papers_and_scale_down_with_the_model(share_nbytes, bucket_nbytes, chunk_nbytes):
    """512 MiB buckets and 64 MiB chunks (paper App. C); smaller ones where 16 buckets would not fill."""
    found = source_settings(PublisherSettings(), share_nbytes)
    assert (found.bucket_nbytes, found.chunk_nbytes) == (bucket_nbytes, chunk_nbytes)


def test_given_sizes_are_kept():
    found = source_settings(PublisherSettings(bucket_nbytes=7, chunk_nbytes=3), 1 << 40)
    assert (found.bucket_nbytes, found.chunk_nbytes) == (7, 3)


def test_owners_get_every_setting_that_is_theirs_from_the_publisher():
    """Each field of a source's settings can be reached, and arrives."""
    other = {"check_replicas": False, "verify_candidate": False, "baseline_directory": "/b", "scan_threads": 3}
    found = source_settings(PublisherSettings(bucket_nbytes=7, chunk_nbytes=3, **other), 1 << 40)
    assert dataclasses.asdict(found) == {**other, "bucket_nbytes": 7, "chunk_nbytes": 3, "baseline_directory": Path("/b")}


# --- whole refits ----------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_one_receiver_a_hundred_times_slower_bounds_everyones_memory_and_still_gets_every_bit(tmp_path):
    """Applying takes the slow engine 30 ms a payload, the fast one some 0.3 ms: what the slow one holds stays within bounds."""
    with Pair(tmp_path) as pair:
        model = Fused(pair.policy)
        pair.models.append(model)
        limits = msgspec.structs.replace(RECEIVER_SETTINGS, ahead_nbytes=600, decode_ahead=1, queue_slots=4)
        slow = pair.stack.enter_context(
            deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=pair.run, name="slow", settings=limits)
        )
        most = {"held": 0, "decoding": 0}
        apply = slow._engine.apply

        def slowly(data):
            delivery = slow._application._delivery
            most["held"] = max(most["held"], delivery._intake.held_nbytes)
            most["decoding"] = max(most["decoding"], delivery._staging.num_decoding)
            CLOCK.sleep(0.03)
            return apply(data)

        slow._engine.apply = slowly
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=2, bucket_nbytes=1, chunk_nbytes=1))
        for step in range(3):
            perturb(pair.policy, step, 0.2)
            report = publisher.refit()
            pair.assert_equal()
            assert (report.attempts, report.payloads) == (1, 3)
        largest = 600  # bytes of the largest payload here, about
        assert 0 < most["held"] <= 600 + largest
        assert most["decoding"] <= 1 + 1


@pytest.mark.torch
def test_later_payloads_are_fetched_while_an_earlier_one_is_applied(tmp_path):
    """With six payloads and slow applying, fetching is over long before applying is."""
    with Pair(tmp_path) as pair:
        stages = []
        pair.receivers[0].subscribe(stages.append)
        engine = pair.receivers[0]._engine
        apply = engine.apply
        engine.apply = lambda data: (CLOCK.sleep(0.05), apply(data))[1]
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, bucket_nbytes=1, chunk_nbytes=1))
        perturb(pair.policy, 1)
        publisher.refit()
        fetched = max(stage.t1_s for stage in stages if stage.stage == "fetch")
        applied = max(stage.t1_s for stage in stages if stage.stage == "apply")
        assert fetched < applied - 0.05
        pair.assert_equal()


@pytest.mark.torch
def test_a_refit_without_changes_sends_nothing_and_writes_no_progress(tmp_path):
    with Pair(tmp_path) as pair:
        publisher = pair.publisher()
        publisher.refit()
        puts = []
        store = publisher._store
        put = store.put
        store.put = lambda key, data: (puts.append(key), put(key, data))[1]
        report = publisher.refit()
        assert (report.payloads, report.cross_nbytes, report.sent_nbytes) == (0, 0, 0)
        assert not [key for key in puts if "/payloads/" in key or "/progress/" in key]


@pytest.mark.torch
@pytest.mark.parametrize("where", ["fetch", "decode", "apply"])
def test_a_failure_anywhere_ends_the_attempt_and_leaves_no_thread(tmp_path, where):
    others = set(threading.enumerate())
    with Pair(tmp_path) as pair:
        receiver = pair.receivers[0]
        struck = []

        def once(original):
            def call(*args, **kwargs):
                if not struck:
                    struck.append(where)
                    raise RuntimeError(f"planted in {where}")
                return original(*args, **kwargs)

            return call

        if where == "fetch":
            receiver._feeds._source.fetch = once(receiver._feeds._source.fetch)
        else:
            setattr(receiver._engine, where, once(getattr(receiver._engine, where)))
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, bucket_nbytes=1, chunk_nbytes=1))
        perturb(pair.policy, 1)
        report = publisher.refit()
        assert report.attempts == 2
        assert f"planted in {where}" in report.failures[0]
        pair.assert_equal()

        def left():
            here = set(threading.enumerate()) - others
            return [thread for thread in here if thread.name.startswith(("deltarefit-fetch", "deltarefit-look"))]

        wait_until(lambda: not left())
