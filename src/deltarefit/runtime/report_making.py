"""Makes a committed refit's report from what its transition produced."""

from __future__ import annotations

from collections.abc import Mapping

from deltarefit.protocol import commands
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.observers import Observers
from deltarefit.runtime.refit_state import Outcome, Session
from deltarefit.runtime.report import RefitReport, stage_seconds
from deltarefit.runtime.trace_bounds import lower_bounds
from deltarefit.runtime.trace_clock import on_axis
from deltarefit.wording import some_of

__all__ = ["covered_in_words", "make_report"]


def make_report(session: Session, outcome: Outcome, finish: commands.Finish, observers: Observers) -> RefitReport:
    """The report; observers hear of it, and of what other processes told of the refit."""
    shifts = session.axis.shifts()
    reported: list[StageEvent] = [*outcome.events, *session.log.drain()]
    happened = on_axis(reported, shifts)
    spent_s = stage_seconds(happened)
    report = RefitReport(
        policy_version=finish.record.policy_version,
        attempts=finish.num_attempts,
        changed_elements=outcome.changed_elements,
        total_elements=session.catalog.num_elements,
        nan_elements=outcome.nan_elements,
        payloads=outcome.payloads,
        payload_nbytes=outcome.payload_nbytes,
        sent_nbytes=outcome.sent_nbytes,
        checkpoint_nbytes=session.catalog.nbytes,
        stage_s={stage: seconds for stage, seconds in spent_s.items() if stage != "pause"},
        refit_s=outcome.t1_s - outcome.t0_s,
        policy_digest=outcome.policy_digest,
        audited=outcome.audited,
        receivers=tuple(outcome.receivers),
        covered=covered_in_words({receiver: outcome.covered[receiver] for receiver in outcome.receivers}),
        failures=finish.causes,
        bounds=lower_bounds(happened),
        pause_s=spent_s.get("pause", 0.0),
        cross_nbytes=outcome.crossed_nbytes + sum(event.nbytes for event in happened if event.stage == "fetch"),
        transport=outcome.transport,
        delivery=session.delivery.value,
    )
    observers.refit(report, reported, shifts)
    return report


def covered_in_words(covered: Mapping[str, str]) -> str:
    """What audits covered, from each receiver's words: once if all say the same, else with who says what."""
    sayers: dict[str, list[str]] = {}
    for receiver, text in sorted(covered.items()):
        sayers.setdefault(text, []).append(receiver)
    if len(sayers) < 2:
        return "".join(sayers)
    return "; ".join(f"{some_of(receivers, 8)}: {text}" for text, receivers in sayers.items())
