"""Refuses vLLM models of which weights no longer lie where vLLM's loader wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange.layout import changed_after_load
from deltarefit.integrations.vllm.unpacked import KEEP_PREPACK
from deltarefit.wording import some_of

__all__ = ["check_layout"]

_SHOWN = 5


def _packed_copies(modules: Mapping[str, Any]) -> Iterator[str]:
    """Packed copies that stand beside an untouched parameter: vLLM's CPU dispatch keeps them in closures."""
    for name, module in modules.items():
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            yield f"{name}.weight: the layer computes with a packed copy of it"
        if getattr(module, "_cpu_unpacked_conv_weight", None) is not None:
            yield f"{name}.weight: the convolution computes with a packed copy of it"


def check_layout(model: Any) -> None:
    """Refuse a model that cannot be refitted in place as it was loaded.

    Raises:
        RejectedError: nobody watched its loading, or weights are packed; the text names parameters and what to do.
    """
    changed = changed_after_load(model)
    if changed is None:
        raise RejectedError(
            "vLLM loaded this model by a way that deltarefit did not see, so its weights may be packed: expected a loader "
            "derived from BaseModelLoader, in a process that ran "
            "the vllm.general_plugins entry point 'deltarefit' (see VLLM_PLUGINS)"
        )
    found = list(dict.fromkeys([*changed, *_packed_copies(dict(model.named_modules()))]))
    if found:
        lines = some_of(found, _SHOWN, joint="\n  ")
        raise RejectedError(
            f"{len(found)} weights of this vLLM model are not in the layout that its loader writes, so they cannot be "
            f"refitted in place:\n  {lines}\n"
            f"On CPU: unset {KEEP_PREPACK}, and keep moe_intermediate_size / tensor_parallel_size a multiple of 32. "
            "On other platforms: choose a kernel backend that keeps the checkpoint's layout, such as Triton for experts"
        )
