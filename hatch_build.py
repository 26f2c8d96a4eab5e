"""Build hook: compiles the C++ kernels into the package. Without a compiler the package still works, on its numpy twins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/deltarefit/kernels/kernels.cpp")
TARGET = Path("src/deltarefit/kernels/_kernels.so")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror=return-type")


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        root = Path(self.root)
        target = root / TARGET
        if not self._compile(root / SOURCE, target):
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(target)] = "deltarefit/kernels/_kernels.so"

    def _compile(self, source: Path, target: Path) -> bool:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
        if compiler is None or not source.exists():
            self.app.display_warning("deltarefit: no C++ compiler found; installing with the slow numpy kernels")
            target.unlink(missing_ok=True)
            return False
        scratch = target.with_name(f"_kernels.{os.getpid()}.tmp")
        done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(scratch)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.app.display_warning(
                f"deltarefit: {compiler} failed; installing with the slow numpy kernels\n{done.stderr[-2000:]}"
            )
            scratch.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            return False
        scratch.replace(target)
        return True
