# ruff: noqa: INP001
"""Draws the diagrams and tables of PROTOCOL.md from the protocol's own tables, so that text and code cannot drift.

::

    python tools/draw_protocol.py            # rewrite the drawn parts of src/deltarefit/protocol/PROTOCOL.md
    python tools/draw_protocol.py --check    # exit 1 if they are not current
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from deltarefit.protocol.reception_table import NEXT_PHASE, Phase
from deltarefit.protocol.transition_memory import GIVES
from deltarefit.protocol.transition_table import NEXT_STATE, Signal, TransitionState

DOCUMENT = Path(__file__).parent.parent / "src" / "deltarefit" / "protocol" / "PROTOCOL.md"

_COMMON = (Signal.SUPERSEDED, Signal.ABORT_NOTED, Signal.STUCK)
"""Edges that most states have; said once in the text instead of being drawn thirty times."""


def transition_diagram() -> str:
    """A mermaid state diagram of Algorithm B.2 without the edges that every state has."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> NEW"]
    for state, edges in NEXT_STATE.items():
        for signal, following in edges.items():
            if signal not in _COMMON and not signal.name.startswith("RESUME_"):
                lines.append(f"    {state.name} --> {following.name}: {signal.value}")
    stuck = sorted(state.name for state, edges in NEXT_STATE.items() if Signal.STUCK in edges)
    lines += [f"    {name} --> ASKING: stuck" for name in stuck]
    lines += ["    ENDED --> [*]", "```"]
    return "\n".join(lines)


def transition_table() -> str:
    """One row a state: the command that it gives on being entered, and where each signal leads."""
    lines = ["| state | waits for the answer to | signal → next state |", "|---|---|---|"]
    for state in TransitionState:
        edges = [
            f"{signal.value} → {following.name}"
            for signal, following in NEXT_STATE[state].items()
            if signal not in (Signal.SUPERSEDED, Signal.ABORT_NOTED) and not signal.name.startswith("RESUME_")
        ]
        if any(signal.name.startswith("RESUME_") for signal in NEXT_STATE[state]):
            edges.append("operator retries → the state that was stuck")
        lines.append(f"| {state.name} | {GIVES[state].__name__ if state in GIVES else ''} | {'; '.join(edges)} |")
    return "\n".join(lines)


def reception_diagram() -> str:
    """A mermaid state diagram of one attempt at a receiver."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.IDLE.name}"]
    for phase, edges in NEXT_PHASE.items():
        lines += [f"    {phase.name} --> {following.name}: {verb.value}" for verb, following in edges.items()]
    return "\n".join([*lines, "```"])


DRAWN = {
    "transition diagram": transition_diagram,
    "transition table": transition_table,
    "reception diagram": reception_diagram,
}


def redrawn(document: str) -> str:
    """The document with every drawn part current."""
    for name, draw in DRAWN.items():
        pattern = re.compile(rf"(<!-- drawn: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        document, count = pattern.subn(lambda match, draw=draw: match[1] + draw() + "\n" + match[2], document)
        if count != 1:
            raise SystemExit(f"{DOCUMENT.name}: expected one place for '{name}', found {count}")
    return document


def main(arguments: list[str]) -> int:
    """Rewrite, or check."""
    before = DOCUMENT.read_text(encoding="utf-8")
    after = redrawn(before)
    if "--check" in arguments:
        return 0 if before == after else 1
    DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
