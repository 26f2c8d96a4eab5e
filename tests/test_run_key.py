"""One rule for the run's key, wherever it comes in."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import deltarefit
from deltarefit.errors import RejectedError
from deltarefit.payload.header import digest_parts
from deltarefit.run_key import check_key, key_print, read_key

TEXT = b"correct horse battery staple"
BINARY = bytes(range(250, 256)) + b"0123456789" + b"\n"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (TEXT, TEXT),
        (TEXT + b"\n", TEXT),
        (TEXT + b"\r\n", TEXT),
        (TEXT + b"\n\n", TEXT),
        (b" " + TEXT + b" \n", b" " + TEXT + b" "),  # spaces are part of a text
        (BINARY, BINARY),
        (BINARY + b"\n", BINARY + b"\n"),
        (b"x" * 64 + b"\n", b"x" * 64),
    ],
)
def test_a_texts_line_end_is_no_part_of_the_key_and_every_other_byte_is(tmp_path, content, key):
    path = tmp_path / "key"
    path.write_bytes(content)
    assert read_key(path) == key
    check_key(key)


@given(st.binary(min_size=16, max_size=64))
def test_what_a_file_gives_is_taken_as_a_key_and_gives_itself_again(tmp_path_factory, data):
    """So a driver may hand a key on through a file."""
    path = tmp_path_factory.getbasetemp() / "key"
    path.write_bytes(data)
    try:
        key = read_key(path)
    except RejectedError:
        return  # a text that is too short without its line ends
    check_key(key)
    path.write_bytes(key)
    assert read_key(path) == key


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 15, b"x" * 15 + b"\n", b"x" * 65, bytes(5000)])
def test_a_file_that_holds_no_key_is_refused_by_name_and_not_shown(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(RejectedError, match=rf"key file {re.escape(str(path))}: .*expected 16 to 64") as caught:
        read_key(path)
    assert "xxxx" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent", "a\0b"):
        with pytest.raises(RejectedError, match="expected a file with the run's key"):
            read_key(path)


@pytest.mark.parametrize("key", ["x" * 32, b"x" * 15, b"x" * 65, b"", TEXT + b"\n"])
def test_what_no_file_could_give_is_no_key(key):
    with pytest.raises(RejectedError, match="run key: ") as caught:
        check_key(key)
    assert "xxxx" not in str(caught.value)
    assert "horse" not in str(caught.value)


def test_a_fingerprint_tells_keys_apart_and_is_no_other_digest():
    assert key_print(None) == key_print(b"") == ""
    assert len({key_print(key) for key in (TEXT, TEXT + b"x", BINARY)}) == 3
    assert key_print(TEXT) == key_print(bytes(TEXT))
    assert len(key_print(TEXT)) == 16
    assert key_print(TEXT) not in digest_parts([b"which key"], TEXT).hex()


@pytest.mark.torch
def test_every_way_in_takes_the_same_key_from_the_same_file(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from deltarefit.integrations.exchange.directory import create_directory
    from deltarefit.integrations.exchange.endpoint import RankEndpoint
    from deltarefit.runtime import relay_service

    path = tmp_path / "key"
    path.write_bytes(TEXT + b"\n")
    taken = []

    class Stopped(RejectedError):
        """Enough was seen."""

    class Service:
        def __init__(self, run, *, key, **options):
            taken.append(key)
            raise Stopped("stopped")

    monkeypatch.setattr(relay_service, "RelayService", Service)
    from deltarefit.cli.relay import relay

    assert "stopped" in CliRunner().invoke(relay, ["--run", "memory://x", "--key-file", str(path)]).output
    directory = create_directory(tmp_path)
    RankEndpoint(0, 1, taken.append).meet(str(directory), "session", str(path))
    assert taken == [TEXT, TEXT] == [deltarefit.read_key(path)] * 2


@pytest.mark.torch
@pytest.mark.parametrize("key", [b"short", "a text of enough length", TEXT + b"\n"])
def test_every_way_in_refuses_what_is_no_key(tmp_path, key):
    torch = pytest.importorskip("torch")
    from deltarefit.integrations.vllm import VllmEngine

    model = torch.nn.Linear(2, 2)
    run = (tmp_path / "run").as_uri()
    for make in (
        lambda: deltarefit.Publisher(model, run=run, key=key),
        lambda: deltarefit.Receiver.attach(model, load_weights=lambda weights: None, run=run, key=key),
        lambda: deltarefit.RelayService(run, key=key),
        lambda: VllmEngine("http://127.0.0.1:9", key=key),
    ):
        with pytest.raises(RejectedError, match="run key: "):
            make()
    assert not (tmp_path / "run").exists()
