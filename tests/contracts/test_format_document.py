"""FORMAT.md and the code say the same: every table of the document is read and compared with the constants."""

import ast
import re
import struct
from pathlib import Path

import deltarefit.payload
from deltarefit.canonical import DTYPE_NBYTES
from deltarefit.payload import frames, layout
from deltarefit.records import Encoding, LocationForm
from deltarefit.run_key import KEY_NBYTES

ROOM = Path(deltarefit.payload.__file__).parent
TEXT = (ROOM / "FORMAT.md").read_text()
TESTS = Path(__file__).parents[1]


def _tables():
    """Every table as (column names, rows of cells)."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found.append((lines[0], lines[2:]))
    return found


def _table(*columns):
    return next(rows for names, rows in _tables() if tuple(names) == columns)


def _field_rows(fields):
    """(offset, bytes, name) of each struct field."""
    offset = 0
    for name, code in fields:
        nbytes = struct.calcsize("<" + code)
        yield [str(offset), str(nbytes), name]
        offset += nbytes


def _field_tables():
    return [rows for names, rows in _tables() if names == ["offset", "bytes", "field", "meaning"]]


def test_header_table_is_the_header():
    header, _ = _field_tables()
    assert [row[:3] for row in header] == list(_field_rows(layout.HEADER_FIELDS))
    assert f"\n{layout.HEADER.size} bytes.\n" in TEXT
    assert header[0][3] == f"`{layout.MAGIC.hex(' ')}`"
    assert header[1][3] == str(layout.FORMAT_VERSION)
    assert header[4][0] == str(layout.DIGEST_OFFSET)
    assert header[4][1] == str(layout.DIGEST_NBYTES)
    assert header[6][1] == str(layout.ATTEMPT_NBYTES)
    assert f"1 to {layout.MAX_PLANES}" in header[3][3]
    assert layout.FLAG_KEYED == 1
    assert header[2][3].startswith("bit 0: the digest is keyed")


def test_plane_table_is_the_plane_row():
    _, plane = _field_tables()
    assert [row[:3] for row in plane] == list(_field_rows(layout.PLANE_FIELDS))
    assert f"One row of {layout.PLANE.size} bytes" in TEXT


def test_digest_is_as_documented():
    assert f"`{layout.DIGEST_PERSON.decode()}`" in TEXT
    assert "({} to {} bytes)".format(*KEY_NBYTES) in TEXT


def test_streams_are_the_documented_ones():
    stated = set()
    for stream, holds, widths in _table("stream", "holds", "element_nbytes"):
        kind, _, name = holds.rpartition(" ")
        code = LocationForm[name] if "locations" in kind else layout.VALUE_STREAM + Encoding[name]
        assert int(stream) == code
        stated |= {layout.PlaneKey(code, int(width), n) for width in widths.split(", ") for n in range(int(width))}
    assert len(stated) == layout.MAX_PLANES
    everything = {layout.PlaneKey(s, w, n) for s in range(32) for w in range(10) for n in range(10)}
    assert {key for key in everything if layout.is_plane_key(key)} == stated


def test_item_columns_are_the_documented_ones():
    stated = [[name, nbytes] for name, nbytes, _ in _table("column", "bytes", "meaning")]
    assert stated == [[name, code[-1]] for name, code in layout.ITEM_COLUMNS]
    assert f"{layout.ITEM_NBYTES} bytes a row" in TEXT
    assert f"0 to {layout.MAX_RANK};" in TEXT


def test_codes_in_item_columns_are_the_enums():
    meaning = {name: text for name, _, text in _table("column", "bytes", "meaning")}
    assert meaning["encoding"] == ", ".join(f"{int(code)} {code.name}" for code in Encoding)
    assert meaning["location_form"] == ", ".join(f"{int(code)} {code.name}" for code in LocationForm)
    forms = [(name, int(code), int(nbytes)) for name, code, nbytes, _ in _table("form", "code", "bytes", "meaning")]
    assert forms == [(form.name, int(form), form.width) for form in LocationForm]
    texts = {name: text for name, _, _, text in _table("form", "code", "bytes", "meaning")}
    for form in (form for form in LocationForm if form.escape):
        assert texts[form.name].startswith(f"a byte below {form.escape} ends a gap; {form.escape} adds {form.escape} to it")
        assert texts[form.name].endswith(f"`{bytes([form.escape] * (255 // form.escape) + [0]).hex(' ')}`")
    encodings = [(name, int(code)) for name, code, _ in _table("encoding", "code", "word")]
    assert encodings == [(encoding.name, int(encoding)) for encoding in Encoding]


def test_dtypes_are_all_there():
    stated = {name: (int(code), int(nbytes)) for name, code, nbytes in _table("dtype", "code", "bytes")}
    assert stated == {name: (layout.DTYPE_CODES[name], nbytes) for name, nbytes in DTYPE_NBYTES.items()}
    assert len(layout.DTYPE_NAMES) == len(layout.DTYPE_CODES)


def test_limits_are_the_defaults():
    stated = {name: int(value) for name, value, _ in _table("limit", "default", "reason")}
    assert stated == {name: getattr(layout.DEFAULT_LIMITS, name) for name in layout.Limits.__slots__}


def test_frame_parameters_are_the_documented_ones():
    stated = dict(re.findall(r"`(\w+)` (\d+)", TEXT[TEXT.index("Ours are") : TEXT.index("## Item table")]))
    assert {name: int(value) for name, value in stated.items()} == frames.PLANE_PARAMETERS
    assert f"level {frames.TABLE_LEVEL} for the item table" in TEXT
    assert f"a window of at most {frames.MAX_WINDOW_NBYTES} bytes" in TEXT
    assert f"a ratio of {frames.MAX_FRAME_RATIO})" in TEXT


def test_every_refusal_has_its_test_in_the_order_of_the_document():
    tree = ast.parse((TESTS / "payload" / "refusals.py").read_text())
    cases = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "REFUSALS"
    )
    assert [key.value for key in cases.keys] == [name for name, _ in _table("refusal", "what is wrong")]


def test_changes_end_with_this_version():
    assert _table("version", "changes")[-1][0] == str(layout.FORMAT_VERSION)


def test_document_travels_with_the_package():
    assert (ROOM / "FORMAT.md").is_file()
