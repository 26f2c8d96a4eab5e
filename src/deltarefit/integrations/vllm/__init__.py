"""vLLM as a receiver: a weight-transfer backend named ``deltarefit`` and the driver that asks it for operations.

vLLM finds ``register`` through its ``vllm.general_plugins`` entry point and calls it in every one of its processes; keep what
this module imports small. Inside a worker, ``backend`` holds the model; outside, ``driver.VllmEngine`` speaks to it through
vLLM's public weight-transfer calls. May import vLLM and everything of deltarefit; nobody imports this room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltarefit.integrations.vllm.plugin import BACKEND, register

if TYPE_CHECKING:
    from deltarefit.integrations.vllm.driver import VllmEngine

__all__ = ["BACKEND", "VllmEngine", "engine_driver", "register"]


def engine_driver(target: Any, *, request_gate: Any, key: bytes | None) -> Any:
    """The driver that ``Receiver.attach(target, ...)`` uses."""
    from deltarefit.integrations.vllm.driver import VllmEngine

    return VllmEngine(target, request_gate=request_gate, key=key)


def __getattr__(name: str) -> Any:
    if name == "VllmEngine":
        from deltarefit.integrations.vllm.driver import VllmEngine

        return VllmEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
