"""The driver: one SGLang engine, all its ranks together, as the receiver agent sees it (``runtime.engine.EngineDriver``)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from deltarefit.integrations.exchange import ExchangeDriver
from deltarefit.integrations.sglang.calls import InFlight, Through, calls_for
from deltarefit.integrations.sglang.plugin import LOADER
from deltarefit.runtime.clock import IdSource
from deltarefit.runtime.gate import LocalGate, RequestGate

__all__ = ["SglangEngine"]


class SglangEngine(ExchangeDriver):
    """Refits an SGLang engine in place, through its own loader's placement.

    ``target`` is an ``Engine`` or the URL of a server on this node, started with ``custom_weight_loader`` set to
    ``deltarefit.integrations.sglang.receive``. Called from one thread at a time. With an ``Engine`` that you call ``generate``
    on, wrap each call in ``with engine.request_gate.serving():`` if another thread drives the refits; with one that generates
    in an event loop (``async_generate``) pass ``loop``.
    """

    engine = "SGLang"
    if_absent = f"Was the engine started with --custom-weight-loader {LOADER}, and is deltarefit installed in its environment?"

    def __init__(
        self,
        target: Any,
        *,
        in_flight: InFlight | None = None,
        through: Through = "plug-in",
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
        """``in_flight`` says what becomes of running requests (default: retract, or wait for an ``Engine`` without ``loop``).

        ``through``: ``plug-in``, or ``session`` for SGLang's own update session, at whose end post-load work runs again. An
        engine that speculates with a draft model is refused, because drafts are not refitted, unless ``refit_drafts`` is false:
        then the draft stays as it was loaded. For the others see ``ExchangeDriver``.
        """
        gate: RequestGate = request_gate if request_gate is not None else LocalGate()
        if in_flight is None:
            in_flight = "retract" if isinstance(target, str) or loop is not None else "wait"
        super().__init__(
            calls_for(target, in_flight=in_flight, through=through, timeout_s=call_timeout_s, gate=gate, loop=loop),
            request_gate=gate,
            directory=directory,
            key_file=key_file,
            key=key,
            verify_writes=verify_writes,
            call_timeout_s=call_timeout_s,
            ids=ids,
            options=None if refit_drafts else {"refit_drafts": False},
        )
