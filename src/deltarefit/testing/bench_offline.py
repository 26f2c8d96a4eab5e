"""Bytes and seconds of the offline tool beside tools that know no tensors, on a model that is trained here.

The pair is a small Llama (56 million parameters, 113 MB in bf16), randomly initialised and trained by AdamW with fp32
master weights at learning rate 1e-6, as reinforcement learning does; checkpoints are its bf16 weights, saved by transformers.
Every tool runs as a process of its own, start-up included. torch and transformers are imported only to make the pair.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.offline import diff_checkpoints

__all__ = ["make_checkpoints", "run"]

LEARNING_RATE = 1e-6
"""What reinforcement learning of language models uses (paper 2.2)."""


def make_checkpoints(directory: Path, steps: Sequence[int], *, seed: int = 0, warm_up_steps: int = 8) -> list[Path]:
    """Train and save a checkpoint after each of these numbers of steps, ascending; each a directory with one safetensors file.

    ``warm_up_steps`` are taken before step 0, so that AdamW's moments are those of a run under way.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    saved = []
    for step in range(-warm_up_steps, steps[-1] + 1):
        if step in steps:
            saved.append(_save(model, directory / f"step{step}"))
        tokens = torch.randint(0, 32000, (4, 128), generator=generator)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return saved


def _save(model: Any, path: Path) -> Path:
    """The bf16 weights; the model keeps its fp32 masters."""
    import copy

    import torch

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(path)
    return path


@dataclass(frozen=True, slots=True)
class _Tool:
    """How one tool makes a delta and applies it. Words in braces are paths."""

    name: str
    make: Sequence[str]
    use: Sequence[str]
    is_long: bool = False
    """Tens of seconds: measured once, not in every round."""
    is_slow: bool = False
    """Minutes: measured once, and only if asked for."""

    def command(self, words: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
        return [word.format(**{key: str(path) for key, path in paths.items()}) for word in words]


_OURS = (sys.executable, "-c", "from deltarefit.cli import main; main()")


def _tools(nbytes: int) -> list[_Tool]:
    """All tools, with windows as large as the file, without which the others find next to nothing."""
    window_log = f"--long={max(27, nbytes.bit_length())}"
    tools = [
        _Tool(
            f"deltarefit {encoding}",
            (*_OURS, "diff", "{old}", "{new}", "-o", "{delta}", "--encoding", encoding),
            (*_OURS, "apply", "{old}", "{delta}", "-o", "{out}"),
        )
        for encoding in ("difference", "xor", "overwrite")
    ]
    if shutil.which("zstd"):
        tools += [
            _Tool(
                f"zstd -{level} --patch-from",
                ("zstd", "-q", f"-{level}", "-T0", window_log, "--patch-from={old}", "{new}", "-o", "{delta}"),
                ("zstd", "-q", "-d", window_log, "--patch-from={old}", "{delta}", "-o", "{out}"),
                is_slow=level == 19,
            )
            for level in (3, 19)
        ]
        tools.append(
            _Tool(
                "zstd -3 of NEW",
                ("zstd", "-q", "-3", "-T0", "{new}", "-o", "{delta}"),
                ("zstd", "-q", "-d", "{delta}", "-o", "{out}"),
            )
        )
    if shutil.which("xdelta3"):
        source = ("-B", str(nbytes), "-s", "{old}")
        tools.append(
            _Tool(
                "xdelta3",
                ("xdelta3", "-e", *source, "{new}", "{delta}"),
                ("xdelta3", "-d", *source, "{delta}", "{out}"),
                is_long=True,
            )
        )
    return tools


class _Cost(msgspec.Struct, frozen=True):
    wall_s: float
    cpu_s: float
    peak_nbytes: int


_RUNNER = """
import json, os, sys, time
began = time.monotonic()
pid = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps({"wall_s": time.monotonic() - began, "cpu_s": cpu, "peak_nbytes": usage.ru_maxrss * 1024}))
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Measures one command from a small process: a peak also counts what the starting process held, and ours holds torch."""


def _measure(command: Sequence[str]) -> _Cost:
    done = subprocess.run([sys.executable, "-I", "-c", _RUNNER, *command], capture_output=True, check=False)
    if done.returncode:
        raise RejectedError(f"bench: {' '.join(command)} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=_Cost)


def run(
    *, steps: Sequence[int] = (0, 1, 16), rounds: int = 3, slow: bool = False, directory: Path | None = None
) -> dict[str, Any]:
    """Make the checkpoints and measure every tool on the first against each later one.

    Args:
        steps: training steps after which a checkpoint is saved; the first is OLD, the others are NEW in turn.
        rounds: the tools take turns so often; medians are reported.
        slow: also measure, once, what takes minutes.
        directory: where to work and keep the checkpoints; else a temporary one.

    Returns:
        ``{"rows": [{"steps", "change_rate", "tool", "nbytes", "share", "diff_s", "diff_cpu_s", "diff_peak_nbytes", "apply_s",
        "apply_cpu_s", "apply_peak_nbytes"}]}``; ``share`` is of NEW's bytes.
    """
    with TemporaryDirectory(prefix="deltarefit-bench-") as temporary:
        work = directory or Path(temporary)
        paths = [work / f"step{step}" for step in steps]
        if not all(path.exists() for path in paths):
            make_checkpoints(work, steps)
        old = paths[0] / "model.safetensors"
        rows = []
        for step, path in zip(steps[1:], paths[1:], strict=True):
            rows += _compare(old, path / "model.safetensors", step - steps[0], rounds, slow, Path(temporary))
        return {"rows": rows}


def _compare(old: Path, new: Path, num_steps: int, rounds: int, slow: bool, work: Path) -> list[dict[str, Any]]:
    report = diff_checkpoints(old, new, work / "count", replace=True)
    tools = [tool for tool in _tools(new.stat().st_size) if slow or not tool.is_slow]
    costs: dict[str, list[tuple[_Cost, _Cost]]] = {tool.name: [] for tool in tools}
    nbytes: dict[str, int] = {}
    for turn in range(rounds):
        for tool in tools:
            if turn and (tool.is_slow or tool.is_long):
                continue
            paths = {"old": old, "new": new, "delta": work / "delta", "out": work / "out"}
            for name in ("delta", "out"):
                paths[name].unlink(missing_ok=True)
            made = _measure(tool.command(tool.make, paths))
            used = _measure(tool.command(tool.use, paths))
            if paths["out"].read_bytes() != new.read_bytes():
                raise RejectedError(f"bench: {tool.name} does not give NEW back")
            costs[tool.name].append((made, used))
            nbytes[tool.name] = paths["delta"].stat().st_size
    return [
        {
            "steps": num_steps,
            "change_rate": report.num_sent / report.num_words,
            "tool": tool.name,
            "nbytes": nbytes[tool.name],
            "share": nbytes[tool.name] / new.stat().st_size,
            **_medians("diff", [made for made, _ in costs[tool.name]]),
            **_medians("apply", [used for _, used in costs[tool.name]]),
        }
        for tool in tools
    ]


def _medians(stage: str, costs: Sequence[_Cost]) -> dict[str, float]:
    return {
        f"{stage}_s": statistics.median(cost.wall_s for cost in costs),
        f"{stage}_cpu_s": statistics.median(cost.cpu_s for cost in costs),
        f"{stage}_peak_nbytes": max(cost.peak_nbytes for cost in costs),
    }
