"""Directs one case: starts its processes, strikes one of them, restarts what a supervisor would restart, and checks the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltarefit.errors import AttemptFailedError, DeadlineError, RefitError
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.runtime.messages import Membership, decode_message
from deltarefit.testing.kill_matrix.cases import NUM_RECEIVERS, NUM_TRAINERS, Case
from deltarefit.testing.kill_matrix.outcome import CaseResult, check_leftovers, check_served, check_shelf
from deltarefit.testing.kill_matrix.policy import Policy, Rollout, perturb, state_hash
from deltarefit.testing.kill_matrix.roles import ReceiverTask, RelayTask, Task, TrainerTask
from deltarefit.testing.kill_matrix.signs import Signs
from deltarefit.testing.kill_matrix.zygote import Zygote
from deltarefit.transport import keys, open_run, read_beacon

__all__ = ["Director"]

_STEP_S = 60.0
"""Longest time that any single thing may take: no case may hang beyond it."""
_STRUCK_STEP = 2
_LAST_STEP = 3
_RELAY_STOP_S = 12.0
"""Longer than the time after which owners take a relay for dead (``RelaySettings.dead_after_s``)."""


class Director:
    """One case."""

    def __init__(
        self, case: Case, directory: Path, run: str, *, zygote: Zygote, lease_s: float, environment: Mapping[str, str]
    ) -> None:
        directory.mkdir(parents=True)
        self._case = case
        self._directory = directory
        self._run = run
        self._zygote = zygote
        self._lease_s = lease_s
        self._environment = dict(environment)
        self._signs = Signs(directory)
        self._clock = SystemClock()
        self._pids: dict[str, int] = {}
        """Of the latest life of each role."""
        self._all: list[int] = []
        self._problems: list[str] = []
        self._lives = {f"rollout-{number}": 1 for number in range(NUM_RECEIVERS)}
        self._relays = {f"relay-{number}": 1 for number in range(NUM_RECEIVERS if case.is_relayed else 0)}
        self._job = 1

    def play(self) -> CaseResult:
        """Run the case; whatever goes wrong is in the result."""
        start_s = self._clock.monotonic_s()
        last: Mapping[str, Any] = {}
        served = 0
        try:
            last = self._refits()
            served = self._check_end(last)
        except (RefitError, OSError) as error:
            self._problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._kill_all()
        struck = self._signs.read(f"done-{self._job}-{_STRUCK_STEP}") or self._signs.read(f"done-1-{_STRUCK_STEP}") or {}
        return CaseResult(
            case=self._case,
            ok=not self._problems,
            problems=tuple(self._problems),
            attempts=int(struck.get("attempts", 0)),
            committed=int(last.get("version", -1)),
            seconds=self._clock.monotonic_s() - start_s,
            served=served,
        )

    # --- the story --------------------------------------------------------------------------------------------------

    def _refits(self) -> Mapping[str, Any]:
        for name in self._relays:
            self._start_relay(name)  # first: rollout processes look for a node's share when they start
        for name in self._lives:
            self._start_receiver(name)
        self._start_trainers(first_step=1)
        for name in self._lives:
            self._await(f"joined-{name}-1")
        self._order(1)
        way = self._await(f"done-1-{1}")["transport"]
        if way != ("relay" if self._relays else "object_store"):
            self._problems.append(f"the first refit went by {way}")
        self._signs.put("armed")
        self._order(_STRUCK_STEP)
        self._await("reached")
        self._strike()
        self._await(f"done-{self._job}-{_STRUCK_STEP}")
        for name, life in self._lives.items():
            self._await(f"joined-{name}-{life}")
        for name in self._lives:
            self._await_settled(name)
        self._order(_LAST_STEP)
        last: Mapping[str, Any] = self._await(f"done-{self._job}-{_LAST_STEP}")
        self._order(_LAST_STEP + 1, "stop")
        for rank in range(NUM_TRAINERS):
            self._await_exit(f"trainer {rank}")
        self._signs.put("stop receivers")
        for name in self._lives:
            self._await_exit(name)
        self._await_tidy()
        self._signs.put("stop relays")
        for name in self._relays:
            self._await_exit(name)
        return last

    def _strike(self) -> None:
        case = self._case
        match case.action:
            case "kill":
                self._signal(case.victim, signal.SIGKILL)
                self._await_exit(case.victim, status=-signal.SIGKILL)
                self._signs.put("go on")
                self._restart()
            case "stop" if case.victim in self._relays:
                self._signal(case.victim, signal.SIGSTOP)
                self._signs.put("go on")
                self._clock.sleep(_RELAY_STOP_S)
                self._signal(case.victim, signal.SIGCONT)
            case "stop":
                before = self._incarnation(case.victim)
                self._signal(case.victim, signal.SIGSTOP)
                self._clock.sleep(2.5 * self._lease_s)
                self._signs.put("go on")
                self._signal(case.victim, signal.SIGCONT)
                if case.victim in self._lives:
                    self._await_new_incarnation(case.victim, before)
            case "replace":
                self._replace()

    def _incarnation(self, name: str) -> str:
        """Of a rollout process; empty for others."""
        shown = self._shown(name) if name in self._lives else None
        return "" if shown is None else shown.incarnation

    def _shown(self, name: str) -> Membership | None:
        """What a rollout process shows of itself."""
        store = open_run(self._run, clock=self._clock, options=self._options())
        reading = read_beacon(store, keys.member(name))
        return None if reading is None else decode_message(reading.info, Membership, sender=name)

    def _await_settled(self, name: str) -> None:
        """It serves, or has shown for a lease that it waits for the next refit: it is not about to leave and catch up."""
        deadline, unchanged = Deadline(self._clock, _STEP_S), Deadline(self._clock, self._lease_s)
        before = self._shown(name)
        while (now := self._shown(name)) is None or not (now.summary_digest and (now.is_serving or unchanged.expired)):
            if deadline.expired:
                raise DeadlineError(f"{name} has no place in the run after {_STEP_S:.0f} s: {now}")
            if now is None or before is None or now.incarnation != before.incarnation:
                before, unchanged = now, Deadline(self._clock, self._lease_s)
            self._clock.sleep(0.05)

    def _await_new_incarnation(self, name: str, before: str) -> None:
        """It must find by itself that its lease ran out, and take part again as a new receiver."""
        deadline = Deadline(self._clock, _STEP_S)
        while self._incarnation(name) == before:
            if deadline.expired:
                raise DeadlineError(f"{name} slept through its lease and does not know it after {_STEP_S:.0f} s")
            self._clock.sleep(0.05)

    def _await_tidy(self) -> None:
        """Relays find out by themselves about attempts that ended while they could not be told."""
        deadline = Deadline(self._clock, 3 * self._lease_s)
        while any(check_shelf(Path(self._share(name))) for name in self._relays) and not deadline.expired:
            self._clock.sleep(0.05)

    def _restart(self) -> None:
        """What a supervisor does: a rollout process or relay is started again; of a training job all ranks are."""
        if self._case.victim in self._relays:
            self._relays[self._case.victim] += 1
            self._start_relay(self._case.victim)
            return
        if self._case.victim in self._lives:
            self._lives[self._case.victim] += 1
            self._start_receiver(self._case.victim)
            return
        survivor = next(f"trainer {rank}" for rank in range(NUM_TRAINERS) if f"trainer {rank}" != self._case.victim)
        self._await_exit(survivor)
        text = (self._signs.read(f"error-{self._job}-{survivor.removeprefix('trainer ')}") or {}).get("text", "")
        if "lost each other" not in text:
            self._problems.append(f"{survivor} ended without saying that the ranks lost each other: {text!r}")
        self._start_trainers(first_step=_STRUCK_STEP)
        self._order(_STRUCK_STEP)

    def _replace(self) -> None:
        """Freeze the training job, let another one take over and refit, then wake the first: it must do nothing any more."""
        first = {f"trainer {rank}": self._pids[f"trainer {rank}"] for rank in range(NUM_TRAINERS)}
        for name in first:
            self._signal(name, signal.SIGSTOP)
        if self._case.holder in self._lives:
            self._signs.put("go on")
        self._start_trainers(first_step=_STRUCK_STEP)
        self._order(_STRUCK_STEP)
        self._await(f"done-{self._job}-{_STRUCK_STEP}")
        self._signs.put("go on")
        for pid in first.values():
            os.kill(pid, signal.SIGCONT)
        for name, pid in first.items():
            self._await_pid(name, pid)
        error = self._signs.read(f"error-{self._job - 1}-0") or {}
        if error.get("kind") != "CommitConflictError":
            self._problems.append(f"the replaced trainer ended with {error.get('kind')}: {error.get('text')}")

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_end(self, last: Mapping[str, Any]) -> int:
        committed = self._committed()
        expected = committed.get(int(last["version"]), "?")
        if sorted(last["receivers"]) != sorted(self._lives):
            self._problems.append(f"the last refit left out receivers: it had {last['receivers']}")
        for name in self._lives:
            final = self._signs.read(f"final-{name}") or {}
            if final.get("hash") != expected:
                self._problems.append(f"{name} does not hold the bits of a dense reload")
            if final.get("version") != last["version"] or not final.get("is_open"):
                self._problems.append(f"{name} ended at version {final.get('version')}, open: {final.get('is_open')}")
        problems, served = check_served(self._directory, committed)
        self._problems += problems + check_leftovers(self._run, self._options())
        for name in self._relays:
            self._problems += check_shelf(Path(self._share(name)))
        return served

    def _committed(self) -> dict[int, str]:
        """The hash of each committed version, as trainers know it."""
        committed = {0: state_hash(Rollout(Policy()))}
        for life in range(1, self._job + 1):
            opened = self._signs.read(f"opened-{life}")
            if life > 1 and opened is not None and opened["version"] not in committed:
                # Committed by a life that could not report it any more.
                committed[opened["version"]] = self._signs.read(f"candidate-{life - 1}-{_STRUCK_STEP}")["hash"]
            for step in range(1, _LAST_STEP + 1):
                if (done := self._signs.read(f"done-{life}-{step}")) is not None:
                    committed[done["version"]] = done["hash"]
        first = Policy()
        perturb(first, 1)
        if committed.get(1) != state_hash(Rollout(first)):
            self._problems.append("version 1 is not the first step's policy: the bookkeeping of this test is wrong")
        return committed

    def _options(self) -> dict[str, str] | None:
        if not self._environment:
            return None
        names = {"endpoint": "AWS_ENDPOINT_URL", "access_key_id": "AWS_ACCESS_KEY_ID"}
        names |= {"secret_access_key": "AWS_SECRET_ACCESS_KEY", "region": "AWS_REGION"}
        return {option: self._environment[variable] for option, variable in names.items()}

    # --- processes --------------------------------------------------------------------------------------------------

    def _start_trainers(self, *, first_step: int) -> None:
        self._job = 1 if first_step == 1 else self._job + 1
        for rank in range(NUM_TRAINERS):
            task = TrainerTask(
                directory=str(self._directory),
                run=self._run,
                lease_s=self._lease_s,
                point=self._case.point if self._job == 1 else "",
                count=self._case.count,
                rank=rank,
                world_size=NUM_TRAINERS,
                life=self._job,
                publishes=self._case.call == "publish",
                first_step=first_step,
            )
            self._start(f"trainer {rank}", task, f"trainer-{rank}-{self._job}")

    def _start_receiver(self, name: str) -> None:
        life = self._lives[name]
        task = ReceiverTask(
            directory=str(self._directory),
            run=self._run,
            lease_s=self._lease_s,
            point=self._case.point if life == 1 else "",
            count=self._case.count,
            name=name,
            life=life,
            shared_directory=self._share(name),
        )
        self._start(name, task, f"{name}-{life}")

    def _start_relay(self, name: str) -> None:
        life = self._relays[name]
        task = RelayTask(
            directory=str(self._directory),
            run=self._run,
            lease_s=self._lease_s,
            name=name,
            life=life,
            shared_directory=self._share(name),
        )
        self._start(name, task, f"{name}-{life}")
        self._await(f"up-{name}-{life}")

    def _share(self, name: str) -> str:
        """The directory that a node's processes share."""
        if not self._relays:
            return ""
        path = self._directory / f"node-{name.rpartition('-')[2]}"
        path.mkdir(exist_ok=True)
        return str(path)

    def _start(self, name: str, task: Task, log: str) -> None:
        pid = self._zygote.start(task, self._directory / f"{log}.log", self._environment)
        self._pids[name] = pid
        self._all.append(pid)

    def _signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._pids[name], number)

    def _kill_all(self) -> None:
        alive = [pid for pid in self._all if self._zygote.status(pid) is None]
        for pid in alive:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
        self._clock.sleep(0.5 if alive else 0.0)  # for the stacks to be written
        for pid in alive:
            os.kill(pid, signal.SIGKILL)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _order(self, step: int, what: str = "refit") -> None:
        self._signs.put(f"order-{self._job}-{step}", what)

    def _await(self, sign: str) -> Any:
        return self._signs.wait(sign, _STEP_S, unless=f"error-{self._job}-")

    def _await_exit(self, name: str, *, status: int = 0) -> None:
        self._await_pid(name, self._pids[name], status=status)

    def _await_pid(self, name: str, pid: int, *, status: int = 0) -> None:
        deadline = Deadline(self._clock, _STEP_S)
        while (found := self._zygote.status(pid)) is None:
            if deadline.expired:
                raise DeadlineError(f"{name} has not ended after {_STEP_S:.0f} s")
            self._clock.sleep(0.02)
        if found != status:
            raise AttemptFailedError(f"{name} ended with {found}, expected {status}; see the logs in {self._directory}")
