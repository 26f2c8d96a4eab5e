"""Run URLs and the store facade: bounds, translations, retries."""

from __future__ import annotations

from types import SimpleNamespace

import obstore
import pytest
from obstore import exceptions as foreign
from obstore.store import MemoryStore

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError, TransportError
from deltarefit.runtime.clock import ManualClock
from deltarefit.transport import RetryPolicy, RunStore, StoreSettings, open_run, retry
from deltarefit.transport import stores as stores_module


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    url = f"file://{tmp_path}/a run" if request.param == "file" else f"memory://stores-{tmp_path.name}"
    opened = open_run(url, clock=ManualClock())
    yield opened
    opened.delete_prefix("d")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "expected file:///"),
        ("/plain/path", "expected file:///"),
        ("ftp://host/dir", "expected file:///"),
        ("file://relative/dir", "expected file:///absolute"),
        ("file:relative", "expected file:///absolute"),
        ("file:///", "expected file:///absolute"),
        ("s3:///no-bucket", "names no bucket"),
        ("s3://key:secret@bucket/x", "ends? up in logs|end up in logs"),
        ("s3://bucket/x?versionId=1", "end up in logs"),
        ("gs:///x", "names no bucket"),
        ("az:///x", "names no bucket"),
        ("s3://[bad/x", "Invalid IPv6"),
    ],
)
def test_bad_url_is_rejected_and_says_what_is_expected(url, why):
    with pytest.raises(RejectedError, match=why) as caught:
        open_run(url, clock=ManualClock())
    assert "expected file:///" in str(caught.value)
    assert "secret@" not in str(caught.value)


def test_unknown_option_is_rejected():
    with pytest.raises(RejectedError, match="nonsense"):
        open_run("s3://bucket/x", clock=ManualClock(), options={"nonsense": "1"})


def test_run_directory_that_is_a_file_is_rejected(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RejectedError, match="cannot be made"):
        open_run(f"file://{tmp_path}/file", clock=ManualClock())


def test_custom_endpoint_means_path_style_and_plain_http_only_when_it_says_so(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    given = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    backend = open_run("s3://bucket/some/prefix", clock=ManualClock(), environment=given).backend
    assert backend.prefix == "some/prefix"
    assert backend.config["endpoint"] == "http://127.0.0.1:1"
    assert backend.config["region"] == "us-east-1"
    assert backend.config["virtual_hosted_style_request"] in (False, "false")
    assert backend.client_options["allow_http"] in (True, "true")
    secure = open_run("s3://bucket/x", clock=ManualClock(), options={"endpoint": "https://host:1"}).backend
    assert secure.client_options["allow_http"] in (False, "false")


def test_memory_runs_of_one_name_are_one_run():
    one = open_run("memory://same-name", clock=ManualClock())
    open_run("memory://same-name", clock=ManualClock()).put("k", b"seen")
    open_run("memory://other-name", clock=ManualClock()).put("k", b"not seen")
    assert one.get("k", max_nbytes=10) == b"seen"


def test_put_replaces_and_get_is_bounded(store):
    store.put("d/k", b"long old content")
    store.put("d/k", b"new")
    assert store.get("d/k", max_nbytes=3) == b"new"
    with pytest.raises(PayloadInvalidError, match="at most 2 bytes, the object has 3"):
        store.get("d/k", max_nbytes=2)
    assert store.find("d/k", max_nbytes=2) is None
    assert store.find("d/other", max_nbytes=2) is None
    with pytest.raises(PayloadMissingError, match="no such object"):
        store.get("d/other", max_nbytes=1)


def test_ranges_are_exact(store):
    store.put("d/k", b"0123456789")
    assert store.get_range("d/k", 3, 4) == b"3456"
    with pytest.raises(TransportError, match="expected 4 bytes from byte 8, the store sent 2"):
        store.get_range("d/k", 8, 4)
    with pytest.raises(PayloadMissingError):
        store.get_range("d/other", 0, 1)


def test_put_if_absent_keeps_the_first_and_knows_its_own(store):
    assert store.put_if_absent("d/k", b"first") is True
    assert store.put_if_absent("d/k", b"second") is False
    assert store.put_if_absent("d/k", b"first") is True, "a repeated write whose reply was lost is ours"
    assert store.get("d/k", max_nbytes=10) == b"first"


def test_listing_is_sorted_and_of_whole_segments(store):
    for key in ("d/b", "d/a/x", "d/a.b", "dd/k"):
        store.put(key, b"12")
    assert [info.key for info in store.listing("d")] == ["d/a.b", "d/a/x", "d/b"]
    assert store.children("d") == ["d/a.b", "d/a/", "d/b"]
    assert store.children("nothing/here") == []
    assert store.listing("nothing/here") == []
    assert store.head("d/b").nbytes == 2
    assert store.head("d/c") is None
    store.delete(["dd/k"])


def test_delete_takes_what_is_there_and_minds_nothing_else(store):
    store.put("d/a", b"")
    store.put("d/c", b"")
    store.delete(["d/a", "d/b", "d/c", "d/d"])
    assert store.listing("d") == []
    store.delete([])
    assert store.delete_prefix("d") == 0


def test_too_long_listing_is_refused(tmp_path):
    store = open_run(f"file://{tmp_path}", clock=ManualClock(), settings=StoreSettings(max_listed=3))
    for number in range(4):
        store.put(f"d/{number}", b"")
    with pytest.raises(RejectedError, match="a URL of its own"):
        store.listing("d")


def test_half_written_files_of_killed_writers_go_with_their_prefix(tmp_path):
    store = open_run(f"file://{tmp_path}", clock=ManualClock())
    store.put("attempts/a/payloads/1", b"x")
    (tmp_path / "attempts/a/payloads/2#1").write_bytes(b"half")  # the name obstore gives a file under way
    assert [info.key for info in store.listing("attempts/a")] == ["attempts/a/payloads/1"]
    store.delete_prefix("attempts/a")
    assert not (tmp_path / "attempts/a").exists()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (foreign.NotFoundError("x"), PayloadMissingError),
        (foreign.NotFoundError("<Code>NoSuchBucket</Code>"), RejectedError),
        (foreign.PermissionDeniedError("x"), RejectedError),
        (foreign.UnauthenticatedError("x"), RejectedError),
        (foreign.InvalidPathError("x"), RejectedError),
        (foreign.GenericError("error sending request"), TransportError),
        (foreign.GenericError("Error performing PUT http://169.254.169.254/latest/api/token"), RejectedError),
        (foreign.PreconditionError("x"), TransportError),
        (OSError(28, "No space left on device"), TransportError),
        (PermissionError(13, "Permission denied"), RejectedError),
    ],
)
def test_foreign_errors_become_ours_with_their_text(error, kind):
    with pytest.raises(kind) as caught, stores_module._translated("read k in s3://b"):
        raise error
    assert caught.value.__cause__ is error
    assert "read k in s3://b" in str(caught.value)


def test_operation_is_repeated_with_growing_waits_then_given_up(monkeypatch):
    clock = ManualClock()
    calls: list[float] = []

    def fail(*_args, **_kwargs):
        calls.append(clock.monotonic_s())
        raise foreign.GenericError("connection reset\n\nDebug source:\nGeneric { … }")

    monkeypatch.setattr(obstore, "head", fail)
    settings = StoreSettings(retry=RetryPolicy(attempts=4, first_delay_s=1.0, max_delay_s=3.0))
    store = RunStore("memory://x", MemoryStore(), clock=clock, settings=settings)
    with pytest.raises(TransportError, match="gave up after 4 tries") as caught:
        store.head("k")
    assert calls == [0.0, 1.0, 3.0, 6.0]
    assert "Debug source" not in str(caught.value)


def test_retry_returns_after_passing_failures_and_passes_final_errors_at_once():
    clock = ManualClock()
    outcomes = [TransportError("1"), TransportError("2"), "done"]

    def call():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retry("it", call, policy=RetryPolicy(), clock=clock) == "done"
    outcomes = [RejectedError("final"), "never"]
    with pytest.raises(RejectedError):
        retry("it", call, policy=RetryPolicy(), clock=clock)
    assert outcomes == ["never"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryPolicy(attempts=0),
        lambda: RetryPolicy(first_delay_s=2, max_delay_s=1),
        lambda: StoreSettings(part_nbytes=1 << 20),
        lambda: StoreSettings(concurrency=0),
    ],
)
def test_bad_settings_are_rejected(make):
    with pytest.raises(RejectedError):
        make()


def test_short_body_is_not_taken_for_the_object(monkeypatch, tmp_path):
    store = open_run(f"file://{tmp_path}", clock=ManualClock())
    store.put("k", b"whole object")

    short = SimpleNamespace(meta={"size": 12}, bytes=lambda: b"whole")
    monkeypatch.setattr(obstore, "get", lambda *_: short)
    with pytest.raises(TransportError, match="expected 12 bytes, the store sent 5"):
        store.get("k", max_nbytes=100)


def test_a_directory_of_another_user_is_refused_at_once(open_directory, other_user, caplog):
    store = open_run(open_directory.as_uri(), clock=ManualClock())
    (open_directory / "members").mkdir(mode=0o555)
    with other_user():
        for write in (store.put, store.put_if_absent):
            with pytest.raises(
                RejectedError, match=r"members/a .*the store refused us; check .*permissions: .*Permission denied"
            ):
                write("members/a", b"x")
    assert "try 1" not in caplog.text, "no repetition gives permission"
