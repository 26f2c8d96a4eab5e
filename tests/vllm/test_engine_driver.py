"""The driver and the ranks' end of the exchange, against a fake engine: sessions, replies, errors, the gate."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from deltarefit.canonical import Catalog, TensorDigest, TensorSpec
from deltarefit.errors import (
    AttemptFailedError,
    DeadlineError,
    LoaderContractError,
    OperatorRequiredError,
    PayloadInvalidError,
    RejectedError,
    TransportError,
)
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.integrations.exchange.directory import Exchange
from deltarefit.integrations.vllm import BACKEND, VllmEngine
from deltarefit.integrations.vllm.calls import AsyncCalls, HttpCalls
from deltarefit.kernels import code_records
from deltarefit.payload import encode
from deltarefit.plan import RefitPlan
from deltarefit.records import DeltaRecords, Encoding

pytestmark = pytest.mark.torch

SPEC = TensorSpec("w", "BF16", (4,))
KEY = b"sixteen bytes or more"
CATALOG = Catalog([SPEC])
PLAN = RefitPlan(CATALOG, {"w": Encoding.OVERWRITE}, num_owners=1)


def payload(key: bytes | None = None) -> bytes:
    records = DeltaRecords(SPEC, np.array([1, 3], np.int64), np.array([5, 6], np.uint16), None)
    return encode(
        [code_records(records, Encoding.OVERWRITE)],
        attempt=AttemptId("v000001-a1-00000000"),
        owner=OwnerId(0),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest=PLAN.digest,
        key=key,
    )


@pytest.fixture
def engine(fake_llm, tmp_path):
    driver = VllmEngine(fake_llm, directory=tmp_path)
    yield driver
    driver.close()
    assert not list(tmp_path.iterdir())


def refit(engine: VllmEngine) -> int:
    engine.prewarm(CATALOG)
    engine.prepare(PLAN)
    engine.close_gate(1.0)
    written = engine.apply(payload())
    engine.synchronize()
    engine.drop_caches()
    engine.publish(1)
    engine.reopen_gate()
    return written


def test_a_refit_asks_every_rank_in_order_and_leaves_no_session_open(fake_llm, engine) -> None:
    assert refit(engine) == 2 * len(fake_llm.receivers)
    for receiver in fake_llm.receivers:
        assert receiver.asked == ["prewarm", f"prepare {PLAN.digest}", "apply", "synchronize"]
    assert fake_llm.calls == [
        "init", "start", "prewarm", "finish", "start", "prepare", "finish",
        "start", "apply", "synchronize", "reset", "reset encoder", "finish", "version",
    ]  # fmt: skip
    assert fake_llm.weight_version == "1"
    assert engine.request_gate.is_open
    assert engine.num_ranks == 2
    assert "2 ranks" in engine.covered()


def test_results_come_back_in_rank_order_with_full_width_digests(engine) -> None:
    assert [report.fingerprint for report in engine.prewarm(CATALOG)] == [CATALOG.digest] * 2
    assert [digests["w"].digest for digests in engine.digests()] == [TensorDigest(2**64 - 1, 7)] * 2


@pytest.mark.parametrize("kind", [RejectedError, LoaderContractError, PayloadInvalidError])
def test_an_error_of_one_rank_is_raised_as_its_own_kind_and_the_session_survives(fake_llm, engine, kind) -> None:
    engine.prewarm(CATALOG)
    engine.close_gate(1.0)
    fake_llm.receivers[1].failing["apply"] = kind("tensor w: told so")
    with pytest.raises(kind, match="rank 1: tensor w: told so"):
        engine.apply(payload())
    fake_llm.receivers[1].failing.clear()
    assert engine.apply(payload()) == 4


def test_a_foreign_error_of_a_rank_fails_the_attempt_and_names_its_type(fake_llm, engine) -> None:
    fake_llm.receivers[0].failing["digests"] = ZeroDivisionError("oops")
    with pytest.raises(AttemptFailedError, match="rank 0: ZeroDivisionError: oops"):
        engine.digests()


def test_a_refusal_to_set_up_is_raised_before_anything_else_and_leaves_no_directory(fake_llm, tmp_path) -> None:
    fake_llm._refusal = RejectedError("weights are packed")
    with pytest.raises(RejectedError, match="weights are packed"):
        VllmEngine(fake_llm, directory=tmp_path).prewarm(CATALOG)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_stays_silent_fails_the_attempt(fake_llm, engine) -> None:
    fake_llm.silent_ranks.add(1)
    with pytest.raises(AttemptFailedError, match=r"ranks \[0\] of 2 replied"):
        engine.digests()


def test_a_session_that_a_dead_driver_left_open_is_taken_over(fake_llm, engine) -> None:
    fake_llm.is_updating = True
    assert engine.digests()
    assert not fake_llm.is_updating


def test_a_driver_whose_engine_was_taken_over_is_refused_and_told_so(fake_llm, engine, tmp_path) -> None:
    engine.digests()
    other = VllmEngine(fake_llm, directory=tmp_path)
    other.digests()
    with pytest.raises(RejectedError, match="another driver may have taken it over"):
        engine.digests()
    other.digests()
    other.close()


def test_a_corrupt_payload_is_refused_before_the_receiver_sees_it(fake_llm, engine) -> None:
    engine.prewarm(CATALOG)
    broken = bytearray(payload())
    broken[-1] ^= 1
    with pytest.raises(PayloadInvalidError):
        engine.apply(bytes(broken))
    assert "apply" not in fake_llm.receivers[0].asked


def test_a_payload_before_prewarm_is_refused(engine) -> None:
    with pytest.raises(RejectedError, match="before prewarm"):
        engine.apply(payload())


def test_a_keyed_run_reads_its_key_from_a_file_on_the_engines_side(fake_llm, tmp_path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    engine = VllmEngine(fake_llm, directory=tmp_path, key_file=key_file)
    engine.prewarm(CATALOG)
    assert engine.apply(payload(KEY)) == 4
    with pytest.raises(PayloadInvalidError):
        engine.apply(payload(KEY[::-1]))
    engine.close()


def test_a_key_in_memory_reaches_the_ranks_and_stays_nowhere(fake_llm, tmp_path) -> None:
    engine = VllmEngine(fake_llm, directory=tmp_path, key=KEY)
    engine.prewarm(CATALOG)
    assert engine.apply(payload(KEY)) == 4
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    engine.close()


@pytest.mark.parametrize("verify_writes", [False, True])
def test_the_check_after_each_write_is_asked_for_when_the_driver_introduces_itself(fake_llm, tmp_path, verify_writes) -> None:
    asked = {}

    def init(request: dict) -> None:
        asked.update(request["init_info"])
        request["init_info"].pop("verify_writes", None)
        type(fake_llm).init_weight_transfer_engine(fake_llm, request)

    fake_llm.init_weight_transfer_engine = init
    engine = VllmEngine(fake_llm, directory=tmp_path, verify_writes=verify_writes)
    engine.prewarm(CATALOG)
    assert asked.get("verify_writes", False) is verify_writes
    engine.close()


def test_a_payload_may_be_a_file_which_is_left_alone(engine, tmp_path) -> None:
    path = tmp_path.parent / f"{tmp_path.name}.payload"
    path.write_bytes(payload())
    engine.prewarm(CATALOG)
    assert engine.apply(path) == 4
    assert path.read_bytes() == payload()
    path.unlink()


@pytest.mark.parametrize("answer", [False, None, {"todo": "not supported"}, "unsupported"])
def test_caches_that_stay_are_an_operators_matter(fake_llm, engine, answer) -> None:
    engine.close_gate(1.0)
    fake_llm.can_reset = answer
    with pytest.raises(OperatorRequiredError, match="prefix cache"):
        engine.drop_caches()
    assert not engine.request_gate.is_open


def test_the_gate_waits_for_running_requests_and_says_when_it_cannot(engine) -> None:
    with engine.request_gate.serving(), pytest.raises(DeadlineError):
        engine.close_gate(0.01)
    assert not engine.request_gate.is_open
    engine.digests()
    assert not engine.request_gate.is_open
    engine.reopen_gate()
    assert engine.request_gate.is_open


def test_operations_on_an_llm_wait_until_it_does_not_generate(fake_llm, engine) -> None:
    serving, done = threading.Event(), threading.Event()

    def generate() -> None:
        with engine.request_gate.serving():
            serving.set()
            done.wait(5.0)
            fake_llm.calls.append("generated")

    thread = threading.Thread(target=generate)
    thread.start()
    serving.wait(5.0)
    threading.Timer(0.05, done.set).start()
    engine.digests()
    thread.join()
    assert fake_llm.calls.index("generated") < fake_llm.calls.index("digests")
    assert engine.request_gate.is_open


def test_the_exchange_directory_is_private_and_must_stay_so(tmp_path, fake_llm) -> None:
    engine = VllmEngine(fake_llm, directory=tmp_path)
    engine.digests()
    (directory,) = tmp_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o777)
    with pytest.raises(RejectedError, match="others can write"):
        Exchange(directory, "driver-1")
    engine.close()


@pytest.mark.parametrize("directory", [Path("relative"), Path("/nowhere/at/all")])
def test_only_an_absolute_directory_on_this_node_will_do(directory: Path) -> None:
    with pytest.raises(RejectedError, match="absolute path"):
        Exchange(directory, "driver-1")


def test_a_reply_of_another_session_is_not_taken(tmp_path) -> None:
    tmp_path.chmod(0o700)
    Exchange(tmp_path, "driver-old").reply(1, 0, 1, 5)
    with pytest.raises(AttemptFailedError, match="driver-old"):
        Exchange(tmp_path, "driver-new").collect(1)


def test_a_full_or_missing_file_system_is_named(tmp_path) -> None:
    tmp_path.chmod(0o700)
    exchange = Exchange(tmp_path, "driver-1")
    exchange.remove()
    with pytest.raises(TransportError, match="pass a directory with more room"):
        exchange.put(1, b"x")


@pytest.mark.parametrize("target", [object(), None, 5])
def test_a_target_that_is_no_vllm_is_refused(target) -> None:
    with pytest.raises(RejectedError, match="expected an LLM"):
        VllmEngine(target)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", ""])
def test_a_target_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(RejectedError, match="http://"):
        VllmEngine(url)


def test_an_offline_llm_cannot_keep_or_abort_requests(fake_llm) -> None:
    with pytest.raises(RejectedError, match="'wait'"):
        VllmEngine(fake_llm, in_flight="keep")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(AttemptFailedError, match=r"http://127\.0\.0\.1:9.*is the server running"):
        HttpCalls("http://127.0.0.1:9", in_flight="wait", timeout_s=1.0).start()


def test_the_entry_point_is_the_registration() -> None:
    from importlib.metadata import entry_points

    (entry,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == BACKEND]
    from deltarefit.integrations.vllm import register

    assert entry.load() is register


class AsyncLLM:
    """The few calls of vLLM's ``AsyncLLM`` whose answers count; ``answers`` are what they answer."""

    def __init__(self, **answers: object) -> None:
        self.answers = answers

    def __getattr__(self, name: str):
        async def call(*_: object, **__: object) -> object:
            return self.answers.get(name)

        return call


UNSUPPORTED = {"todo": "not supported"}


@pytest.mark.parametrize("answer", [False, UNSUPPORTED, "unsupported"])
def test_an_engine_that_answers_that_it_cannot_is_not_taken_to_have_done_it(loop, answer) -> None:
    def calls(**answers: object) -> AsyncCalls:
        return AsyncCalls(AsyncLLM(**answers), loop, in_flight="keep", timeout_s=5.0)

    good = calls(reset_prefix_cache=True)
    good.pause(5.0)
    assert good.reset_caches()
    assert not calls(reset_prefix_cache=answer).reset_caches()
    assert not calls(reset_prefix_cache=True, reset_encoder_cache=answer).reset_caches()
    with pytest.raises(AttemptFailedError, match=r"vLLM refused pausing \(keep\): expected no answer, got "):
        calls(pause_generation=answer).pause(5.0)
