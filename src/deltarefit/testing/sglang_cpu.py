"""SGLang on a CPU without its compiled kernels: what is put in place of three packages, and why. For tests and the demo only.

SGLang 0.5.23 imports three packages at module level although its CPU code never calls them for the models used here. Where one
of them is not installed it becomes an inert module, made by SGLang's own ``_platform_stubs`` (which it ships for Apple
machines); a package that is installed is left alone. No function or class of SGLang is replaced.

=================  ==================================================================================================
``triton``         imported everywhere for GPU kernels. The real package (1 GB) has no CPU back end.
``torchvision``    imported by one image model's configuration; its wheel does not fit torch's CPU build.
``sgl_kernel``     imported by a KV-cache helper as soon as the platform is a CPU; no CPU wheel of it is published.
                   ``sgl_kernel.scalar_type`` stays missing, because SGLang has a fallback for that one.
=================  ==================================================================================================

A forward pass that needs a missing kernel raises (``torch.ops.sgl_kernel`` has no such operation); it never computes with a
stand-in. What runs: Qwen3 and Qwen3-MoE engines with ``attention_backend="torch_native"``, and every bare model's loader.

SGLang starts its scheduler in new processes, so this must run in those too: ``make sglang`` writes one line into the
environment's ``site-packages`` that calls ``prepare`` when Python starts.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ENGINE_OPTIONS", "is_installed", "prepare", "server_arguments"]

STUBS = ("triton", "torchvision", "sgl_kernel")
_OWN_FALLBACK = "sgl_kernel.scalar_type"
_ENVIRONMENT: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}

ENGINE_OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 512,
    "log_level": "error",
}
"""Arguments of ``sglang.Engine`` with which tiny models generate on a CPU."""


def server_arguments() -> list[str]:
    """The same for ``sglang.launch_server``."""
    arguments: list[str] = []
    for name, value in ENGINE_OPTIONS.items():
        arguments.append(f"--{name.replace('_', '-')}")
        if value is not True:
            arguments.append(str(value))
    return arguments


def is_installed() -> bool:
    """Whether SGLang is there."""
    return importlib.util.find_spec("sglang") is not None


def prepare() -> None:
    """Have the stand-ins put in place as soon as somebody imports SGLang in this process. Cheap; may be called again."""
    if not any(isinstance(finder, _OnFirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnFirstImport())


class _OnFirstImport(importlib.abc.MetaPathFinder):
    """Waits for ``import sglang``; until then nothing of torch or SGLang is touched."""

    def __init__(self) -> None:
        self._is_done = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        del path, target
        if not fullname.startswith("sglang.") and fullname != "sglang":
            return None
        if not self._is_done and not _is_only_looked_for():
            self._is_done = True
            _install()
        return None  # found where it is installed, by the finders after this one


def _is_only_looked_for() -> bool:
    """Whether this is ``importlib.util.find_spec`` asking, and nobody imports anything."""
    frame: Any = sys._getframe(2)
    while frame is not None and "importlib._bootstrap" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


class _Stubs(importlib.abc.MetaPathFinder):
    """Answers for the packages that are absent, with inert modules."""

    def __init__(self, absent: tuple[str, ...], platform_stubs: Any) -> None:
        self._absent = absent
        self._make: Any = platform_stubs._make_mock

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        del path, target
        if fullname.partition(".")[0] not in self._absent:
            return None
        if fullname == _OWN_FALLBACK:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        module = sys.modules.get(fullname) or self._make(fullname)
        parent, _, child = fullname.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)
        return module.__spec__


def _install() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    absent = tuple(name for name in STUBS if importlib.util.find_spec(name) is None)
    _let_others_decide()
    stubs = _platform_stubs()
    sys.meta_path.insert(0, _Stubs(absent, stubs))
    if "triton" in absent:
        _complete_triton(stubs)
    if "torchvision" in absent:
        stubs._make_mock("torchvision").__version__ = "0.0"


def _let_others_decide() -> None:
    """Torch and transformers look once whether these packages are there; they must look before anything stands in for them."""
    for name in ("torch._inductor.compile_fx", "torch.utils.flop_counter"):
        importlib.import_module(name)
    from torch.utils import _triton
    from transformers.utils import import_utils

    _triton.has_triton_package()
    _triton.has_triton()
    for name in ("is_torchvision_available", "is_triton_available", "is_torchvision_v2_available"):
        getattr(import_utils, name, bool)()


def _platform_stubs() -> Any:
    """SGLang's own module of stand-ins, loaded from its file: importing the package would need them already."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    path = f"{found.submodule_search_locations[0]}/_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path}: this SGLang has no such module; expected 0.5.23", name="sglang._platform_stubs")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _complete_triton(stubs: Any) -> None:
    """The few names of Triton that SGLang uses while it is imported, as its own stand-ins for Apple machines define them."""
    triton, language = stubs._make_mock("triton"), stubs._make_mock("triton.language")
    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    triton.language = language
    language.constexpr = type("constexpr", (), {"__init__": _set_value})


def _set_value(self: Any, value: Any = None) -> None:
    self.value = value
