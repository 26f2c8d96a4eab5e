"""What a case came to, and the checks that decide it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from deltarefit.runtime.clock import SystemClock
from deltarefit.testing.kill_matrix.cases import Case
from deltarefit.transport import RunStore, keys, open_run

__all__ = ["CaseResult", "check_leftovers", "check_served"]


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    case: Case
    ok: bool
    problems: tuple[str, ...]
    attempts: int
    """Of the refit that was struck, as the trainer that ended it counts them."""
    committed: int
    """Policy version at the end."""
    seconds: float
    served: int
    """Different (version, weights) pairs under which requests were answered; every one is a committed policy."""


def check_served(directory: Path, committed: Mapping[int, str]) -> tuple[list[str], int]:
    """No request was ever answered under weights that were not those of its version. Problems, and the number of pairs."""
    problems: list[str] = []
    seen: set[str] = set()
    for path in sorted(directory.glob("served-*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            version, _, found = line.partition(" ")
            seen.add(line)
            if committed.get(int(version)) != found:
                known = [str(number) for number, expected in committed.items() if expected == found]
                what = f"those of version {known[0]}" if known else "of no committed version"
                problems.append(f"{path.stem} answered as version {version} with weights {what}")
    return problems, len(seen)


def check_leftovers(run: str, options: Mapping[str, str] | None) -> list[str]:
    """Everything under the run but the record and what is kept by content (catalog, plans, summaries)."""
    store = open_run(run, clock=SystemClock(), options=options)
    left = [info.key for prefix in (keys.ATTEMPTS, keys.MAIL, keys.MEMBERS) for info in store.listing(prefix)]
    left += [info.key for info in store.listing(keys.CONTROL) if not _is_record(info.key)]
    left += list(_strays(store))
    return [f"left behind: {key}" for key in left[:5]]


def _is_record(key: str) -> bool:
    return key.rsplit("/", 1)[-1].startswith("record")


def _strays(store: RunStore) -> Iterable[str]:
    """Files of a directory that no listing shows, such as half-written ones."""
    if store.directory is None:
        return
    listed = {info.key for prefix in (keys.PLANS, keys.CONTROL) for info in store.listing(prefix)}
    for path in sorted(store.directory.rglob("*")):
        key = str(path.relative_to(store.directory))
        if path.is_file() and key not in listed and not _is_record(key):
            yield key
