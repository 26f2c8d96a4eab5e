"""What vLLM calls in each of its processes: make the backend known, and watch models being loaded for it.

Nothing else in vLLM is touched, and an engine with another backend, or none, in the same process is left as it was.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "deltarefit"
"""The name to put into vLLM's ``weight_transfer_config``."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend with vLLM. May be called any number of times; never raises, for it runs in every vLLM process."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.model_loader import base_loader

        _register_backend(WeightTransferEngineFactory)
        _watch_loading(base_loader)
    except Exception as error:  # anything raised here would take down engines that do not even use us
        _log.warning(
            "the weight-transfer backend %r is not available: this vLLM lacks what it needs (%s: %s); "
            "deltarefit is tested with vLLM 0.32",
            BACKEND,
            type(error).__name__,
            error,
        )


def _register_backend(factory: Any) -> None:
    try:
        factory.register_engine(BACKEND, "deltarefit.integrations.vllm.backend", "DeltarefitBackend")
    except ValueError as error:
        _log.debug("backend %r: %s", BACKEND, error)  # registered before, in this process


def _watch_loading(base_loader: Any) -> None:
    watches: dict[str, Callable[[Any], Any]] = {
        "initialize_model": _noting,
        "process_weights_after_loading": _watched,
    }
    for name, watch in watches.items():
        original = getattr(base_loader, name)
        if not getattr(original, "watched_by_deltarefit", False):
            watched = watch(original)
            watched.watched_by_deltarefit = True
            setattr(base_loader, name, watched)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's making of a model, with what it was made from noted, so that another like it can be made."""

    @functools.wraps(original)
    def initialize(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(vllm_config, *args, **kwargs)
        if _names_us(vllm_config.weight_transfer_config):
            from deltarefit.integrations.vllm.drafts import note_making

            note_making(model, vllm_config, kwargs.get("model_config"), kwargs.get("prefix", ""))
        return model

    return initialize


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's post-load step, with linear weights kept in the open and every change that it makes recorded.

    This is the one moment that knows both the configuration (so only engines that chose this backend are affected) and the
    weights as the loader wrote them.
    """

    @functools.wraps(original)
    def process(model: Any, *args: Any, **kwargs: Any) -> None:
        transfer = _chosen()
        if transfer is None:
            original(model, *args, **kwargs)
            return
        from deltarefit.integrations.exchange import PostLoadWatch
        from deltarefit.integrations.vllm.drafts import remember
        from deltarefit.integrations.vllm.plain_linears import plain_linears

        watch = PostLoadWatch(model, everywhere=True)
        with plain_linears():
            original(model, *args, **kwargs)
        watch.finish()
        remember(model, kwargs.get("model_config", args[0] if args else None), transfer)

    return process


def _chosen() -> Any:
    """The weight-transfer configuration of the engine that loads, if it names this backend."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = config.weight_transfer_config if config is not None else None
    return transfer if _names_us(transfer) else None


def _names_us(transfer: Any) -> bool:
    return transfer is not None and transfer.backend == BACKEND
