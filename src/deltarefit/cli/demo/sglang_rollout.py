"""A real SGLang engine behind the demo's face."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deltarefit
from deltarefit.cli.demo.state import write_state

__all__ = ["SglangRollout"]


class SglangRollout:
    """An SGLang ``Engine`` of this process; its model lives in a process of the engine's."""

    def __init__(self, checkpoint: str, completion_tokens: int) -> None:
        import importlib

        import sglang
        from deltarefit.testing.sglang_cpu import ENGINE_OPTIONS

        integration: Any = importlib.import_module("deltarefit.integrations.sglang")
        self._completion_tokens = completion_tokens
        self._engine: Any = sglang.Engine(model_path=checkpoint, custom_weight_loader=[integration.LOADER], **ENGINE_OPTIONS)
        self.note = f"SGLang {sglang.__version__}, on the CPU, with deltarefit's plug-in"

    def attach(self, name: str, run: str, lease_s: float) -> deltarefit.Receiver:
        settings = deltarefit.ReceiverAgentSettings(lease_s=lease_s)
        return deltarefit.Receiver.attach(self._engine, run=run, name=name, settings=settings)

    def complete(
        self, prompts: Sequence[Sequence[int]], *, count: int, seed: int | None
    ) -> tuple[list[list[list[int]]], list[list[float]]]:
        """One prompt after the other: which requests share a batch would depend on timing, and a batch's rounding on that."""
        groups = [self._complete_one(prompt, count, is_greedy=seed is None) for prompt in prompts]
        tokens = [[[int(token) for token in answer["output_ids"]] for answer in group] for group in groups]
        logprobs = [[float(entry[0]) for entry in group[0]["meta_info"]["output_token_logprobs"]] for group in groups]
        return tokens, logprobs

    def _complete_one(self, prompt: Sequence[int], count: int, *, is_greedy: bool) -> list[Any]:
        sampling = {
            "n": count,
            "temperature": 0.0 if is_greedy else 1.0,
            "max_new_tokens": self._completion_tokens,
            "ignore_eos": True,
        }
        answer = self._engine.generate(input_ids=list(prompt), sampling_params=sampling, return_logprob=True)
        return answer if isinstance(answer, list) else [answer]

    def dump(self, directory: Path) -> None:
        """What SGLang itself saves of the model that it serves: every parameter and every buffer that a checkpoint may hold."""
        with tempfile.TemporaryDirectory(prefix="deltarefit-demo-state-") as saved:
            self._engine.save_sharded_model(path=saved, pattern=None, max_size=None)
            write_state(directory, _stored(sorted(Path(saved).iterdir())))

    def close(self) -> None:
        self._engine.shutdown()


def _stored(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    from safetensors import safe_open

    from deltarefit.bits import logical_words

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                yield f"{path.name} {name}", logical_words(file.get_tensor(name)).tobytes()
