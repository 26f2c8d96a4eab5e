"""What SGLang calls in each of its processes (entry point group ``sglang.srt.plugins``): hooks on three of its functions.

They act only in engines started with ``--custom-weight-loader deltarefit.integrations.sglang.receive``; others are left as
they were. Two watch what hangs on a model before its weights are loaded, and what SGLang does to weights afterwards. The third
gives SGLang's IPC weight update, the one call that is small JSON, reaches every rank and needs no update session, a second
meaning: an update whose handles are ours is for ``rank``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["LOADER", "PREFIX", "is_chosen", "register"]

LOADER = "deltarefit.integrations.sglang.receive"
"""What to give SGLang as ``custom_weight_loader``: it chooses deltarefit, and is what SGLang calls in a session."""
PREFIX = "deltarefit."
"""Begins the names of handles, and the text in a session's tensor name, that are meant for us."""

_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_LOADER_MODULE = "sglang.srt.model_loader.loader"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks with SGLang. Called once in each of its processes; does nothing in those that hold no model."""
    if _SCHEDULER not in sys.modules:  # naming a function in a hook imports its module, which costs seconds
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.WeightUpdater.update_weights_from_ipc", _on_update, HookType.AROUND)
    HookRegistry.register(f"{_LOADER_MODULE}.DefaultModelLoader.load_weights_only", _on_loading, HookType.AROUND)
    HookRegistry.register(f"{_LOADER_MODULE}.DefaultModelLoader.postprocess_weights", _on_loaded, HookType.AROUND)


def is_chosen() -> bool:
    """Whether the engine of this process was started with our loader."""
    from sglang.srt.runtime_context import get_model

    try:
        loaders = get_model().custom_weight_loader
    except (AttributeError, RuntimeError, LookupError):  # a process without a published configuration
        return False
    return LOADER in (loaders or ())


def _on_update(update: Callable[..., tuple[bool, str]], updater: Any, request: Any) -> tuple[bool, str]:
    """SGLang's update from IPC handles. Ours are told by their names, and never opened as sockets."""
    handles = request.zmq_handles
    info = {name.removeprefix(PREFIX): text for name, text in handles.items() if name.startswith(PREFIX)}
    if not info:
        return update(updater, request)
    if not is_chosen():
        return False, f"this engine was not started with --custom-weight-loader {LOADER}"
    from deltarefit.integrations.sglang.rank import answer, meet, refuse_draft

    is_meeting = "directory" in info
    try:
        if updater.get_model_runner().is_draft_worker:  # called after its policy's, with the same handles
            if is_meeting and info.get("refit_drafts") != "false":
                refuse_draft(info)
            return True, "the draft model is left as it is"
        updater._assert_weight_cache_inactive("a refit")
        if is_meeting:
            meet(updater.get_model(), info, dtype=updater.model_config.dtype)
        else:
            answer(updater.get_model(), info)
    except Exception as error:  # SGLang's scheduler would die of it; the driver raises what it is told
        _log.debug("operation failed", exc_info=True)
        return False, f"{type(error).__name__}: {error}"
    return True, "done"


def _on_loading(load: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's load, before which the model is looked at the first time: what is there already follows from no weight."""
    from deltarefit.integrations.exchange import changed_after_load
    from deltarefit.integrations.sglang.derived import note_constants

    if is_chosen() and changed_after_load(model) is None:
        note_constants(model)
    load(model, *args, **kwargs)


def _on_loaded(postprocess: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's post-load step, watched the first time: what it changes then is no longer where the loader put it."""
    from deltarefit.integrations.exchange import PostLoadWatch, changed_after_load

    if not is_chosen() or changed_after_load(model) is not None:
        postprocess(model, *args, **kwargs)
        return
    watch = PostLoadWatch(model)
    postprocess(model, *args, **kwargs)
    watch.finish()
