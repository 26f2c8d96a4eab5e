"""The decoder refuses first: one case for every line of FORMAT.md's list, and more for lines that several faults lead to."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from payload_cases import ID, KEY, Draft, as_plain, item, sample, sample_items
from refusals import FURTHER, REFUSALS, streamed

from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError
from deltarefit.payload import decode, encode, read_header
from deltarefit.payload.frames import open_frame
from deltarefit.records import Encoding, LocationForm


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused(refusal):
    data, arguments, text = REFUSALS[refusal]()
    with pytest.raises(PayloadInvalidError, match=text) as caught:
        decode(data, **arguments)
    assert str(caught.value).endswith("nothing of it was applied")


@pytest.mark.parametrize(("data", "text"), [case[1:] for case in FURTHER], ids=[case[0] for case in FURTHER])
def test_refused_too(data, text):
    with pytest.raises(PayloadInvalidError, match=text):
        decode(data)


def test_refusals_name_the_payload_and_the_tensor():
    data, arguments, _ = REFUSALS["location-size"]()
    with pytest.raises(PayloadInvalidError, match=r"payload v000007-a1-k3j9/owner 3/payload 12: item 3 \(model.bias\)"):
        decode(data, **arguments)


@pytest.mark.parametrize("key", [None, KEY], ids=["unkeyed", "keyed"])
def test_every_flipped_bit_is_refused_before_anything_is_decompressed(key, monkeypatch):
    data = bytearray(sample(key))
    monkeypatch.setattr("deltarefit.payload.decoder.open_frame", lambda *_, **__: pytest.fail("opened a frame"))
    for number in range(8 * len(data)):
        data[number // 8] ^= 1 << number % 8
        with pytest.raises(PayloadInvalidError):
            decode(data, key=key)
        data[number // 8] ^= 1 << number % 8


def test_every_cut_is_refused():
    data = sample()
    for nbytes in range(len(data)):
        with pytest.raises(PayloadInvalidError):
            decode(data[:nbytes])


def test_read_header_refuses_what_is_no_payload():
    for data in (b"", sample()[:163], bytes(200)):
        with pytest.raises(PayloadInvalidError):
            read_header(data)


def test_a_lying_payload_does_not_make_the_decoder_allocate():
    """Stated sizes of a gigabyte and more, each beyond what its frame could hold or against what the items need."""
    tracemalloc.start()
    try:
        for refusal in ("plane-ratio", "frame-ratio", "frame-window", "frame-size"):
            data, arguments, text = REFUSALS[refusal]()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(PayloadInvalidError, match=text):
                decode(data, **arguments)
            assert tracemalloc.get_traced_memory()[1] - before < 2**18
    finally:
        tracemalloc.stop()


def test_frames_of_streaming_encoders_are_read_under_the_same_limit():
    """They state no content size, because their writer does not know it when it begins."""
    draft = Draft.of(sample())
    planes = [zstandard.decompress(frame) for frame in draft.frames]
    draft.frames = [streamed(plane) for plane in planes]
    assert {zstandard.get_frame_parameters(frame).content_size for frame in draft.frames} == {zstandard.CONTENTSIZE_UNKNOWN}
    plain, read = decode(sample()), decode(draft.build())
    assert [as_plain(one) for one in read.items] == [as_plain(one) for one in plain.items]
    draft.frames[0] = streamed(planes[0] + bytes(2**20))
    tracemalloc.start()
    with pytest.raises(PayloadInvalidError, match="its zstd frame is corrupt or does not end where it should"):
        decode(draft.build())
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < 2**18, "expected no more than the table says to be allocated"


def test_nothing_compressed_is_not_nothing():
    """A frame of no bytes is whole; no bytes are no frame; neither is taken for the other, nor for an unknown size."""
    nothing = zstandard.compress(b"")
    for frame in (nothing, streamed(b"")):
        assert open_frame(memoryview(frame), 0, where="here", what="plane") == b""
        with pytest.raises(PayloadInvalidError, match="expected 1"):
            open_frame(memoryview(frame), 1, where="here", what="plane")
    with pytest.raises(PayloadInvalidError, match="expected a zstd frame"):
        open_frame(memoryview(b""), 0, where="here", what="plane")
    with pytest.raises(PayloadInvalidError):
        open_frame(memoryview(streamed(b"x")), 0, where="here", what="plane")
    for data in (b"", nothing):
        with pytest.raises(PayloadInvalidError):
            decode(data)


def test_a_short_answer_of_the_zstd_binding_is_refused(monkeypatch):
    """zstd compares sizes itself; should a binding hand on less all the same, columns must not silently end early."""

    class Short:
        def decompress(self, frame, max_output_size, allow_extra_data):
            return zstandard.decompress(frame)[:-1]

    data = sample()
    monkeypatch.setattr("deltarefit.payload.frames._contexts", SimpleNamespace(reader=Short()))
    with pytest.raises(PayloadInvalidError, match="item table: 327 bytes decompressed, expected 328"):
        decode(data)


def test_long_runs_are_compared_without_building_positions():
    """A kilobyte of zstd can state runs of a million elements; their positions would take eight times that."""
    spec = TensorSpec("w", "U8", (2**21,))
    zeros = np.zeros(2**20, np.uint8)
    runs = [
        item(spec, range(start, start + zeros.size), zeros, form=LocationForm.RUN) for start in (0, 2**20)
    ]  # fmt: skip
    data = encode(runs, **ID)
    tracemalloc.start()
    try:
        decode(data)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()


def test_interleaving_items_without_a_common_element_are_accepted():
    spec = TensorSpec("w", "BF16", (1000,))
    coded = [
        item(spec, range(0, 900, 3), np.arange(300), Encoding.DIFFERENCE),
        item(spec, range(1, 901, 3), np.arange(300), Encoding.DIFFERENCE, LocationForm.WIDE2),
        item(spec, range(899, 901), [1, 2], form=LocationForm.RUN),
        item(spec, [902, 999], [1, 2]),
        item(spec, [950], [1], form=LocationForm.RUN),
    ]
    assert [as_plain(found) for found in decode(encode(coded, **ID)).items] == [as_plain(given) for given in coded]


def test_sample_itself_is_accepted():
    assert len(decode(sample()).items) == len(sample_items())
