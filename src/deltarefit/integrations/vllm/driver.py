"""The driver: one vLLM engine, all its ranks together, as the receiver agent sees it (``runtime.engine.EngineDriver``)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from deltarefit.integrations.exchange import ExchangeDriver
from deltarefit.integrations.vllm.calls import InFlight, calls_for
from deltarefit.runtime.clock import IdSource
from deltarefit.runtime.gate import LocalGate, RequestGate

__all__ = ["VllmEngine"]


class VllmEngine(ExchangeDriver):
    """Refits a vLLM engine in place, through its own loader's placement.

    ``target`` is an ``LLM``, an ``AsyncLLM`` (with ``loop``) or the URL of a server on this node, started with
    ``weight_transfer_config={"backend": "deltarefit"}``. Called from one thread at a time. With an ``LLM``, wrap each
    ``generate`` in ``with engine.request_gate.serving():`` if another thread drives the refits.
    """

    engine = "vLLM"
    if_absent = 'Was the engine started with weight_transfer_config={"backend": "deltarefit"}?'
    if_caches_stay = "end the requests or the KV connector that hold them"

    def __init__(
        self,
        target: Any,
        *,
        in_flight: InFlight = "wait",
        directory: Path | None = None,
        key_file: Path | None = None,
        key: bytes | None = None,
        verify_writes: bool = False,
        refit_drafts: bool = True,
        call_timeout_s: float = 600.0,
        loop: asyncio.AbstractEventLoop | None = None,
        request_gate: RequestGate | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """``in_flight`` says what becomes of running requests; without ``refit_drafts`` a speculative draft stays as it was
        loaded; for the others see ``ExchangeDriver``.
        """
        gate: RequestGate = request_gate if request_gate is not None else LocalGate()
        super().__init__(
            calls_for(target, in_flight=in_flight, timeout_s=call_timeout_s, gate=gate, loop=loop),
            request_gate=gate,
            directory=directory,
            key_file=key_file,
            key=key,
            verify_writes=verify_writes,
            call_timeout_s=call_timeout_s,
            ids=ids,
            options=None if refit_drafts else {"refit_drafts": False},
        )
