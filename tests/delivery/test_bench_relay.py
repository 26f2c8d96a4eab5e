"""The relay's bench runs and measures what it says."""

from __future__ import annotations

import shutil

import pytest

from deltarefit.testing.bench_relay import run


def test_a_small_run_gives_every_row_and_ratios_that_fit():
    found = run(nbytes=16 << 20, repeats=1)
    kinds = [(row["what"], row["tls"]) for row in found["rows"]]
    plain = [("raw sockets", False), ("relay", False)]
    assert kinds == (plain + [(what, True) for what, _ in plain] if shutil.which("openssl") else plain)
    copied = found["memcpy_bytes_per_core_second"]
    for raw, relay in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert raw["to_raw_sockets"] == 1
        assert relay["to_raw_sockets"] == pytest.approx(relay["bytes_per_core_second"] / raw["bytes_per_core_second"])
        assert relay["to_memcpy"] == pytest.approx(relay["bytes_per_core_second"] / copied)
        assert 0 < relay["bytes_per_core_second"] < copied
