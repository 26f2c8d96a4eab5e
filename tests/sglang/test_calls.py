"""What the driver asks of SGLang, against fakes: a failure never leaves an engine paused, and answers are not misread."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import AttemptFailedError, DeadlineError, RejectedError
from deltarefit.integrations.exchange import ExchangeDriver, JsonServer, RankEndpoint, ServerRefusalError, run_in_loop
from deltarefit.integrations.exchange import calls as exchange_calls
from deltarefit.integrations.exchange.operations import RankOperations
from deltarefit.integrations.sglang.calls import AsyncCalls, HttpCalls
from deltarefit.receiver import PrewarmReport
from deltarefit.runtime.gate import LocalGate

pytestmark = pytest.mark.torch

CATALOG = Catalog([TensorSpec("w", "BF16", (4,))])


class FakeReceiver:
    def prewarm(self, catalog) -> PrewarmReport:
        return PrewarmReport(routes={}, fingerprint=catalog.digest, unreached={})

    def digests(self) -> dict:
        return {}


class FakeCalls:
    """An engine that ``start`` pauses and ``finish`` resumes; ``failing`` maps a call to the error that it raises."""

    is_thread_safe = True

    def __init__(self) -> None:
        self.failing: dict[str, BaseException] = {}
        self.is_frozen = self.is_closed = False
        self._endpoint = RankEndpoint(0, 1, lambda key: RankOperations(None, FakeReceiver(), check=lambda model: None, key=key))

    def _ask(self, call: str) -> None:
        if call in self.failing:
            raise self.failing[call]

    def engine_version(self) -> str:
        return "1"

    def init(self, info) -> None:
        self._ask("init")
        self._endpoint.meet(info["directory"], info["session"], info["key_file"])

    def start(self) -> None:
        self._ask("start")
        self.is_frozen = True

    def update(self, info) -> None:
        self._ask("update")
        self._endpoint.receive(info["session"], info["number"], info["operation"])

    def finish(self) -> None:
        self.is_frozen = False
        self._ask("finish")

    def set_weight_version(self, weight_version: str) -> None:
        self._ask("version")

    def pause(self, timeout_s: float) -> None:
        self._ask("pause")
        self.is_closed = True

    def resume(self) -> None:
        self._ask("resume")
        self.is_closed = False

    def reset_caches(self) -> bool:
        self._ask("caches")
        return True


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls()


@pytest.fixture
def driver(calls, tmp_path):
    driver = ExchangeDriver(calls, request_gate=LocalGate(), directory=tmp_path)
    yield driver
    driver.close()


@pytest.mark.parametrize("error", [RuntimeError("lost"), DeadlineError("too slow"), KeyboardInterrupt()], ids=repr)
def test_an_engine_in_which_an_operation_fails_serves_on(calls, driver, error) -> None:
    driver.prewarm(CATALOG)
    calls.failing["update"] = error
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else AttemptFailedError):
        driver.digests()
    assert not calls.is_frozen
    calls.failing.clear()
    assert driver.digests() == [{}]
    assert not calls.is_frozen


def test_an_operation_that_a_rank_refuses_leaves_the_engine_serving_and_keeps_its_error(calls, driver) -> None:
    calls.failing["finish"] = RuntimeError("no session")
    with pytest.raises(RejectedError, match="before prewarm"):
        driver.apply(b"")
    assert not calls.is_frozen


def test_while_the_gate_is_closed_a_failure_ends_the_session_and_leaves_the_gate_closed(calls, driver) -> None:
    driver.prewarm(CATALOG)
    driver.close_gate(1.0)
    driver.digests()
    assert calls.is_frozen
    calls.failing["update"] = RuntimeError("lost")
    with pytest.raises(AttemptFailedError, match="lost"):
        driver.digests()
    assert not calls.is_frozen
    assert calls.is_closed
    calls.failing.clear()
    driver.reopen_gate()
    assert not calls.is_closed


# --- an Engine in an event loop -----------------------------------------------------------------------------------


class Manager:
    """The part of SGLang's tokenizer manager that is asked here."""

    def __init__(self) -> None:
        self.is_paused = False
        self.failing: set[str] = set()
        self.flushes: list[float] = []
        self.flushed: object = True

    def _ask(self, call: str) -> None:
        if call in self.failing:
            raise RuntimeError(f"{call} failed")

    async def pause_generation(self, request) -> None:
        self.is_paused = True
        self._ask("pause")

    async def continue_generation(self, request) -> None:
        self.is_paused = False

    async def begin_weight_update(self, request, http):
        self._ask("begin")
        return "begin refused" not in self.failing, "no"

    async def end_weight_update(self, request, http):
        self._ask("end")
        return "end refused" not in self.failing, "no"

    async def flush_cache(self, timeout_s):
        self.flushes.append(timeout_s)
        return SimpleNamespace(success=self.flushed if "flush" not in self.failing else False)


@pytest.fixture
def sglang_requests(monkeypatch):
    names = ("PauseGenerationReqInput", "ContinueGenerationReqInput", "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput")
    requests = ModuleType("sglang.srt.managers.io_struct")
    for name in names:
        setattr(requests, name, SimpleNamespace)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, requests.__name__, requests)


def async_calls(manager, loop, in_flight: str = "retract") -> AsyncCalls:
    return AsyncCalls(SimpleNamespace(tokenizer_manager=manager), loop, in_flight=in_flight, through="session", timeout_s=5.0)


@pytest.mark.parametrize("failing", ["pause", "begin", "begin refused"])
@pytest.mark.usefixtures("sglang_requests")
def test_a_session_that_cannot_begin_lets_generation_go_on(loop, failing: str) -> None:
    manager = Manager()
    manager.failing.add(failing)
    with pytest.raises((RuntimeError, AttemptFailedError)):
        async_calls(manager, loop).start()
    assert not manager.is_paused


@pytest.mark.parametrize("failing", ["end", "end refused"])
@pytest.mark.usefixtures("sglang_requests")
def test_a_session_that_cannot_end_lets_generation_go_on(loop, failing: str) -> None:
    manager = Manager()
    calls = async_calls(manager, loop)
    calls.start()
    assert manager.is_paused
    manager.failing.add(failing)
    with pytest.raises((RuntimeError, AttemptFailedError)):
        calls.finish()
    assert not manager.is_paused


@pytest.mark.parametrize("failing", ["begin", "end"])
@pytest.mark.usefixtures("sglang_requests")
def test_a_closed_gate_stays_closed_whatever_fails(loop, failing: str) -> None:
    manager = Manager()
    calls = async_calls(manager, loop)
    calls.pause(5.0)
    manager.failing.add(failing)
    with pytest.raises(RuntimeError):
        (calls.start if failing == "begin" else calls.finish)()
    assert manager.is_paused
    calls.resume()
    assert not manager.is_paused


@pytest.mark.parametrize(
    ("in_flight", "waits", "may_keep"), [("retract", False, False), ("in_place", False, True), ("abort", True, False)]
)
@pytest.mark.usefixtures("sglang_requests")
def test_dropping_caches_waits_only_where_the_engine_can_become_idle(loop, in_flight: str, waits: bool, may_keep: bool) -> None:
    """Requests that were retracted wait in the queue until generation goes on: SGLang would wait for them in vain."""
    manager = Manager()
    calls = async_calls(manager, loop, in_flight)
    assert calls.reset_caches()
    manager.failing.add("flush")
    assert calls.reset_caches() is may_keep
    manager.failing.clear()
    manager.flushed = "not supported"
    assert calls.reset_caches() is may_keep, "only True says that caches are gone"
    assert [timeout_s > 0 for timeout_s in manager.flushes] == [waits] * 3


def test_a_wait_in_a_loop_ends_at_its_deadline_and_says_what_for(loop) -> None:
    with pytest.raises(DeadlineError, match=r"SGLang did not finish sleeping within 0\.05 s"):
        run_in_loop(asyncio.sleep(30), loop, 0.05, engine="SGLang", what="sleeping")


def test_an_engine_that_times_out_by_itself_is_not_taken_for_our_deadline(loop) -> None:
    async def time_out() -> None:
        raise TimeoutError("its own")

    with pytest.raises(AttemptFailedError, match="its own") as caught:
        run_in_loop(time_out(), loop, 5.0, engine="SGLang", what="sleeping")
    assert not isinstance(caught.value, DeadlineError)


# --- a server -----------------------------------------------------------------------------------------------------


def routes(canned_server) -> list[str]:
    return [path.partition("?")[0] for path, _ in canned_server.asked]


def test_a_server_that_cannot_pause_is_told_to_go_on(canned_server) -> None:
    canned_server.answers["/pause_generation"] = (500, b"oops")
    with pytest.raises(AttemptFailedError, match="500: oops"):
        HttpCalls(canned_server.url, in_flight="retract", timeout_s=5.0).start()
    assert routes(canned_server) == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize(("in_flight", "kept"), [("retract", False), ("in_place", True), ("abort", False)])
def test_only_a_refusal_says_that_requests_hold_caches(canned_server, in_flight: str, kept: bool) -> None:
    calls = HttpCalls(canned_server.url, in_flight=in_flight, timeout_s=5.0)
    canned_server.answers["/flush_cache"] = (200, b"Cache flushed.\nPlease check backend logs")
    assert calls.reset_caches()
    canned_server.answers["/flush_cache"] = (400, b"Flush cache failed.\n")
    assert calls.reset_caches() is kept
    canned_server.answers["/flush_cache"] = (503, b"overloaded")
    with pytest.raises(ServerRefusalError, match="503: overloaded"):
        calls.reset_caches()
    canned_server.server_close()
    with pytest.raises(AttemptFailedError, match="is the server running"):
        HttpCalls("http://127.0.0.1:9", in_flight=in_flight, timeout_s=1.0).reset_caches()


def test_an_answer_that_is_too_long_or_no_json_is_an_error(canned_server, monkeypatch) -> None:
    ask = JsonServer(canned_server.url, timeout_s=5.0, if_missing="").ask
    canned_server.answers["/version"] = (200, b"<html>hello</html>")
    with pytest.raises(
        AttemptFailedError, match=r"/version: expected a JSON object, got 18 bytes that are none: '<html>hello</html>'"
    ):
        ask("GET", "/version")
    canned_server.answers["/version"] = (200, b"")
    with pytest.raises(AttemptFailedError, match="got 0 bytes"):
        ask("GET", "/version")
    canned_server.answers["/version"] = (200, json.dumps({"version": "x" * 100}).encode())
    assert ask("GET", "/version") == {"version": "x" * 100}
    monkeypatch.setattr(exchange_calls, "_MAX_ANSWER_NBYTES", 114)
    with pytest.raises(AttemptFailedError, match="longer than the 114 bytes"):
        ask("GET", "/version")


@pytest.mark.parametrize("answer", [b"null", b"true", b"[1]", b'"x"'])
def test_an_answer_that_is_another_kind_of_json_is_an_error(canned_server, answer: bytes) -> None:
    canned_server.answers["/reset_prefix_cache"] = (200, answer)
    with pytest.raises(AttemptFailedError, match=r"/reset_prefix_cache: expected a JSON object, got "):
        JsonServer(canned_server.url, timeout_s=5.0, if_missing="").ask("POST", "/reset_prefix_cache")


@pytest.mark.parametrize("success", [False, None, "not supported"])
def test_a_failure_told_in_the_body_is_a_refusal(canned_server, success) -> None:
    """Status 200 says that the request was understood."""
    told = JsonServer(canned_server.url, timeout_s=5.0, if_missing="")
    for good in (b"", b"Cache flushed.", b"[1]", b'{"status": "paused"}', b'{"success": true}'):
        canned_server.answers["/pause"] = (200, good)
        told.tell("POST", "/pause", {})
    canned_server.answers["/pause"] = (200, json.dumps({"success": success, "message": "the engine is asleep"}).encode())
    with pytest.raises(ServerRefusalError, match=r"/pause: answered with status 200, but .*the engine is asleep"):
        told.tell("POST", "/pause", {})


# --- drafts -------------------------------------------------------------------------------------------------------


class Updater:
    """SGLang's weight updater of one runner."""

    def __init__(self, model, *, is_draft: bool) -> None:
        import torch

        self._model, self._is_draft = model, is_draft
        self.model_config = SimpleNamespace(dtype=torch.float32)

    def get_model(self):
        return self._model

    def get_model_runner(self):
        return SimpleNamespace(is_draft_worker=self._is_draft)

    def _assert_weight_cache_inactive(self, what: str) -> None:
        """Inactive."""


class SpeculatingCalls(FakeCalls):
    """The policy's updater, then the draft's, as SGLang calls them."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.updaters = [Updater(torch.nn.Linear(2, 2), is_draft=is_draft) for is_draft in (False, True)]

    def _each(self, info) -> None:
        from deltarefit.integrations.sglang.calls import _handles
        from deltarefit.integrations.sglang.plugin import _on_update

        for updater in self.updaters:
            success, message = _on_update(None, updater, SimpleNamespace(zmq_handles=_handles(info)))
            if not success:
                raise AttemptFailedError(message)

    init = update = _each


@pytest.fixture
def speculating(monkeypatch):
    from deltarefit.integrations.sglang import plugin, rank

    monkeypatch.setattr(plugin, "is_chosen", lambda: True)
    monkeypatch.setattr(rank, "_place", lambda: (0, 1))
    monkeypatch.setattr(rank, "_tag", lambda number: "rank 0")
    monkeypatch.setattr(
        rank,
        "_operations",
        lambda model, settings, key: RankOperations(model, FakeReceiver(), check=lambda model: None, key=key),
    )
    yield SpeculatingCalls()
    rank._MET.clear()


def speculating_driver(calls, directory: Path, **options) -> ExchangeDriver:
    return ExchangeDriver(calls, request_gate=LocalGate(), directory=directory, **options)


def test_an_engine_that_speculates_is_refused_for_its_draft_would_go_stale(speculating, tmp_path) -> None:
    with pytest.raises(RejectedError, match=r"speculates with a draft model.*--keep-drafts.*refit_drafts=False"):
        speculating_driver(speculating, tmp_path).prewarm(CATALOG)
    assert not list(tmp_path.iterdir())


def test_a_draft_may_be_left_as_it_is_on_purpose(speculating, tmp_path) -> None:
    driver = speculating_driver(speculating, tmp_path, options={"refit_drafts": False})
    assert len(driver.prewarm(CATALOG)) == 1
    assert driver.digests() == [{}]
    driver.close()


def test_an_engine_without_a_draft_needs_not_be_told(speculating, tmp_path) -> None:
    del speculating.updaters[1]
    driver = speculating_driver(speculating, tmp_path)
    assert len(driver.prewarm(CATALOG)) == 1
    driver.close()


@pytest.mark.parametrize(("keep_drafts", "told"), [(False, None), (True, False)])
def test_the_command_hands_on_what_becomes_of_drafts(keep_drafts: bool, told: bool | None) -> None:
    from deltarefit.cli.receiver import _driver

    driver = _driver("http://127.0.0.1:9", "sglang", None, {}, keep_drafts=keep_drafts)
    assert driver._options.get("refit_drafts") is told


# --- experts ------------------------------------------------------------------------------------------------------


def test_experts_that_were_moved_between_slots_are_another_layout(monkeypatch) -> None:
    """SGLang balances experts while it serves: storage stays where it is and holds other experts."""
    import torch

    from deltarefit.integrations.sglang import rank

    located = ModuleType("sglang.srt.eplb.expert_location")
    held = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor([[2, 0, 3, 1, 2, 0]]))
    located.get_global_expert_location_metadata = lambda: held
    for name in ("sglang", "sglang.srt", "sglang.srt.eplb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang"].__version__ = "0.5.23"
    monkeypatch.setitem(sys.modules, located.__name__, located)
    before = rank._tag(1)
    assert rank._tag(1) == before
    held.physical_to_logical_map_cpu[0, 0] = 1
    assert rank._tag(1) != before
    held = None
    assert rank._tag(1) == "sglang 0.5.23, rank 1"
