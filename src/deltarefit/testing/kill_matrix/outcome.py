"""What a case came to, and the checks that decide it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from deltarefit.protocol import ChainLink
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.session import control_plane
from deltarefit.testing.kill_matrix.cases import NUM_TRAINERS, Case
from deltarefit.transport import RunStore, is_staged, keys, open_run, read_manifest

__all__ = ["CaseResult", "check_leftovers", "check_served", "check_shelf"]


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
    """Everything under the run but the record, what it retains, and what is kept by content (catalog, plans, summaries).

    What it retains must be whole, too.
    """
    clock = SystemClock()
    store = open_run(run, clock=clock, options=options)
    state = control_plane(store, clock, RandomIds()).read()
    links = () if state is None else state.links
    retained = {link.attempt for link in links}
    found = [info.key for info in store.listing(keys.ATTEMPTS)]
    left = [key for key in found if keys.attempt_of(key) not in retained or not keys.is_link(key)]
    left += [info.key for prefix in (keys.MAIL, keys.MEMBERS, keys.RELAYS) for info in store.listing(prefix)]
    left += [info.key for info in store.listing(keys.CONTROL) if not _is_record(info.key)]
    left += [key for key in _strays(store) if key not in found]
    return [f"left behind: {key}" for key in left[:5]] + [text for link in links for text in _gaps(store, link)]


def _gaps(store: RunStore, link: ChainLink) -> Iterable[str]:
    """What a receiver that comes back over this link would lack."""
    manifest = read_manifest(store, link.attempt)
    wanted = [(keys.payload(entry.payload_id(link.attempt)), entry.nbytes) for entry in manifest.entries]
    there = {info.key: info.nbytes for info in store.listing(keys.payload_prefix(link.attempt))}
    if manifest.lacks(NUM_TRAINERS) or store.head(keys.digests(link.attempt)) is None:
        yield f"retained {link.attempt} has no whole manifest or no digests"
    for key, nbytes in wanted:
        if there.get(key) != nbytes:
            yield f"retained payload {key}: expected {nbytes} bytes, got {there.get(key)}"


def check_shelf(share: Path) -> list[str]:
    """Payloads that a node's relay still keeps once all have left."""
    return [f"left on a shelf: {path.relative_to(share)}" for path in share.rglob("*/relay/*/payloads/*") if path.is_file()]


def _is_record(key: str) -> bool:
    return key.rsplit("/", 1)[-1].startswith("record")


def _strays(store: RunStore) -> Iterable[str]:
    """Files of a directory that no listing shows, but parts of objects whose writer was killed: a sweep a minute later removes
    these."""
    if store.directory is None:
        return
    listed = {info.key for prefix in (keys.PLANS, keys.CONTROL) for info in store.listing(prefix)}
    for path in sorted(store.directory.rglob("*")):
        key = str(path.relative_to(store.directory))
        if path.is_file() and key not in listed and not _is_record(key) and not is_staged(path.name):
            yield key
