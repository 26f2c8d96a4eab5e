"""One trainer rank of the demo: a model in one of three frameworks, a GRPO-style step, and a Publisher.

Started as ``python -m deltarefit.cli.demo.trainer <rank> <world size> <options as JSON>``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import deltarefit
from deltarefit.cli.demo import wire
from deltarefit.cli.demo.options import TrainerOptions
from deltarefit.cli.demo.sources import open_trained
from deltarefit.ids import PayloadId
from deltarefit.testing.faults import CorruptingSender

__all__ = ["main"]


class Trainer:
    """The model, its optimizer and its publisher on one rank."""

    def __init__(self, rank: int, world_size: int, options: TrainerOptions) -> None:
        self._rank = rank
        self._world_size = world_size
        self._corrupt_next = False
        self._faults = 0
        self.trained = open_trained(options.source, options.checkpoint, options.learning_rate)
        self.publisher = deltarefit.Publisher(
            self.trained.model,
            run=options.run,
            settings=deltarefit.PublisherSettings(min_receivers=options.min_receivers, lease_s=options.lease_s),
            wrap_sender=lambda sender: CorruptingSender(sender, self._corrupt_now),
            **self.trained.options,
        )

    def _corrupt_now(self, payload_id: PayloadId) -> bool:
        """Rank 1's payload follows rank 0's in declared order: engines have applied something when they meet it."""
        if self._corrupt_next and payload_id.owner == self._world_size - 1:
            self._corrupt_next = False
            self._faults += 1
            return True
        return False

    def train(self, order: wire.Train) -> wire.Trained:
        """One optimizer step, one refit."""
        loss = self._step(order.completions[self._rank :: self._world_size])
        self._corrupt_next = order.corrupt
        faults_before = self._faults
        # The oracle's copy goes through the framework's own export, not through our pieces.
        self.trained.save(Path(order.candidate_directory))
        report = self.publisher.refit()
        return wire.Trained(msgspec.json.encode(report), loss, self._faults - faults_before)

    def _step(self, completions: list[wire.Completion]) -> float:
        """Policy-gradient loss on this rank's share, and an optimizer step on the average over ranks."""
        tokens = torch.tensor([c.prompt + c.tokens for c in completions])
        start = len(completions[0].prompt)
        logits = self.trained.logits(tokens)[:, start - 1 : -1]
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, start:, None]).squeeze(-1)
        weights = torch.tensor([c.advantage for c in completions])[:, None]
        loss = -(weights * chosen).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.trained.step()
        return float(loss.detach())


def serve(trainer: Trainer, link: wire.Link) -> None:
    """Do what the parent says until it says stop."""
    while True:
        message = link.receive(timeout_s=600.0)
        if not isinstance(message, wire.Train):
            return
        link.send(trainer.train(message))


def main(arguments: list[str]) -> int:
    rank, world_size = int(arguments[0]), int(arguments[1])
    options = msgspec.json.decode(arguments[2], type=TrainerOptions)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    link = wire.connect("the demo")
    dist.init_process_group("gloo", init_method=Path(options.rendezvous).as_uri(), rank=rank, world_size=world_size)
    try:
        trainer = Trainer(rank, world_size, options)
        link.send(wire.Hello(f"trainer-{rank}", trainer.trained.note))
        serve(trainer, link)
        trainer.publisher.close()
        link.send(wire.Stopped())
    except Exception as error:
        link.send(wire.Failed(type(error).__name__, str(error)))
        raise
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
