"""Which process is struck, where and how."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["CASES", "NUM_RECEIVERS", "NUM_TRAINERS", "REDUCED", "Case"]

NUM_TRAINERS = 2
NUM_RECEIVERS = 2

Action = Literal["kill", "stop", "replace"]
"""``kill``: SIGKILL, and a restart. ``stop``: SIGSTOP for longer than the lease, then SIGCONT. ``replace``: the trainers are
stopped, another training job takes the run over, then the first one is woken."""
Store = Literal["file", "s3"]
Call = Literal["refit", "publish"]


class Case(msgspec.Struct, frozen=True):
    """One line of the matrix."""

    store: Store
    victim: str
    """``trainer <rank>``, ``rollout-<number>`` or ``relay-<number>``."""
    point: str
    """Where the holding process stands, as ``Breakpoint`` names it."""
    count: int
    """At which passage of the refit under test, from 1."""
    action: Action
    call: Call = "refit"
    """``refit`` closes request gates first; ``publish`` stages payloads while engines serve."""
    is_relayed: bool = False
    """Each rollout process is a node of its own, with a relay: payloads go over these."""

    @property
    def name(self) -> str:
        way = f"{self.call} by relay" if self.is_relayed else self.call
        return f"{self.store}, {way}, {self.victim}, {self.action}, {self.point} ({self.count})"

    @property
    def holder(self) -> str:
        """Who is held at the point; usually, but not always, the victim."""
        where = self.point.partition(":")[0]
        if where == "coordinator":
            return "trainer 0"
        return f"trainer {where.removeprefix('owner ')}" if where.startswith("owner") else where


_TRAINER_POINTS = (
    ("trainer 0", "rollout-0: before prepare", 1),
    ("trainer 0", "coordinator: after prepare", 1),
    ("trainer 0", "owner 0: after scan", 1),
    ("trainer 0", "owner 0: after encode", 1),
    ("trainer 0", "owner 0: after send", 2),
    ("trainer 0", "rollout-0: before apply", 3),
    ("trainer 0", "coordinator: after flush", 1),
    ("trainer 0", "coordinator: after commit", 1),
    ("trainer 0", "owner 0: after baseline", 1),
    ("trainer 0", "rollout-1: before drop_caches", 1),
    ("trainer 0", "rollout-0: before reopen_gate", 1),
    ("trainer 0", "coordinator: after finish", 2),
    ("trainer 1", "owner 1: after scan", 1),
    ("trainer 1", "owner 1: after send", 1),
    ("trainer 1", "owner 1: after baseline", 1),
)
_ROLLOUT_POINTS = (
    ("rollout-0", "rollout-0: before prepare", 1),
    ("rollout-0", "coordinator: after prepare", 1),
    ("rollout-0", "rollout-0: after close_gate", 1),
    ("rollout-0", "rollout-0: before apply", 1),
    ("rollout-0", "rollout-0: before apply", 3),
    ("rollout-0", "rollout-0: after apply", 2),
    ("rollout-0", "rollout-0: before digests", 1),
    ("rollout-0", "rollout-0: before digests", 2),
    ("rollout-0", "coordinator: after flush", 1),
    ("rollout-0", "coordinator: after commit", 1),
    ("rollout-0", "rollout-0: before drop_caches", 1),
    ("rollout-0", "rollout-0: before reopen_gate", 1),
    ("rollout-0", "rollout-0: after reopen_gate", 1),
)
_REPLACE_POINTS = (
    ("trainer 0", "coordinator: after prepare", 1),
    ("trainer 0", "owner 0: after send", 2),
    ("trainer 0", "coordinator: after flush", 1),
    ("trainer 0", "coordinator: after commit", 1),
)


_RELAY_POINTS = (
    ("relay-0", "coordinator: after prepare", 1),
    ("relay-0", "owner 0: after scan", 1),
    ("relay-0", "owner 0: after encode", 2),
    ("relay-1", "owner 0: after encode", 2),
    ("relay-0", "owner 0: after send", 1),
    ("relay-1", "rollout-0: before apply", 1),
    ("relay-0", "rollout-0: after apply", 2),
    ("relay-0", "coordinator: after flush", 1),
    ("relay-0", "coordinator: after commit", 1),
    ("relay-1", "rollout-1: before reopen_gate", 1),
)
"""Some of what relays pass on has come in by then, or all, or nothing."""
_RELAYED_POINTS = (
    ("trainer 0", "owner 0: after send", 2),
    ("trainer 1", "owner 1: after encode", 1),
    ("rollout-0", "rollout-0: before apply", 2),
)


def _relayed(store: Store) -> list[Case]:
    points = (*_RELAY_POINTS, *_RELAYED_POINTS)
    return [Case(store, *point, action, is_relayed=True) for point in points for action in ("kill", "stop")]


def _cases(store: Store, call: Call) -> list[Case]:
    points = (*_TRAINER_POINTS, *_ROLLOUT_POINTS)
    cases = [Case(store, *point, action, call) for point in points for action in ("kill", "stop")]
    return cases + [Case(store, *point, "replace", call) for point in _REPLACE_POINTS]


CASES: tuple[Case, ...] = (*_cases("file", "refit"), *_cases("file", "publish"), *_cases("s3", "refit"), *_relayed("file"))

REDUCED: tuple[Case, ...] = (
    Case("file", "trainer 0", "owner 0: after send", 2, "kill"),
    Case("file", "trainer 0", "coordinator: after flush", 1, "kill"),
    Case("file", "trainer 0", "coordinator: after commit", 1, "kill"),
    Case("file", "trainer 1", "owner 1: after send", 1, "kill"),
    Case("file", "rollout-0", "rollout-0: before apply", 3, "kill"),
    Case("file", "rollout-0", "rollout-0: before apply", 3, "stop"),
    Case("file", "trainer 0", "coordinator: after commit", 1, "replace"),
    Case("file", "trainer 0", "owner 0: after send", 2, "kill", "publish"),
    Case("file", "rollout-0", "rollout-0: before apply", 3, "kill", "publish"),
    Case("file", "relay-0", "owner 0: after encode", 2, "kill", is_relayed=True),
    Case("file", "relay-1", "rollout-0: before apply", 1, "stop", is_relayed=True),
    Case("s3", "trainer 0", "coordinator: after flush", 1, "kill"),
    Case("s3", "rollout-0", "rollout-0: after apply", 2, "kill"),
)
"""For every change: each kind of process, each action, both stores, both ways to deliver."""
