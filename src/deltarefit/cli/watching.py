"""``deltarefit status --watch``: a refit under way, from another terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import click
import msgspec

from deltarefit.cli._output import format_nbytes, format_seconds
from deltarefit.errors import TransportError

if TYPE_CHECKING:
    from deltarefit.runtime.clock import Clock
    from deltarefit.runtime.progress_view import RefitView

__all__ = ["lines", "watch"]

_BAR = 24
_PAUSE_S = 0.5


class View(Protocol):
    """Something to look at, again and again."""

    def look(self) -> RefitView: ...


def watch(view: View, clock: Clock, *, as_json: bool, for_s: float | None) -> None:
    """Show each change until interrupted, or for so long: in place on a terminal, as plain lines or JSON lines elsewhere."""
    end_s = None if for_s is None else clock.monotonic_s() + for_s
    show = _on_terminal() if sys.stdout.isatty() and not as_json else _as_text(as_json=as_json)
    try:
        while True:
            try:
                show(view.look())
            except TransportError as error:
                click.echo(f"no look now, will try again: {error}", err=True)
            if end_s is not None and clock.monotonic_s() >= end_s:
                return
            clock.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return


def lines(view: RefitView) -> list[str]:
    """One look, in words and bars."""
    head = f"policy version {view.policy_version} is committed"
    if not view.attempt:
        return [head + (f"; {view.activity}" if view.activity else "; no refit is under way")]
    which = f"attempt {view.attempt} ({view.mode}" + (f", the {_ordinal(view.num_attempts)}" if view.num_attempts > 1 else "")
    shown = [f"{head}; {which})"]
    if view.activity:
        shown.append(f"  coordinator: {view.activity} (for {format_seconds(view.activity_s)})")
    if view.announced:
        ended = f", {view.ended_owners} owners have sent all" if view.ended_owners else ""
        shown.append(f"  sent: {view.announced} payloads, {format_nbytes(view.announced_nbytes)}{ended}")
    for one in view.participants:
        did = f"{one.payloads} payloads, {format_nbytes(one.payload_nbytes)}, {format_seconds(one.elapsed_s)}"
        if one.total_nbytes:
            left_s = one.left_s
            left = f", {format_seconds(left_s)} left to compare" if left_s else ""
            shown.append(f"  {one.who:<20} {_bar(one.done_nbytes, one.total_nbytes)} compared; sent {did}{left}")
        else:
            shown.append(f"  {one.who:<20} {_bar(one.payloads, view.announced)} applied: {did}")
    return shown


def _bar(done: int, total: int) -> str:
    share = min(1.0, done / total) if total else 0.0
    full = int(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:4.0%}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _as_text(*, as_json: bool) -> Callable[[RefitView], None]:
    """Print what changed since the last look."""
    before: list[str] = []

    def show(view: RefitView) -> None:
        nonlocal before
        now = [msgspec.json.encode(view).decode()] if as_json else lines(view)
        for line in now if as_json and now != before else [line for line in now if line not in before]:
            click.echo(line)
        before = now

    return show


def _on_terminal() -> Callable[[RefitView], None]:
    from rich.console import Console
    from rich.live import Live

    live = Live(console=Console(highlight=False), auto_refresh=False)
    live.start()
    click.get_current_context().call_on_close(live.stop)

    def show(view: RefitView) -> None:
        from rich.text import Text

        live.update(Text("\n".join(lines(view))), refresh=True)

    return show
