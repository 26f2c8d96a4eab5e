"""SGLang as a receiver: a driver for engines and servers, a plug-in and a weight loader inside them, and bare models.

SGLang finds ``register`` through its ``sglang.srt.plugins`` entry point and ``receive`` by the name given as its
``custom_weight_loader``; keep what this module imports small. May import SGLang and everything of deltarefit; nobody imports
this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltarefit.integrations.sglang.plugin import LOADER, register

if TYPE_CHECKING:
    from deltarefit.integrations.sglang.driver import SglangEngine

__all__ = ["LOADER", "SglangEngine", "engine_driver", "note_constants", "rank_receiver", "receive", "register"]


def engine_driver(target: Any, *, request_gate: Any, key: bytes | None) -> Any:
    """The driver that ``Receiver.attach(target, ...)`` uses."""
    from deltarefit.integrations.sglang.driver import SglangEngine

    return SglangEngine(target, request_gate=request_gate, key=key)


def rank_receiver(model: Any, load_weights: Any, *, settings: Any = None) -> Any:
    """The receiver of a bare model of SGLang, for ``Receiver.attach(model, load_weights=model.load_weights, ...)``."""
    from deltarefit.integrations.sglang.receiver import SglangReceiver

    return SglangReceiver(model, load_weights, settings=settings)


def receive(model: Any, named_tensors: Any) -> None:
    """SGLang's ``custom_weight_loader``: one operation of a driver inside an update session."""
    from deltarefit.integrations.sglang.rank import receive as operate

    operate(model, named_tensors)


def note_constants(model: Any) -> None:
    """Have a bare model looked at before its weights are loaded: what hangs on it by then follows from no weight. Engines do
    this by themselves."""
    from deltarefit.integrations.sglang.derived import note_constants as note

    note(model)


def __getattr__(name: str) -> Any:
    if name == "SglangEngine":
        from deltarefit.integrations.sglang.driver import SglangEngine

        return SglangEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
