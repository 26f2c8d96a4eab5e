"""One rollout process of the demo: an engine that generates, and a Receiver that refits it in place.

Started as ``python -m deltarefit.cli.demo.rollout <name> <options as JSON>``. The oracle is the same program without a
receiver: it loads every candidate afresh and shows what a full reload leaves.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec

import deltarefit
from deltarefit.cli.demo import wire
from deltarefit.cli.demo.engines import open_engine
from deltarefit.cli.demo.options import RolloutOptions
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.events import StageEvent

__all__ = ["main"]

_JOIN_S = 240.0


class Engine(Protocol):
    """What the demo asks of an engine, real or not."""

    note: str

    def attach(self, name: str, run: str, lease_s: float) -> deltarefit.Receiver: ...

    def complete(
        self, prompts: list[list[int]], *, count: int, seed: int | None
    ) -> tuple[list[list[list[int]]], list[list[float]]]:
        """Completions per prompt, and the log-probabilities of each prompt's first one; greedy without a seed."""

    def dump(self, directory: Path) -> None:
        """Write every parameter and buffer as raw bytes."""

    def close(self) -> None: ...


class Rollout:
    """Answers the parent's requests; the receiver works in a thread of its own, and the request gate keeps them apart."""

    def __init__(self, name: str, options: RolloutOptions) -> None:
        self._options = options
        self._clock = SystemClock()
        self._engine: Any = open_engine(options.engine, options.checkpoint, options.completion_tokens)
        self._receiver = self._engine.attach(name, options.run, options.lease_s) if options.run else None
        self._is_doomed = False
        if self._receiver is not None:
            self._receiver.subscribe(self._hear)

    @property
    def note(self) -> str:
        return str(self._engine.note)

    def answer(self, message: wire.Any) -> wire.Any:
        if isinstance(message, wire.Generate):
            return self._generate(message)
        if isinstance(message, wire.Inspect):
            return self._inspect(message)
        if isinstance(message, wire.DieInRefit):
            self._is_doomed = True
            return wire.Armed()
        if isinstance(message, wire.AwaitJoined):
            if self._receiver is not None:
                self._receiver.wait_joined(_JOIN_S)
            return wire.Joined()
        return wire.Stopped()

    def _hear(self, event: StageEvent) -> None:
        """A stage of a refit ended here. If this engine is to die in the middle of one, the time has come."""
        if self._is_doomed and event.stage == "apply":
            os.kill(os.getpid(), signal.SIGKILL)

    def _generate(self, order: wire.Generate) -> wire.Generated:
        receiver = self._receiver
        if receiver is None:
            raise deltarefit.RejectedError("the oracle generates only when it is inspected")
        with receiver.serving():
            completions, _ = self._engine.complete(order.prompts, count=order.group, seed=order.seed)
            return wire.Generated(completions, receiver.policy_version)

    def _inspect(self, order: wire.Inspect) -> wire.Inspected:
        start_s = self._clock.monotonic_s()
        if self._receiver is None:
            self._reload(order.checkpoint)
            shown = self._show(order, -1)
        else:
            with self._receiver.serving():
                shown = self._show(order, self._receiver.policy_version)
        return msgspec.structs.replace(shown, seconds=self._clock.monotonic_s() - start_s)

    def _show(self, order: wire.Inspect, policy_version: int) -> wire.Inspected:
        self._engine.dump(Path(order.directory))
        tokens, logprobs = self._engine.complete(order.prompts, count=1, seed=None)
        return wire.Inspected([group[0] for group in tokens], logprobs, policy_version, 0.0)

    def _reload(self, checkpoint: str) -> None:
        """A fresh engine on the candidate: nothing of the old one survives."""
        self._engine.close()
        self._engine = open_engine(self._options.engine, checkpoint, self._options.completion_tokens)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._engine.close()


def main(arguments: list[str]) -> int:
    import torch

    name, options = arguments[0], msgspec.json.decode(arguments[1], type=RolloutOptions)
    torch.set_num_threads(options.threads)
    link = wire.connect("the demo")
    try:
        rollout = Rollout(name, options)
        link.send(wire.Hello(name, rollout.note))
        while True:
            message = link.receive(timeout_s=600.0)
            answer = rollout.answer(message)
            if isinstance(message, wire.Stop):
                rollout.close()
            link.send(answer)
            if isinstance(message, wire.Stop):
                return 0
    except Exception as error:
        link.send(wire.Failed(type(error).__name__, str(error)))
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
