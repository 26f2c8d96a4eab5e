"""Round trips of anything, and refusal of anything else."""

import runpy
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payload_cases import ID, KEY, Draft, as_plain, decode_soundly, items, sample, sealed

from deltarefit import kernels
from deltarefit.canonical import Catalog
from deltarefit.errors import PayloadInvalidError
from deltarefit.payload import decode, encode
from deltarefit.payload.layout import HEADER

_HARNESS = runpy.run_path(str(Path(__file__).parents[1] / "fuzz" / "fuzz_decode.py"))


def _examples(number):
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_examples(60)
@given(items())
def test_what_was_encoded_is_decoded(coded):
    data = encode(coded, **ID)
    payload = decode(data, catalog=Catalog(item.spec for item in coded))
    assert [as_plain(item) for item in payload.items] == [as_plain(item) for item in coded]
    assert encode(payload.items, **ID) == data


@_examples(60)
@given(items(max_items=3))
def test_kernels_read_the_same_positions_from_decoded_items(coded):
    for given_item, found in zip(coded, decode(encode(coded, **ID)).items, strict=True):
        positions = kernels.decode_positions(found)
        assert np.array_equal(positions, kernels.decode_positions(given_item))
        assert positions.size == found.count
        assert (np.diff(positions) > 0).all()
        assert 0 <= positions[0] <= positions[-1] < found.spec.num_elements


@_examples(150)
@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_are_a_payload_or_refused(data, has_header):
    decode_soundly(sample()[: HEADER.size] + data if has_header else data)


@_examples(250)
@given(st.data())
def test_altered_payloads_with_a_fitting_digest_are_sound_or_refused(data):
    """The digest of a run without a key can be made by anyone, so what lies behind it must hold too."""
    altered = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(8, len(altered) - 1))
        nbytes = data.draw(st.integers(0, 8))
        altered[start : start + nbytes] = data.draw(st.binary(max_size=8))
    altered[136:144] = len(altered).to_bytes(8, "little")
    decode_soundly(sealed(bytes(altered)))


@_examples(250)
@given(st.data())
def test_altered_tables_and_planes_are_sound_or_refused(data):
    """The same one layer further in: the frames are whole, what they hold is not."""
    draft = Draft.of(sample())
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["column", "plane", "dimension"]))
        if kind == "column":
            column = draft.columns[data.draw(st.sampled_from(sorted(draft.columns)))]
            column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.integers(0, 255))
        elif kind == "plane":
            draft.replace_plane(data.draw(st.integers(0, len(draft.rows) - 1)), data.draw(st.binary(min_size=1, max_size=20)))
        else:
            draft.dimensions[data.draw(st.integers(0, len(draft.dimensions) - 1))] = data.draw(st.integers(0, 2**64 - 1))
    draft.fields["num_changed"] = min(sum(draft.columns["count"]), 2**64 - 1)
    decode_soundly(draft.build())


@_examples(100)
@given(st.binary(min_size=16, max_size=64).filter(lambda key: key != KEY))
def test_no_other_key_opens_a_payload(key):
    try:
        decode(sample(KEY), key=key)
    except PayloadInvalidError:
        return
    raise AssertionError("opened with another key")


@_examples(60)
@given(st.binary(max_size=300))
def test_fuzzing_harness_works_without_its_fuzzer(data):
    """So that tests/fuzz/fuzz_decode.py still runs when somebody needs it."""
    _HARNESS["check"](data)
    _HARNESS["check"](sample() + data)
