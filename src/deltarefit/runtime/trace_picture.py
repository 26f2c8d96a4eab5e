"""A refit's timeline as an SVG picture: a row per process and stage; under them the lower bounds, as bars of the same scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.trace import lanes, places
from deltarefit.runtime.trace_bounds import BOUNDS, LowerBounds

__all__ = ["timeline_svg"]

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 960.0, 210.0, 18.0, 17.0, 46.0
_LEAST = 0.8
"""Width of the shortest mark: what took microseconds is still to be seen."""
_COLOURS = {
    "prepare": "#8c959f",
    "scan": "#0969da",
    "encode": "#54aeff",
    "send": "#8250df",
    "recheck": "#a475f9",
    "fetch": "#bf3989",
    "decode": "#1a7f37",
    "apply": "#2da44e",
    "verify": "#9a6700",
    "flush": "#d4a72c",
    "commit": "#cf222e",
    "baseline": "#bc4c00",
    "finish": "#6e7781",
    "stop": "#a40e26",
    "pause": "#eac54f",
}
_OTHER = "#57606a"
_BOUND_COLOURS = {"construction": "#0969da", "transport": "#8250df", "apply": "#2da44e"}


def timeline_svg(events: Iterable[StageEvent], *, bounds: LowerBounds | None = None, title: str = "one refit") -> str:
    """Draw events that are on one time axis; seconds are counted from the first of them."""
    tracks = lanes(events)
    listed = [event for event, _ in tracks]
    start_s = min((event.t0_s for event in listed), default=0.0)
    span_s = max((event.t1_s for event in listed), default=start_s) - start_s or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / span_s
    order = {where: number for number, where in enumerate(places(listed))}
    rows = sorted({(order[event.where], track, event.where, event.stage) for event, track in tracks})
    at = {(where, track): _TOP + _ROW * number for number, (_, track, where, _) in enumerate(rows)}
    parts = [_text(8, 20, title, "t")]
    parts.extend(_axis(span_s, scale, _TOP + _ROW * len(rows)))
    parts.extend(_labels(rows, at))
    for event, track in tracks:
        parts.append(_mark(event, at[event.where, track], start_s, scale))
    height = _TOP + _ROW * len(rows) + 8
    if bounds is not None:
        parts.extend(_bars(bounds, height + 14, scale))
        height += 14 + _ROW * (len(BOUNDS) + 2)
    return _document(height + 8, title, parts)


def _document(height: float, title: str, parts: Sequence[str]) -> str:
    style = (
        "text{font:11px Helvetica,Arial,sans-serif;fill:#1f2328}.t{font-weight:bold;font-size:13px}.d{fill:#57606a}"
        ".e{text-anchor:end}.m{text-anchor:middle}line{stroke:#d0d7de;stroke-width:1}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}">'
    back = f'<rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{style}</style>", back, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _axis(span_s: float, scale: float, bottom: float) -> Iterable[str]:
    step_s = next(s for s in (x * 10.0**power for power in range(-6, 6) for x in (1, 2, 5)) if span_s / s <= 10)
    for number in range(int(span_s / step_s) + 1):
        x = _LEFT + number * step_s * scale
        yield f'<line x1="{x:.1f}" y1="{_TOP - 6:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        yield _text(x, _TOP - 10, f"{number * step_s:g} s", "d m")


def _labels(rows: Sequence[tuple[int, int, str, str]], at: dict[tuple[str, int], float]) -> Iterable[str]:
    before, stage_before = "", ""
    for _, track, where, stage in rows:
        y = at[where, track] + 12
        if where != before:
            yield f'<line x1="8" y1="{y - 12:.1f}" x2="{_WIDTH - _RIGHT:.1f}" y2="{y - 12:.1f}"/>'
            yield _text(8, y, where, "t")
        if (where, stage) != (before, stage_before):
            yield _text(_LEFT - 8, y, stage, "d e")
        before, stage_before = where, stage


def _mark(event: StageEvent, y: float, start_s: float, scale: float) -> str:
    x = _LEFT + (event.t0_s - start_s) * scale
    width = max(_LEAST, (event.t1_s - event.t0_s) * scale)
    colour = _COLOURS.get(event.stage, _OTHER)
    about = f"{event.where}: {event.stage}, {event.t1_s - event.t0_s:.4f} s"
    about += f", {event.payload}" if event.payload else ""
    about += f", {event.nbytes:,} bytes" if event.nbytes else ""
    return (
        f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{width:.2f}" height="{_ROW - 4:.1f}" fill="{colour}" fill-opacity="0.85">'
        f"<title>{escape(about)}</title></rect>"
    )


def _bars(bounds: LowerBounds, top: float, scale: float) -> Iterable[str]:
    whole = bounds.latency_s
    yield _text(8, top, f"lower bounds of a refit of {whole:.3f} s; the binding one is {bounds.binding or 'none'}", "t")
    named = [(name, getattr(bounds, name).seconds, _BOUND_COLOURS[name]) for name in BOUNDS]
    for number, (name, seconds, colour) in enumerate([*named, ("finalization", bounds.finalization_s, _OTHER)]):
        y = top + 8 + _ROW * number
        share = f"{seconds:.3f} s" + (f", {seconds / whole:.0%}" if whole > 0 else "")
        yield _text(_LEFT - 8, y + 12, name, "d e")
        yield (
            f'<rect x="{_LEFT:.1f}" y="{y + 2:.1f}" width="{max(_LEAST, seconds * scale):.2f}" height="{_ROW - 4:.1f}" '
            f'fill="{colour}"/>'
        )
        yield _text(_LEFT + seconds * scale + 6, y + 12, share, "d")
