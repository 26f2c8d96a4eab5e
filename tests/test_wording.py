"""Lists in messages name the first few things and count the rest."""

from __future__ import annotations

import pytest

from deltarefit.wording import some_of


@pytest.mark.parametrize(
    ("count", "joint", "text"),
    [
        (0, ", ", ""),
        (2, ", ", "w0, w1"),
        (3, ", ", "w0, w1 and 1 more"),
        (9, "; ", "w0; w1 and 7 more"),
        (2, "\n  ", "w0\n  w1"),
        (4, "\n  ", "w0\n  w1\n  and 2 more"),
    ],
)
def test_the_rest_is_counted(count: int, joint: str, text: str) -> None:
    assert some_of((f"w{number}" for number in range(count)), 2, joint=joint) == text
