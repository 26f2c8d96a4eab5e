"""Write the payload vectors: ``python tests/vectors/make_payload_vectors.py``. For a new format version only.

The bytes of published vectors never change: a decoder that no longer reads one has broken the format. What each holds is
written out in the ``.json`` beside it, by hand here and not by decoding.
"""

import itertools
import json
import sys
from pathlib import Path

import zstandard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "payload"))

from payload_cases import item  # noqa: E402

from deltarefit.canonical import DTYPE_NBYTES, TensorSpec  # noqa: E402
from deltarefit.payload import encode  # noqa: E402
from deltarefit.records import Encoding, LocationForm  # noqa: E402

KEY = bytes(range(32)).hex()
HEADER = {
    "attempt": "v000007-a1-k3j9",
    "owner": 3,
    "sequence": 12,
    "base_version": 6,
    "target_version": 7,
    "plan_digest": "00112233445566778899aabbccddeeff",
}


def row(name, dtype, shape, encoding, form, positions, values):
    """``values``: new bits, masks, or differences as signed integers."""
    return {
        "name": name,
        "dtype": dtype,
        "shape": shape,
        "encoding": int(encoding),
        "location_form": int(form),
        "positions": positions,
        "values": values,
    }


def every_dtype():
    """One tensor of each dtype, all encodings and forms in turn; extreme words at every width."""
    forms = [form for form in LocationForm if form is not LocationForm.RUN]
    for number, (dtype, nbytes) in enumerate(DTYPE_NBYTES.items()):
        encoding = Encoding(number % 3)
        top = 2 ** (8 * nbytes - 1)
        values = [1, -1, -top, top - 1] if encoding is Encoding.DIFFERENCE else [1, 2 * top - 1, top, top - 1]
        yield row(f"layers.{number}.w", dtype, [3, 200], encoding, forms[number % 5], [number, 255, 511, 599], values)


EDGES = [*itertools.accumulate([0, 84, 85, 86, 169, 170, 254, 255, 256, 1000], lambda at, gap: at + gap + 1, initial=7)]

# Name: header, key, items. Differences are signed here and modulo 2^w in the coder's input.
VECTORS = {
    # Figure D.3 of the paper: A is one run, B has gaps 2, 2, 2.
    "payload_v2_figure": (
        HEADER,
        None,
        [
            row("A", "BF16", [3, 4], Encoding.XOR, LocationForm.RUN, [3, 4, 5, 6, 7, 8], [3, 1, 1, 7, 1, 3]),
            row("B", "BF16", [12], Encoding.OVERWRITE, LocationForm.GAPS, [2, 5, 8], [0x3F02, 0x8000, 0x7FC1]),
        ],
    ),
    "payload_v2_dtypes": (HEADER | {"owner": 0, "sequence": 0, "base_version": 0, "target_version": 1}, None, [*every_dtype()]),
    # Tensors of the greatest numbers: 2^62 elements, 64-bit flat indices, rank 0.
    "payload_v2_large": (
        HEADER | {"owner": 2**32 - 1, "sequence": 2**32 - 1, "base_version": 2**64 - 2, "target_version": 2**64 - 1},
        None,
        [
            row("gewicht.ä", "F32", [2**31, 2**31], Encoding.DIFFERENCE, LocationForm.WIDE8, [2**31, 2**62 - 1], [1, -2]),
            row("scalar", "F64", [], Encoding.OVERWRITE, LocationForm.RUN, [0], [0x7FF8000000000001]),
            row("bytes", "U8", [1, 2**33], Encoding.OVERWRITE, LocationForm.RUN, [2**33 - 2, 2**33 - 1], [255, 0]),
        ],
    ),
    # SHORT_GAPS: gaps of 0, 84, 85, 86, 169, 170, 254, 255, 256 and 1000, and beside it the same as GAPS.
    "payload_v2_short": (
        HEADER,
        None,
        [
            row("a", "BF16", [3000], Encoding.DIFFERENCE, LocationForm.SHORT_GAPS, EDGES, [1, -1] * 5 + [2]),
            row("b", "BF16", [3000], Encoding.DIFFERENCE, LocationForm.GAPS, EDGES, [1, -1] * 5 + [2]),
        ],
    ),
    # A shard far behind its tensor's first element, up to the last one.
    "payload_v2_start": (
        HEADER,
        None,
        [
            row("a", "U8", [2**62], Encoding.XOR, LocationForm.GAPS, [2**62 - 301, 2**62 - 257, 2**62 - 1], [1, 2, 3]),
            row("b", "U8", [2**62], Encoding.XOR, LocationForm.SHORT_GAPS, [2**62 - 86, 2**62 - 1], [4, 5]),
            row("c", "U8", [2**62], Encoding.XOR, LocationForm.WIDE2, [2**61, 2**61 + 65536, 2**61 + 65537], [6, 7, 8]),
            row("d", "U8", [2**40], Encoding.XOR, LocationForm.SHORT_GAPS, [87_000_000, 87_000_020], [9, 10]),
        ],
    ),
    "payload_v2_keyed": (
        HEADER | {"sequence": 13},
        KEY,
        [
            row(
                "w",
                "BF16",
                [1024],
                Encoding.DIFFERENCE,
                LocationForm.GAPS,
                [0, 1, 255, 256, 511, 767, 1023],
                [1, -1, 2, -2, 3, -3, 0],
            )
        ],
    ),
}


def main():
    for name, (header, key, rows) in VECTORS.items():
        items = []
        for one in rows:
            spec = TensorSpec(one["name"], one["dtype"], tuple(one["shape"]))
            words = [value % 2 ** (8 * spec.element_nbytes) for value in one["values"]]
            items.append(item(spec, one["positions"], words, Encoding(one["encoding"]), LocationForm(one["location_form"])))
        data = encode(items, key=bytes.fromhex(key) if key else None, **header)
        (HERE / f"{name}.bin").write_bytes(data)
        facts = {"zstd_version": list(zstandard.ZSTD_VERSION), "key": key, "header": header}
        lines = [f'"{fact}": {json.dumps(value)}' for fact, value in facts.items()]
        lines.append('"items": [\n' + ",\n".join(json.dumps(one, ensure_ascii=False) for one in rows) + "\n]")
        (HERE / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
