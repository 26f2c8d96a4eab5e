"""The demo's engines behind one face: real vLLM or SGLang, or a transformers model behind an engine-like loader."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deltarefit
from deltarefit.cli.demo.state import write_state
from deltarefit.errors import RejectedError

__all__ = ["engine_or_fallback", "ensure_source", "open_engine"]

_REAL = {
    "vllm": "vLLM is not installed in this environment; run `make install`",
    "sglang": "SGLang is not installed in this environment; run `make demo ENGINE=sglang`, which builds one that has it",
}
"""Engines that are packages, and what to do if they are missing."""

Completions = tuple[list[list[list[int]]], list[list[float]]]


def engine_or_fallback(wanted: str) -> tuple[str, str]:
    """The engine to use, and a sentence about why where it is not the obvious one.

    Raises:
        RejectedError: the wanted engine is not installed.
    """
    if missing := [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]:
        raise RejectedError(
            f"the demo trains a transformers model with torch, and {', '.join(missing)} cannot be imported here; run "
            "`make demo` in a checkout, or install deltarefit[transformers,cli]"
        )
    if wanted == "auto":
        if (found := next((name for name in _REAL if importlib.util.find_spec(name) is not None), None)) is not None:
            return found, ""
        return (
            "torch",
            "Neither vLLM nor SGLang is installed: a transformers model behind a loader that fuses as engines do stands in.",
        )
    if wanted in _REAL and importlib.util.find_spec(wanted) is None:
        raise RejectedError(f"engine {wanted}: {_REAL[wanted]}, or use --engine torch")
    note = "" if wanted in _REAL else "The engines are transformers models behind a loader that fuses as engines do, not vLLM."
    return wanted, note


def ensure_source(source: str) -> None:
    """Raises:
    RejectedError: the trainers' framework is not installed.
    """
    if source == "megatron" and not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.bridge")):
        raise RejectedError(
            "source megatron: megatron-bridge is not installed in this environment; run `make megatron`, then "
            ".venv-megatron/bin/deltarefit demo --source megatron"
        )


def open_engine(engine: str, checkpoint: str, completion_tokens: int) -> Any:
    """Start an engine with the checkpoint's weights."""
    if engine == "vllm":
        return VllmRollout(checkpoint, completion_tokens)
    if engine == "sglang":
        from deltarefit.cli.demo.sglang_rollout import SglangRollout

        return SglangRollout(checkpoint, completion_tokens)
    return TorchRollout(checkpoint, completion_tokens)


class TorchRollout:
    """A transformers model with a fusing loader."""

    def __init__(self, checkpoint: str, completion_tokens: int) -> None:
        from deltarefit.cli.demo.torch_engine import TorchEngine

        self._engine = TorchEngine(checkpoint)
        self._completion_tokens = completion_tokens
        self.note = "a transformers model behind a fusing loader"

    def attach(self, name: str, run: str, lease_s: float) -> deltarefit.Receiver:
        settings = deltarefit.ReceiverAgentSettings(lease_s=lease_s)
        return deltarefit.Receiver.attach(
            self._engine.model, load_weights=self._engine.load_weights, run=run, name=name, settings=settings
        )

    def complete(self, prompts: Sequence[Sequence[int]], *, count: int, seed: int | None) -> Completions:
        return self._engine.complete(prompts, count=count, max_tokens=self._completion_tokens, seed=seed)

    def dump(self, directory: Path) -> None:
        write_state(directory, _torch_state(self._engine.model))

    def close(self) -> None:
        """Nothing outlives the object."""


class VllmRollout:
    """A real vLLM engine in this process."""

    def __init__(self, checkpoint: str, completion_tokens: int) -> None:
        import vllm

        self._vllm = vllm
        self._completion_tokens = completion_tokens
        self._llm: Any = vllm.LLM(
            model=checkpoint,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=16,
            gpu_memory_utilization=0.05,  # the check of free host memory, not an allocation; several engines share this host
            dtype="bfloat16",
            disable_log_stats=True,
            distributed_executor_backend="uni",
            weight_transfer_config={"backend": "deltarefit"},
        )
        self.note = f"vLLM {vllm.__version__}, on the CPU, backend deltarefit"

    def attach(self, name: str, run: str, lease_s: float) -> deltarefit.Receiver:
        settings = deltarefit.ReceiverAgentSettings(lease_s=lease_s)
        return deltarefit.Receiver.attach(self._llm, run=run, name=name, settings=settings)

    def complete(self, prompts: Sequence[Sequence[int]], *, count: int, seed: int | None) -> Completions:
        sampling = self._vllm.SamplingParams(
            n=count,
            seed=seed,
            temperature=0.0 if seed is None else 1.0,
            max_tokens=self._completion_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        tokens = [[list(completion.token_ids) for completion in output.outputs] for output in outputs]
        return tokens, [_chosen_logprobs(output.outputs[0]) for output in outputs]

    def dump(self, directory: Path) -> None:
        """The engine lives in this process, so its model can be read directly."""
        (states,) = self._llm.apply_model(_torch_state_list)
        write_state(directory, states)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _chosen_logprobs(completion: Any) -> list[float]:
    """Exact log-probabilities of the chosen tokens."""
    return [position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def _torch_state_list(model: Any) -> list[tuple[str, bytes]]:
    return list(_torch_state(model))


def _torch_state(model: Any) -> Iterator[tuple[str, bytes]]:
    from deltarefit.bits import logical_words

    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            yield f"{kind} {name}", logical_words(tensor).tobytes()
