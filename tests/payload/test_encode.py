"""What the encoder makes and what it rejects."""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from payload_cases import ID, KEY, Draft, as_plain, item, sample, sample_items

from deltarefit import kernels
from deltarefit.canonical import DTYPE_NBYTES, Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.ids import PayloadId, attempt_id
from deltarefit.payload import Limits, decode, encode, read_header
from deltarefit.payload.frames import PLANE_PARAMETERS
from deltarefit.pieces import Piece, whole
from deltarefit.records import Encoding, LocationForm


def test_decode_gives_back_header_and_items_in_order():
    payload = decode(sample())
    assert [as_plain(found) for found in payload.items] == [as_plain(given) for given in sample_items()]
    assert {name: getattr(payload.header, name) for name in ID} == ID
    assert payload.header.payload_id == PayloadId(ID["attempt"], 12, 3)
    assert (payload.header.num_items, payload.header.num_changed) == (6, 20)
    assert payload.nbytes == len(sample()) == payload.header.payload_nbytes
    assert payload.digest == sample()[16:32].hex()


def test_order_of_items_is_kept_whatever_their_names():
    coded = [item(TensorSpec(name, "BF16", (8,)), [1, 3], [5, 6]) for name in ("z", "a", "m")]
    assert [found.spec.name for found in decode(encode(coded, **ID)).items] == ["z", "a", "m"]


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
@pytest.mark.parametrize("encoding", Encoding)
def test_every_dtype_keeps_its_bits_at_its_own_width(dtype, encoding):
    spec = TensorSpec("w", dtype, (3, 7))
    top = 2 ** (8 * spec.element_nbytes) - 1
    coded = item(spec, [0, 4, 20], [top, 1, top // 2 + 1], encoding)
    data = encode([coded], **ID)
    assert as_plain(decode(data).items[0]) == as_plain(coded)
    values = [row for row in Draft.of(data).rows if row[0] >= 16]
    assert [(row[1], row[2], row[4]) for row in values] == [(spec.element_nbytes, n, 3) for n in range(spec.element_nbytes)]


def test_elements_beyond_2_31_arrive(tmp_path):
    """In a sparse file: 2 GiB of address space, a few pages of disk."""
    spec = TensorSpec("w", "U8", (3, 2**30))
    coded = item(spec, [7, 2**31 - 1, 2**31, 3 * 2**30 - 1], [1, 2, 3, 255], Encoding.DIFFERENCE, LocationForm.WIDE4)
    storage = np.memmap(tmp_path / "storage", np.uint8, "w+", shape=(spec.num_elements,))
    storage[2**31] = 250
    view = whole(spec.shape)
    found = decode(encode([coded], **ID)).items[0]
    assert kernels.apply_item(storage, [Piece(view, view).normalised()], found) == 4
    assert [int(storage[at]) for at in (7, 2**31 - 1, 2**31, 3 * 2**30 - 1)] == [1, 2, 253, 255]
    assert (tmp_path / "storage").stat().st_blocks * 512 < 2**20


def test_location_bytes_of_a_run_are_none():
    coded = item(TensorSpec("w", "BF16", (16,)), range(3, 9), range(6), form=LocationForm.RUN)
    data = encode([coded], **ID)
    assert all(row[0] >= 16 for row in Draft.of(data).rows)
    assert (decode(data).items[0].start, decode(data).items[0].count) == (3, 6)


def test_streams_of_different_kind_never_share_a_plane():
    keys = [tuple(row[:3]) for row in Draft.of(sample()).rows]
    locations = [(1, 1, 0), (2, 2, 0), (2, 2, 1), (3, 1, 0), *((4, 4, n) for n in range(4))]
    values = [(16, 1, 0), *((16, 4, n) for n in range(4)), (17, 2, 0), (17, 2, 1), *((18, 8, n) for n in range(8))]
    assert keys == locations + values


def test_planes_hold_the_parts_of_all_items_in_item_order():
    draft = Draft.of(sample())
    low = zstandard.decompress(draft.frames[draft.plane(17, 2, 0)])
    assert low == sample_items()[0].value_planes[0].tobytes() + sample_items()[1].value_planes[0].tobytes()


def test_same_items_give_the_same_bytes_also_from_other_threads():
    made = []
    threads = [threading.Thread(target=lambda: made.append(sample(KEY))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(made) == {sample(KEY)}


def test_planes_are_ordinary_frames_of_the_documented_parameters():
    rng = np.random.default_rng(5)
    spec = TensorSpec("w", "BF16", (4_000_000,))
    positions = np.cumsum(rng.geometric(0.05, 200_000))
    positions = positions[positions < spec.num_elements]
    coded = item(spec, positions, rng.geometric(0.5, positions.size), Encoding.DIFFERENCE)
    draft = Draft.of(encode([coded], **ID))
    writer = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**PLANE_PARAMETERS))
    for frame, row in zip(draft.frames, draft.rows, strict=True):
        assert frame == writer.compress(zstandard.decompress(frame))
        assert row[5] < 0.95 * row[4]


def test_a_plane_that_does_not_shrink_costs_only_its_frame():
    noise = np.random.default_rng(1).integers(0, 2**16, 200_000)
    spec = TensorSpec("w", "BF16", (200_000,))
    data = encode([item(spec, range(200_000), noise, form=LocationForm.RUN)], **ID)
    assert spec.nbytes < len(data) < spec.nbytes + 400


def test_cost_of_an_item_does_not_depend_on_the_tensor_s_length():
    lengths = {len(encode([item(TensorSpec("w", "BF16", (n,)), [7, 9], [1, 2])], **ID)) for n in (1000, 10**6, 10**9)}
    assert max(lengths) - min(lengths) <= 4
    assert max(lengths) < 330


def test_read_header_needs_no_more_than_the_header():
    assert read_header(sample()[:164]) == decode(sample()).header
    assert read_header(memoryview(bytearray(sample(KEY)))).is_keyed


def test_decoded_planes_do_not_use_the_memory_of_the_payload():
    data = bytearray(sample())
    payload = decode(data)
    data[:] = bytes(len(data))
    assert [as_plain(found) for found in payload.items] == [as_plain(given) for given in sample_items()]
    assert not payload.items[0].value_planes[0].flags.writeable


def test_decode_uses_the_catalog_s_own_specs():
    catalog = Catalog({coded.spec.name: coded.spec for coded in sample_items()}.values())
    for found in decode(sample(), catalog=catalog).items:
        assert found.spec is catalog[found.spec.name]


def test_signed_payload_opens_with_its_key_alone():
    assert decode(sample(KEY), key=KEY).header.is_keyed
    assert sample(KEY) != sample()


def test_attempt_ids_of_the_greatest_length_fit():
    longest = attempt_id(999999, 1, "n" * 53)
    assert len(longest) == 64
    assert decode(encode(sample_items(), **ID | {"attempt": longest})).header.attempt == longest


def test_greatest_numbers_fit():
    fields = ID | {"owner": 2**32 - 1, "sequence": 2**32 - 1, "base_version": 2**64 - 1, "target_version": 2**64 - 1}
    header = decode(encode(sample_items(), **fields)).header
    assert {name: getattr(header, name) for name in fields} == fields


def test_no_items_make_no_payload():
    with pytest.raises(RejectedError, match="changes nothing sends no payload"):
        encode([], **ID)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attempt": ""}, "attempt"),
        ({"attempt": "a" * 65}, "attempt"),
        ({"attempt": "né"}, "attempt"),
        ({"owner": 2**32}, "owner"),
        ({"owner": -1}, "owner"),
        ({"sequence": 2**32}, "sequence"),
        ({"base_version": 8}, "base <= target"),
        ({"base_version": -1}, "base <= target"),
        ({"target_version": 2**64}, "below 2\\^64"),
        ({"plan_digest": "00"}, "32 hex digits"),
        ({"plan_digest": "no"}, "32 hex digits"),
    ],
)
def test_header_fields_that_do_not_fit_are_rejected(fields, text):
    with pytest.raises(RejectedError, match=text):
        encode(sample_items(), **ID | fields)


@pytest.mark.parametrize("nbytes", [0, 15, 65])
def test_keys_of_unsafe_length_are_rejected(nbytes):
    with pytest.raises(RejectedError, match=f"{nbytes} bytes, expected 16 to 64"):
        sample(bytes(nbytes))
    with pytest.raises(RejectedError, match=f"{nbytes} bytes, expected 16 to 64"):
        decode(sample(), key=bytes(nbytes))


_PLANE = np.zeros(2, np.uint8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"count": 17},
        {"count": 3},
        {"start": 15},
        {"start": -1},
        {"start": 2**64 - 2},
        {"location_planes": ()},
        {"location_planes": (np.zeros(1, np.uint8),)},
        {"location_planes": (_PLANE, _PLANE)},
        {"location_planes": (_PLANE.astype(np.uint16),)},
        {"location_form": LocationForm.WIDE2},
        {"location_form": LocationForm.SHORT_GAPS, "start": 15},
        {"location_form": LocationForm.SHORT_GAPS, "location_planes": (np.zeros(1, np.uint8),)},
        {"location_form": LocationForm.RUN},
        {"location_form": LocationForm.RUN, "location_planes": (), "start": 15},
        {"location_form": LocationForm.RUN, "location_planes": (), "start": -1},
        {"location_form": LocationForm.WIDE2, "location_planes": (_PLANE, np.zeros(3, np.uint8))},
        {"value_planes": (_PLANE,)},
        {"value_planes": (_PLANE, np.zeros(3, np.uint8))},
        {"value_planes": (_PLANE, _PLANE.reshape(1, 2))},
    ],
    ids=str,
)
def test_items_whose_columns_do_not_fit_together_are_rejected(wrong):
    good = item(TensorSpec("model.w", "BF16", (16,)), [1, 3], [5, 6])
    encode([good], **ID)
    with pytest.raises(RejectedError, match=r"item 0 \(model.w BF16\[16\]\)"):
        encode([replace(good, **wrong)], **ID)


@pytest.mark.parametrize("limit", ["payload_nbytes", "decompressed_nbytes", "items", "name_nbytes"])
def test_encoder_keeps_to_the_limits_of_decoders(limit):
    reached = {
        "payload_nbytes": len(sample()),
        "decompressed_nbytes": sum(row[4] for row in Draft.of(sample()).rows),
        "items": 6,
        "name_nbytes": sum(len(coded.spec.name) for coded in sample_items()),
    }
    allowed = Limits(**{limit: reached[limit]})
    assert encode(sample_items(), limits=allowed, **ID) == sample()
    decode(sample(), limits=allowed)
    with pytest.raises(RejectedError, match=rf"Limits\.{limit}"):
        encode(sample_items(), limits=replace(allowed, **{limit: reached[limit] - 1}), **ID)


def test_limits_below_one_are_rejected():
    with pytest.raises(RejectedError, match=re.escape("limits: items is 0")):
        Limits(items=0)
