"""Build hook: compiles the C++ kernels into the package. Without a compiler the package still works, on its numpy twins.

In a checkout, ``python hatch_build.py`` compiles them in place (wanted after every change of the C++ sources).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    except ImportError:  # run by hand where hatchling is not installed
        BuildHookInterface = object

KERNELS = Path("src/deltarefit/kernels")
SOURCE = KERNELS / "kernels.cpp"
TARGET = KERNELS / "_kernels.so"
FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-s", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-Wall", "-Wextra", "-Werror=return-type",
)  # fmt: skip
"""No -march: the instruction set is chosen at run time. No exceptions: the library needs only libc."""


def compile_kernels(root: Path, warn: Callable[[str], object]) -> bool:
    """Compile the kernels below ``root`` in place. False, with a warning, if that cannot be done; an old library is removed."""
    target = root / TARGET
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None or not (root / SOURCE).exists():
        warn("deltarefit: no C++ compiler found; the slow numpy kernels will be used")
        target.unlink(missing_ok=True)
        return False
    scratch = target.with_name(f"_kernels.{os.getpid()}.tmp")
    command = [compiler, *FLAGS, str(root / SOURCE), "-o", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        warn(f"deltarefit: {compiler} failed; the slow numpy kernels will be used\n{done.stderr[-2000:]}")
        scratch.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        return False
    scratch.replace(target)
    return True


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        root = Path(self.root)
        if not compile_kernels(root, self.app.display_warning):
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(root / TARGET)] = "deltarefit/kernels/_kernels.so"


if __name__ == "__main__":
    sys.exit(0 if compile_kernels(Path(__file__).parent, print) else 1)
