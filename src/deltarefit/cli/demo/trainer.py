"""One data-parallel trainer rank of the demo: a transformers model, a GRPO-style step, and a Publisher.

Started as ``python -m deltarefit.cli.demo.trainer <rank> <world size> <options as JSON>``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import deltarefit
from deltarefit.cli.demo import wire
from deltarefit.cli.demo.options import TrainerOptions
from deltarefit.ids import PayloadId
from deltarefit.testing.faults import CorruptingSender

__all__ = ["main"]


class MasterAdamW:
    """AdamW on 32-bit master weights behind bf16 parameters, as RL trainers keep them.

    Updates far below one bf16 step add up in the master instead of being lost, so that a step changes about 1 % of the stored
    values (measured in the project's source study: 0.8 to 1.8 % at a learning rate of 1e-6).
    """

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self._parameters = parameters
        self._masters = [parameter.detach().float().clone() for parameter in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)


class Trainer:
    """The model, its optimizer and its publisher on one rank."""

    def __init__(self, rank: int, world_size: int, options: TrainerOptions) -> None:
        from transformers import AutoModelForCausalLM

        self._rank = rank
        self._world_size = world_size
        self._corrupt_next = False
        self._faults = 0
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            options.checkpoint, dtype=torch.bfloat16, experts_implementation="eager", attn_implementation="eager"
        )
        self._optimizer = MasterAdamW(list(self.model.parameters()), options.learning_rate)
        self.publisher = deltarefit.Publisher(
            self.model,
            run=options.run,
            settings=deltarefit.PublisherSettings(min_receivers=options.min_receivers, lease_s=options.lease_s),
            wrap_sender=lambda sender: CorruptingSender(sender, self._corrupt_now),
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
        if self._rank == 0:
            # The oracle's copy goes through transformers' own export, not through our pieces.
            self.model.save_pretrained(order.candidate_directory)
        report = self.publisher.refit()
        return wire.Trained(msgspec.json.encode(report), loss, self._faults - faults_before)

    def _step(self, completions: list[wire.Completion]) -> float:
        """Policy-gradient loss on this rank's share; gradients are averaged over ranks, so replicas stay bitwise equal."""
        self.model.train()
        tokens = torch.tensor([c.prompt + c.tokens for c in completions])
        start = len(completions[0].prompt)
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, start - 1 : -1].float()
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, start:, None]).squeeze(-1)
        weights = torch.tensor([c.advantage for c in completions])[:, None]
        loss = -(weights * chosen).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self._world_size
        self._optimizer.step()
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
        link.send(wire.Hello(f"trainer-{rank}", f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters, bf16"))
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
