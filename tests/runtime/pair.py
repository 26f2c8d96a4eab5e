"""A tiny trainer and its rollout models in one process, joined through a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch

import deltarefit
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.testing.collective import run_ranks
from deltarefit.transport import PayloadSender

SETTINGS = deltarefit.PublisherSettings(
    join_timeout_s=20.0, reply_timeout_s=20.0, lease_s=5.0, retry_pause_s=0.01, scan_threads=1
)
RECEIVER_SETTINGS = deltarefit.ReceiverAgentSettings(lease_s=5.0, poll_s=0.01)


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Return once it holds; whoever waits for what does not come has found a fault."""
    clock = SystemClock()
    deadline = Deadline(clock, timeout_s)
    while not condition():
        assert not deadline.expired, "waited in vain"
        clock.sleep(0.01)


class Policy(torch.nn.Module):
    """Two layers and a buffer that checkpoints carry."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(24, 16, generator=generator).bfloat16())
        self.second = torch.nn.Parameter(torch.randn(8, 24, generator=generator).bfloat16())
        self.register_buffer("scale", torch.ones(8))


class Fused(torch.nn.Module):
    """The rollout side: both layers in one flat storage, loaded by name as engines do."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(24 * 16 + 8 * 24, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.zeros(8))
        self.load_weights(policy.state_dict().items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            home = {"first": self.fused.data[: 24 * 16].view(24, 16), "second": self.fused.data[24 * 16 :].view(8, 24)}
            (self.scale if name == "scale" else home[name]).copy_(tensor)


def perturb(policy: Policy, seed: int, fraction: float = 0.05) -> None:
    """Move some elements of every tensor by about 1 %, and at least one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.state_dict().values():
            chosen = torch.rand(tensor.shape, generator=generator) < fraction
            chosen.view(-1)[seed % chosen.numel()] = True
            tensor[chosen] = (tensor[chosen].float() * 1.02 + 0.01).to(tensor.dtype)


def raw(module: torch.nn.Module) -> dict[str, bytes]:
    """Raw bytes of every parameter and buffer."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in named}


def dense_reload(policy: Policy) -> dict[str, bytes]:
    """The oracle: what a fresh rollout model holds after loading everything."""
    return raw(Fused(policy))


class Pair:
    """One trainer of one rank, and its receivers."""

    def __init__(self, directory: Path, num_receivers: int = 1) -> None:
        self.run = (directory / "run").as_uri()
        self.policy = Policy()
        self.models = [Fused(self.policy) for _ in range(num_receivers)]
        self.stack = ExitStack()
        self.receivers = [self.attach(model, f"rollout-{i}") for i, model in enumerate(self.models)]

    def attach(self, model: Fused, name: str, **options: object) -> deltarefit.Receiver:
        options.setdefault("settings", RECEIVER_SETTINGS)
        receiver = deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=self.run, name=name, **options)
        return self.stack.enter_context(receiver)

    def publisher(self, **options: object) -> deltarefit.Publisher:
        settings = options.pop("settings", SETTINGS)
        return self.stack.enter_context(deltarefit.Publisher(self.policy, run=self.run, settings=settings, **options))

    def refit_at_once(self, publisher: deltarefit.Publisher, count: int) -> None:
        """The run's first refits: each takes one attempt and ends bit for bit."""
        for step in range(count):
            perturb(self.policy, step)
            report = publisher.refit()
            assert (report.policy_version, report.attempts) == (step + 1, 1)
            self.assert_equal()

    def assert_equal(self) -> None:
        expected = dense_reload(self.policy)
        for model in self.models:
            assert raw(model) == expected

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stack.close()


def refit_on_ranks(
    world_size: int,
    run: str,
    policies: Sequence[Policy],
    steps: int,
    wrap: Callable[[int, PayloadSender], PayloadSender] | None = None,
    settings: deltarefit.PublisherSettings = SETTINGS,
) -> list[list[deltarefit.RefitReport]]:
    """Several data-parallel ranks, each a thread: perturb and refit ``steps`` times."""

    def rank_main(collective: object) -> list[deltarefit.RefitReport]:
        rank = collective.rank
        wrapped = None if wrap is None else (lambda sender: wrap(rank, sender))
        with deltarefit.Publisher(
            policies[rank], run=run, settings=settings, collective=collective, wrap_sender=wrapped
        ) as publisher:
            reports = []
            for step in range(steps):
                perturb(policies[rank], step)
                reports.append(publisher.refit())
            return reports

    return run_ranks(world_size, rank_main)
