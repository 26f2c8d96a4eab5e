"""vLLM's public calls, one face for ``LLM``, ``AsyncLLM`` and the HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from deltarefit.errors import AttemptFailedError, RejectedError
from deltarefit.integrations.exchange import EngineCalls, JsonServer, run_in_loop
from deltarefit.runtime.gate import RequestGate, close_gate

__all__ = ["AsyncCalls", "HttpCalls", "InFlight", "OfflineCalls", "calls_for"]

InFlight = Literal["wait", "keep", "abort"]
"""Running requests when the gate closes: let them end, freeze them and let them go on under the new weights (their keys and
values are computed anew), or end them at once."""


def calls_for(
    target: Any,
    *,
    in_flight: InFlight,
    timeout_s: float,
    gate: RequestGate,
    loop: asyncio.AbstractEventLoop | None,
) -> EngineCalls:
    """The calls of an ``LLM``, an ``AsyncLLM`` (with the loop it runs in) or a server's URL.

    Raises:
        RejectedError: the target is none of these.
    """
    if isinstance(target, str):
        return HttpCalls(target, in_flight=in_flight, timeout_s=timeout_s)
    if not hasattr(target, "init_weight_transfer_engine"):
        raise RejectedError(
            f"vLLM target {type(target).__name__}: expected an LLM, an AsyncLLM or the URL of a server (vLLM 0.32 or later)"
        )
    if hasattr(target, "pause_generation"):
        if loop is None:
            raise RejectedError("an AsyncLLM needs loop=, the running event loop that it was made in")
        return AsyncCalls(target, loop, in_flight=in_flight, timeout_s=timeout_s)
    if in_flight != "wait":
        raise RejectedError(
            f"in_flight={in_flight!r} with an offline LLM: expected 'wait', for LLM.generate() returns only when it is done"
        )
    return OfflineCalls(target, gate)


class OfflineCalls:
    """An ``LLM``. Its owner generates under ``with engine.request_gate.serving():``, which is the request gate."""

    is_thread_safe = False

    def __init__(self, llm: Any, gate: RequestGate) -> None:
        self._llm = llm
        self._gate = gate

    def engine_version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def init(self, info: Mapping[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": dict(info)})

    def start(self) -> None:
        self._llm.start_weight_update()

    def update(self, info: Mapping[str, Any]) -> None:
        self._llm.update_weights({"update_info": dict(info)})

    def finish(self) -> None:
        self._llm.finish_weight_update()

    def set_weight_version(self, weight_version: str) -> None:
        self._llm.update_weight_version(weight_version)

    def pause(self, timeout_s: float) -> None:
        close_gate(self._gate, timeout_s)

    def resume(self) -> None:
        self._gate.reopen()

    def reset_caches(self) -> bool:
        prefix = self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        return _are_gone(prefix, self._llm.llm_engine.reset_encoder_cache())


class AsyncCalls:
    """An ``AsyncLLM``, called from a thread other than its event loop's."""

    is_thread_safe = True

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop, *, in_flight: InFlight, timeout_s: float) -> None:
        self._llm = llm
        self._loop = loop
        self._in_flight = in_flight
        self._timeout_s = timeout_s

    def _wait(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return run_in_loop(coroutine, self._loop, limit_s, engine="vLLM", what=what)

    def engine_version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def init(self, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(info))), "init_weight_transfer_engine")

    def start(self) -> None:
        self._wait(self._llm.start_weight_update(), "start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._wait(self._llm.update_weights(WeightTransferUpdateRequest(dict(info))), f"operation {info['operation']}")

    def finish(self) -> None:
        self._wait(self._llm.finish_weight_update(), "finish_weight_update")

    def set_weight_version(self, weight_version: str) -> None:
        self._wait(self._llm.update_weight_version(weight_version), "update_weight_version")

    def pause(self, timeout_s: float) -> None:
        what = f"pausing ({self._in_flight})"
        answer = self._wait(self._llm.pause_generation(mode=self._in_flight, clear_cache=False), what, timeout_s)
        if answer is not None and answer is not True:
            raise AttemptFailedError(f"vLLM refused {what}: expected no answer, got {answer!r:.200}; nothing may be written")

    def resume(self) -> None:
        self._wait(self._llm.resume_generation(), "resume_generation")

    def reset_caches(self) -> bool:
        reset = self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        prefix = self._wait(reset, "reset_prefix_cache")
        return _are_gone(prefix, self._wait(self._llm.reset_encoder_cache(), "reset_encoder_cache"))


class HttpCalls:
    """A vLLM server on this node, started with ``VLLM_SERVER_DEV_MODE=1``: without it the routes used here do not exist."""

    is_thread_safe = True

    def __init__(self, url: str, *, in_flight: InFlight, timeout_s: float) -> None:
        self._in_flight = in_flight
        self._server = JsonServer(
            url,
            timeout_s=timeout_s,
            if_missing='start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "deltarefit"}\'',
        )

    def engine_version(self) -> str:
        return str(self._server.ask("GET", "/version")["version"])

    def init(self, info: Mapping[str, Any]) -> None:
        self._server.tell("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})

    def start(self) -> None:
        self._server.tell("POST", "/start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        self._server.tell("POST", "/update_weights", {"update_info": dict(info)})

    def finish(self) -> None:
        self._server.tell("POST", "/finish_weight_update", {})

    def set_weight_version(self, weight_version: str) -> None:
        self._server.tell("POST", "/update_weight_version", {"new_version": weight_version})

    def pause(self, timeout_s: float) -> None:
        self._server.tell("POST", f"/pause?mode={self._in_flight}&clear_cache=false", timeout_s=timeout_s)

    def resume(self) -> None:
        self._server.tell("POST", "/resume")

    def reset_caches(self) -> bool:
        answer = self._server.ask("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        self._server.tell("POST", "/reset_encoder_cache")
        return _are_gone(answer.get("success"))


def _are_gone(prefix: object, encoder: object = None) -> bool:
    """Whether vLLM said so: it answers True for keys and values, and nothing for encoder outputs. Engines built on it answer
    what they do not support with other things, some of which count as true."""
    return prefix is True and (encoder is None or encoder is True)
