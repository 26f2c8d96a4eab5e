"""The demo's parent: starts the processes, passes prompts and completions, compares every bit."""

from __future__ import annotations

import random
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Listener
from pathlib import Path

import msgspec

from deltarefit.cli.demo import task, wire
from deltarefit.cli.demo.ending import Ending
from deltarefit.cli.demo.options import RolloutOptions, TrainerOptions
from deltarefit.cli.demo.processes import Child, start_child
from deltarefit.cli.demo.state import Difference, compare, read_state
from deltarefit.errors import AttemptFailedError
from deltarefit.runtime.report import RefitReport

__all__ = ["DemoOptions", "DemoResult", "Refit", "run_demo"]

TRAINERS = 2
ENGINES = 2
PROMPTS = 4
"""Prompts per step over all engines."""
_START_TIMEOUT_S = 300.0
_LEASE_S = 10.0
_KILL_LEASE_S = 5.0
"""With ``--kill`` a refit waits for this long before it goes on without the dead engine."""
_STEP_TIMEOUT_S = 240.0

Say = Callable[[str], None]


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user can choose."""

    engine: str
    source: str = "torch"
    """What the trainers use: torch, fsdp or megatron."""
    steps: int
    learning_rate: float
    directory: Path
    seed: int = 0
    corrupt_step: int = 3
    """The refit (from 1) of which one payload is damaged in transit."""
    kill: bool = False
    """Kill one engine in the middle of every other refit."""

    def victim(self, step: int) -> int | None:
        """The engine that dies in this refit. None in the last one: who dies there cannot come back."""
        return (step // 2 - 1) % ENGINES if self.kill and step % 2 == 0 and step < self.steps else None


class Refit(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the result."""

    policy_version: int
    reward: float
    changed_fraction: float
    payload_nbytes: int
    checkpoint_nbytes: int
    stage_s: Mapping[str, float]
    refit_s: float
    attempts: int
    payload_damaged: bool
    bit_equal: bool
    """Every parameter and buffer of every engine has the bytes of a fresh load, and it generates the same."""
    compared_tensors: int
    compared_nbytes: int
    differing: tuple[str, ...] = ()
    receivers: tuple[str, ...] = ()
    """Engines that hold this version by this refit."""
    killed: str = ""
    """The engine that was killed with SIGKILL in the middle of it."""
    rejoined: tuple[str, ...] = ()
    """Engines that were restarted after a kill, and whose first refit this was."""


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    refits: tuple[Refit, ...]
    bit_equal: bool
    engine: str
    source: str
    note: str
    recovered_attempts: int
    kills: int
    rejoins: int


class _Cluster:
    """The running processes."""

    def __init__(
        self, trainers: Sequence[Child], engines: Sequence[Child], oracle: Child, restart: Callable[[str], Child]
    ) -> None:
        self.trainers = trainers
        self.engines = list(engines)
        self.oracle = oracle
        self.returning: set[str] = set()
        """Engines that were restarted and not refitted yet: they serve nothing."""
        self._restart = restart

    @property
    def all(self) -> list[Child]:
        return [*self.trainers, *self.engines, self.oracle]

    @property
    def serving(self) -> list[Child]:
        return [child for child in self.engines if child.role not in self.returning]

    def await_returning(self) -> None:
        """Wait until restarted engines take part in refits again."""
        for child in self.engines:
            if child.role in self.returning:
                child.link.send(wire.AwaitJoined())
                child.link.expect(wire.Joined, _START_TIMEOUT_S)

    def replace(self, number: int) -> None:
        """An engine is about to die: wait for that, and start it again from the first checkpoint."""
        child = self.engines[number]
        if (status := child.wait()) != -signal.SIGKILL:
            raise AttemptFailedError(f"{child.role} was to be killed, and ended with {status}; see {child.log}")
        child.close()
        self.returning.add(child.role)
        self.engines[number] = self._restart(child.role)


def run_demo(options: DemoOptions, engine: str, note: str, say: Say, ending: Ending) -> DemoResult:
    """Train, refit and check; see the package docstring.

    Raises:
        AttemptFailedError: a process of the demo failed; the text is its own, and names its log.
    """
    directory = options.directory
    checkpoint = _make_checkpoint(directory, say, ending)
    rng = random.Random(options.seed)
    refits: list[Refit] = []
    with ExitStack() as stack:
        cluster = _start(options, engine, checkpoint, stack, say, ending)
        for step in range(1, options.steps + 1):
            refit = _one_step(cluster, options, step, rng, say)
            refits.append(refit)
            say(_line(refit, options.steps))
        for child in cluster.all:
            child.link.send(wire.Stop())
        for child in cluster.all:
            child.link.expect(wire.Stopped, _STEP_TIMEOUT_S)
            child.wait()
    return DemoResult(
        refits=tuple(refits),
        bit_equal=bool(refits) and all(refit.bit_equal for refit in refits),
        engine=engine,
        source=options.source,
        note=note,
        recovered_attempts=sum(refit.attempts - 1 for refit in refits),
        kills=sum(bool(refit.killed) for refit in refits),
        rejoins=sum(len(refit.rejoined) for refit in refits if refit.bit_equal),
    )


def _make_checkpoint(directory: Path, say: Say, ending: Ending) -> Path:
    """A tiny Qwen3-MoE checkpoint, made in a process of its own so that the parent never imports torch."""
    path = directory / "checkpoint"
    with ExitStack() as stack:
        with ending.put_off():
            child = stack.enter_context(start_child("checkpoint", "checkpoint", [str(path)], {}, directory / "logs"))
        if child.wait() != 0:
            raise AttemptFailedError(child.obituary())
    say(f"checkpoint: a tiny Qwen3-MoE, bf16, {(path / 'model.safetensors').stat().st_size / 2**20:.2f} MiB, in {path}")
    return path


def _start(options: DemoOptions, engine: str, checkpoint: Path, stack: ExitStack, say: Say, ending: Ending) -> _Cluster:
    secret = secrets.token_hex(16)
    address = str(options.directory / "demo.sock")
    listener = stack.enter_context(Listener(address, family="AF_UNIX", authkey=secret.encode(), backlog=8))
    environment = {"DELTAREFIT_DEMO_SOCKET": address, "DELTAREFIT_DEMO_SECRET": secret}
    run = (options.directory / "run").as_uri()
    lease_s = _KILL_LEASE_S if options.kill else _LEASE_S
    trainer = TrainerOptions(
        options.source,
        str(checkpoint),
        run,
        str(options.directory / "rendezvous"),
        options.learning_rate,
        min_receivers=1 if options.kill else ENGINES,
        threads=1,
        lease_s=lease_s,
    )
    rollout = RolloutOptions(engine, str(checkpoint), run, task.COMPLETION_TOKENS, threads=1, lease_s=lease_s)
    say(f"starting {TRAINERS} trainer ranks ({options.source}, gloo), {ENGINES} {engine} engines and an oracle, each a process")

    begun: list[Child] = []

    def begin(role: str, module: str, *arguments: str) -> Child:
        with ending.put_off():
            begun.append(stack.enter_context(start_child(role, module, arguments, environment, options.directory / "logs")))
            stack.callback(_terminate, begun)  # all at once, before one after the other is waited for
        return begun[-1]

    oracle = msgspec.structs.replace(rollout, run="")
    children = [
        *(begin(f"engine-{i}", "rollout", f"engine-{i}", _json(rollout)) for i in range(ENGINES)),
        begin("oracle", "rollout", "oracle", _json(oracle)),
        *(begin(f"trainer-{i}", "trainer", str(i), str(TRAINERS), _json(trainer)) for i in range(TRAINERS)),
    ]
    _greet(listener, children, say)
    by_role = {child.role: child for child in children}

    def restart(role: str) -> Child:
        say(f"  {role} was killed; starting it again")
        child = begin(role, "rollout", role, _json(rollout))
        _greet(listener, [child], say)
        return child

    return _Cluster(
        [by_role[f"trainer-{i}"] for i in range(TRAINERS)],
        [by_role[f"engine-{i}"] for i in range(ENGINES)],
        by_role["oracle"],
        restart,
    )


def _terminate(children: Sequence[Child]) -> None:
    for child in children:
        child.terminate()


def _greet(listener: Listener, children: Sequence[Child], say: Say) -> None:
    """Give every child its link; a child that dies before it connects ends the demo with its log's last lines."""
    by_role = {child.role: child for child in children}
    links = [Child.accept(listener, children) for _ in children]  # all connect at once; then each loads its model
    for link in links:
        hello = link.expect(wire.Hello, _START_TIMEOUT_S)
        by_role[hello.role].adopt(link)
        say(f"  {hello.role}: {hello.note}")


def _one_step(cluster: _Cluster, options: DemoOptions, step: int, rng: random.Random, say: Say) -> Refit:
    completions, mean_reward = _generate(cluster, options, step, rng)
    corrupt = step == options.corrupt_step
    victim = options.victim(step)
    candidate = options.directory / "candidates" / str(step)
    cluster.await_returning()
    returned = tuple(sorted(cluster.returning))
    say(
        f"step {step}: reward {mean_reward:.3f}, training and refitting"
        + (", one payload will be damaged in transit" if corrupt else "")
        + (f", {cluster.engines[victim].role} will be killed in the middle" if victim is not None else "")
    )
    cluster.returning.clear()
    trained = _train(cluster, wire.Train(completions, corrupt, str(candidate)), victim)
    report = msgspec.json.decode(trained[0].report, type=RefitReport)
    rejoined = tuple(sorted((cluster.returning | set(returned)) & set(report.receivers)))
    cluster.returning.difference_update(report.receivers)  # who came back quickly took part in the retry
    damaged = sum(answer.faults_fired for answer in trained) > 0
    expected = tuple(sorted(child.role for child in cluster.serving))
    difference, same_text = _inspect(cluster, options, step, candidate, report.policy_version, rng)
    return Refit(
        policy_version=report.policy_version,
        reward=mean_reward,
        changed_fraction=report.changed_fraction,
        payload_nbytes=report.payload_nbytes,
        checkpoint_nbytes=report.checkpoint_nbytes,
        stage_s=report.stage_s,
        refit_s=report.refit_s,
        attempts=report.attempts,
        payload_damaged=damaged,
        bit_equal=difference.is_equal and same_text and damaged == corrupt and report.receivers == expected,
        compared_tensors=difference.tensors,
        compared_nbytes=difference.nbytes,
        differing=difference.differing,
        receivers=report.receivers,
        killed=cluster.engines[victim].role if victim is not None else "",
        rejoined=rejoined,
    )


def _train(cluster: _Cluster, order: wire.Train, victim: int | None) -> list[wire.Trained]:
    """One optimizer step and one refit on all trainer ranks; an engine may have to die in it."""
    if victim is not None:
        link = cluster.engines[victim].link
        link.send(wire.DieInRefit())
        link.expect(wire.Armed, _STEP_TIMEOUT_S)
    for child in cluster.trainers:
        child.link.send(order)
    if victim is not None:
        cluster.replace(victim)
    return [child.link.expect(wire.Trained, _STEP_TIMEOUT_S) for child in cluster.trainers]


def _generate(cluster: _Cluster, options: DemoOptions, step: int, rng: random.Random) -> tuple[list[wire.Completion], float]:
    """Completions from all engines that serve, with rewards and group advantages."""
    prompts = task.prompts(rng, PROMPTS, vocab_size=250)
    engines = cluster.serving
    shares = [prompts[i :: len(engines)] for i in range(len(engines))]
    for child, share in zip(engines, shares, strict=True):
        child.link.send(wire.Generate(share, task.GROUP, seed=options.seed * 1000 + step))
    completions: list[wire.Completion] = []
    for child, share in zip(engines, shares, strict=True):
        answer = child.link.expect(wire.Generated, _STEP_TIMEOUT_S)
        for prompt, group in zip(share, answer.completions, strict=True):
            rewards = [task.reward(tokens) for tokens in group]
            for tokens, reward, advantage in zip(group, rewards, task.advantages(rewards), strict=True):
                completions.append(wire.Completion(prompt, tokens, reward, advantage))
    return completions, sum(c.reward for c in completions) / len(completions)


def _inspect(
    cluster: _Cluster, options: DemoOptions, step: int, candidate: Path, policy_version: int, rng: random.Random
) -> tuple[Difference, bool]:
    """Compare every serving engine with a fresh load of the candidate: bytes of all state, greedy tokens, log-probabilities."""
    prompts = task.prompts(rng, 2, vocab_size=250)
    shown: list[wire.Inspected] = []
    directories: list[Path] = []
    inspected = [*cluster.serving, cluster.oracle]
    for child in inspected:
        directories.append(options.directory / "states" / f"{step}-{child.role}")
        child.link.send(wire.Inspect(str(candidate), str(directories[-1]), prompts))
    shown = [child.link.expect(wire.Inspected, _STEP_TIMEOUT_S) for child in inspected]
    expected = read_state(directories[-1])
    differences = [compare(read_state(directory), expected) for directory in directories[:-1]]
    differing = tuple(name for difference in differences for name in difference.differing)
    oracle = shown[-1]
    same = all(
        engine.tokens == oracle.tokens and engine.logprobs == oracle.logprobs and engine.policy_version == policy_version
        for engine in shown[:-1]
    )
    merged = Difference(differences[0].tensors, sum(d.nbytes for d in differences), differing)
    return merged, same


def _line(refit: Refit, steps: int) -> str:
    outcome = "bit-equal to a fresh load" if refit.bit_equal else f"NOT EQUAL: {', '.join(refit.differing[:3]) or 'generation'}"
    retried = f" after {refit.attempts} attempts" if refit.attempts > 1 else ""
    return (
        f"  refit {refit.policy_version} of {steps}: {refit.changed_fraction:.2%} changed, {refit.payload_nbytes:,} bytes "
        f"sent in {refit.refit_s:.2f} s{retried}, {outcome}"
    )


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
