"""SGLang's public calls, one face for an ``Engine`` and the HTTP server.

The driver introduces itself, and operations go, by SGLang's IPC weight update, which our plug-in answers on every rank; an
``Engine`` can have operations go through SGLang's update session and its ``custom_weight_loader`` instead. While the request
gate is open, generation is held for the time of an operation, so that running requests need not end for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from deltarefit.errors import AttemptFailedError, RejectedError
from deltarefit.integrations.exchange import EngineCalls, JsonServer, ServerRefusalError, run_in_loop
from deltarefit.integrations.sglang.plugin import LOADER, PREFIX
from deltarefit.runtime.gate import RequestGate, close_gate

__all__ = ["AsyncCalls", "HttpCalls", "InFlight", "OfflineCalls", "Through", "calls_for"]

InFlight = Literal["wait", "retract", "abort", "in_place"]
"""Running requests when the gate closes. ``wait``: they end first (an ``Engine`` on which ``generate`` is called).
``retract``: they go back to the queue, and what they had computed is computed anew. ``abort``: they end at once. ``in_place``:
they freeze and go on with keys and values that older weights computed; caches can then not be dropped."""
Through = Literal["plug-in", "session"]
"""How operations reach ranks."""

_FLUSH_S = 30.0
_REFUSED_STATUS = 400
"""What SGLang's server answers when requests keep it from dropping its caches."""


def calls_for(
    target: Any,
    *,
    in_flight: InFlight,
    through: Through,
    timeout_s: float,
    gate: RequestGate,
    loop: asyncio.AbstractEventLoop | None,
) -> EngineCalls:
    """The calls of an ``Engine`` (with the loop that it generates in, if that is not its own) or a server's URL.

    Raises:
        RejectedError: the target is neither, or cannot do what is asked.
    """
    if isinstance(target, str):
        if through != "plug-in" or in_flight == "wait":
            raise RejectedError(
                f"a server, through={through!r}, in_flight={in_flight!r}: expected the plug-in (a session's tensors travel as "
                "pickles) and one of SGLang's pause modes, retract, abort or in_place"
            )
        return HttpCalls(target, in_flight=in_flight, timeout_s=timeout_s)
    if not hasattr(target, "tokenizer_manager"):
        raise RejectedError(f"SGLang target {type(target).__name__}: expected an Engine or the URL of a server (SGLang 0.5.23)")
    if loop is not None:
        if in_flight == "wait":
            raise RejectedError(
                "in_flight='wait' with a loop: expected one of SGLang's pause modes, retract, abort or in_place"
            )
        return AsyncCalls(target, loop, in_flight=in_flight, through=through, timeout_s=timeout_s)
    if in_flight != "wait":
        raise RejectedError(
            f"in_flight={in_flight!r} with an Engine and no loop: expected 'wait', for generate() returns only when it is done"
        )
    return OfflineCalls(target, gate, through=through)


class _EngineFace:
    """What an ``Engine`` in this process is asked, whoever runs its coroutines."""

    def __init__(self, engine: Any, through: Through) -> None:
        self._engine = engine
        self._through = through

    def _run(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    @property
    def _manager(self) -> Any:
        return self._engine.tokenizer_manager

    def engine_version(self) -> str:
        import sglang

        return str(sglang.__version__)

    def init(self, info: Mapping[str, Any]) -> None:
        self._send(info, "the driver's introduction")

    def update(self, info: Mapping[str, Any]) -> None:
        what = f"operation {info['operation']}"
        if self._through == "plug-in":
            self._send(info, what)
        else:
            self._send_in_session(info, what)

    def _send(self, info: Mapping[str, Any], what: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

        request = UpdateWeightsFromIPCReqInput(zmq_handles=_handles(info), flush_cache=False)
        _require(self._run(self._manager.update_weights_from_ipc(request, None), what), what)

    def _send_in_session(self, info: Mapping[str, Any], what: str) -> None:
        import torch
        from sglang.srt.managers import io_struct

        name = PREFIX + json.dumps({key: _text(value) for key, value in info.items()})
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self._engine._serialize_tensors_per_rank([(name, torch.zeros(1, device="cpu"))], LOADER),
            load_format=LOADER,
            flush_cache=False,
            selector="target",
        )
        _require(self._run(self._manager.update_weights_from_tensor(request, None), what), what)

    def start(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._through == "session":
            request = BeginWeightUpdateReqInput(selector="target")
            what = "begin_weight_update"
            _require(self._run(self._manager.begin_weight_update(request, None), what), what)

    def finish(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        if self._through == "session":
            what = "end_weight_update"
            _require(self._run(self._manager.end_weight_update(EndWeightUpdateReqInput(), None), what), what)

    def set_weight_version(self, weight_version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=weight_version, abort_all_requests=False)
        self._run(self._manager.update_weight_version(request), "update_weight_version")

    def reset_caches(self) -> bool:
        return self._flush(_FLUSH_S)

    def _flush(self, timeout_s: float) -> bool:
        return self._run(self._manager.flush_cache(timeout_s=timeout_s), "flush_cache").success is True


class OfflineCalls(_EngineFace):
    """An ``Engine``. Its owner generates under ``with engine.request_gate.serving():``, which is the request gate."""

    is_thread_safe = False

    def __init__(self, engine: Any, gate: RequestGate, *, through: Through) -> None:
        super().__init__(engine, through)
        self._gate = gate

    def _run(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float | None = None) -> Any:
        del what, timeout_s
        return self._engine.loop.run_until_complete(coroutine)

    def pause(self, timeout_s: float) -> None:
        close_gate(self._gate, timeout_s)

    def resume(self) -> None:
        self._gate.reopen()


class AsyncCalls(_EngineFace):
    """An ``Engine`` that generates in an event loop (``async_generate``), called from a thread other than that loop's."""

    is_thread_safe = True

    def __init__(
        self, engine: Any, loop: asyncio.AbstractEventLoop, *, in_flight: InFlight, through: Through, timeout_s: float
    ) -> None:
        super().__init__(engine, through)
        self._loop = loop
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._is_paused = False

    def _run(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return run_in_loop(coroutine, self._loop, limit_s, engine="SGLang", what=what)

    def start(self) -> None:
        try:
            if not self._is_paused:
                self._pause("in_place")
            super().start()
        except BaseException:
            self._resume_unless_paused()
            raise

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self._resume_unless_paused()

    def _resume_unless_paused(self) -> None:
        if not self._is_paused:
            self.resume()

    def pause(self, timeout_s: float) -> None:
        self._is_paused = True
        self._pause(self._in_flight, timeout_s)

    def _pause(self, mode: InFlight, timeout_s: float | None = None) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._run(self._manager.pause_generation(PauseGenerationReqInput(mode=mode)), f"pausing ({mode})", timeout_s)

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._manager.continue_generation(ContinueGenerationReqInput()), "continue_generation")
        self._is_paused = False

    def reset_caches(self) -> bool:
        is_flushed = self._flush(_flush_s(self._in_flight))
        return is_flushed or _may_keep(self._in_flight)


class HttpCalls:
    """An SGLang server on this node."""

    is_thread_safe = True

    def __init__(self, url: str, *, in_flight: InFlight, timeout_s: float) -> None:
        self._in_flight = in_flight
        self._server = JsonServer(url, timeout_s=timeout_s, if_missing="expected SGLang 0.5.23 or later")
        self._is_paused = False

    def engine_version(self) -> str:
        return str(self._server.ask("GET", "/server_info")["version"])

    def init(self, info: Mapping[str, Any]) -> None:
        self.update(info)

    def update(self, info: Mapping[str, Any]) -> None:
        self._server.tell("POST", "/update_weights_from_ipc", {"zmq_handles": _handles(info), "flush_cache": False})

    def start(self) -> None:
        if self._is_paused:
            return
        try:
            self._server.tell("POST", "/pause_generation", {"mode": "in_place"})
        except BaseException:  # it may have been heard all the same
            self.resume()
            raise

    def finish(self) -> None:
        if not self._is_paused:
            self.resume()

    def set_weight_version(self, weight_version: str) -> None:
        self._server.tell("POST", "/update_weight_version", {"new_version": weight_version, "abort_all_requests": False})

    def pause(self, timeout_s: float) -> None:
        self._is_paused = True
        self._server.tell("POST", "/pause_generation", {"mode": self._in_flight}, timeout_s=timeout_s)

    def resume(self) -> None:
        self._server.tell("POST", "/continue_generation", {})
        self._is_paused = False

    def reset_caches(self) -> bool:
        try:
            self._server.tell("POST", f"/flush_cache?timeout={_flush_s(self._in_flight)}")
        except ServerRefusalError as error:
            if error.status != _REFUSED_STATUS:
                raise
            return _may_keep(self._in_flight)
        return True


def _flush_s(in_flight: InFlight) -> float:
    """How long SGLang may wait until nothing runs. Paused by ``retract`` or ``in_place`` it would wait in vain: requests that
    it took back wait for it to go on, and hold nothing."""
    return _FLUSH_S if in_flight in {"wait", "abort"} else 0.0


def _may_keep(in_flight: InFlight) -> bool:
    """Whether caches may stay: frozen requests hold them, and that mode was chosen to keep those."""
    return in_flight == "in_place"


def _handles(info: Mapping[str, Any]) -> dict[str, str]:
    return {PREFIX + name: _text(value) for name, value in info.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require(answer: tuple[bool, str], what: str) -> None:
    success, message = answer
    if not success:
        raise AttemptFailedError(f"SGLang refused {what}: {message}")
