"""Sizes as people write them, in settings and on the command line."""

import pytest

from deltarefit.errors import RejectedError
from deltarefit.units import parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096), ("256MiB", 2**28), ("256M", 2**28), ("1.5 GB", 1_500_000_000), ("2kB", 2000), ("1TiB", 2**40),
        (" 8 mib ", 2**23), (4096, 4096), ("0.5KiB", 512), ("1.9", 1), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_a_number_and_a_unit_are_bytes(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "3 apples", "1e9", "0x10", "1..5MB"])
def test_anything_else_is_refused(text):
    with pytest.raises(RejectedError, match="expected a number with B, kB"):
        parse_nbytes(text)
