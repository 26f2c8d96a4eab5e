"""One event stream, told in several ways: each must say what happened, and none may harm a refit."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.runtime.pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, perturb

import deltarefit
from deltarefit.cli.program import program
from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import ManualClock, SystemClock
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.jsonlines import JsonLines, merge_event_files, read_event_file
from deltarefit.runtime.observers import Observers
from deltarefit.runtime.prometheus import MetricsServer, RefitMetrics
from deltarefit.runtime.report import RefitReport
from deltarefit.runtime.settings import ObservationSettings
from deltarefit.runtime.trace_bounds import Bound, LowerBounds
from deltarefit.runtime.trace_clock import ClockShift
from deltarefit.runtime.trace_spans import SpanWriter
from deltarefit.testing.faults import CorruptingSender, FaultPlan

EVENT = StageEvent("send", "owner 0", "v000003-a1-0", 1.0, 1.5, 200, "v000003-a1-0/owner 0/payload 0")
BOUNDS = LowerBounds(
    window_s=2.0,
    construction=Bound(0.5, "owner 0"),
    transport=Bound(1.5, "owner 0"),
    apply=Bound(),
    check_s=0,
    finalization_s=0.1,
)
REPORT = RefitReport(
    policy_version=3, attempts=2, changed_elements=1, nan_elements=0, total_elements=4,
    payloads=1, payload_nbytes=200, sent_nbytes=400,
    checkpoint_nbytes=800, stage_s={"send": 0.5}, refit_s=0.25, policy_digest="0" * 32, audited=True, receivers=("a", "b"),
    covered="all", failures=("because",), bounds=BOUNDS, pause_s=0.125, cross_nbytes=200,
)  # fmt: skip


# --- JSON lines -----------------------------------------------------------------------------------------------------------


def test_lines_come_back_as_they_were_written(tmp_path):
    lines = JsonLines(tmp_path / "logs" / "owner-0.jsonl", ManualClock(5.0))
    lines.stage(EVENT)
    lines.refit(REPORT, {"receiver a": ClockShift(1.5, 0.25)})
    lines.close()
    read = read_event_file(tmp_path / "logs" / "owner-0.jsonl")
    assert read.events == (EVENT,)
    assert read.reports == (REPORT,)
    assert read.shifts == {"receiver a": ClockShift(1.5, 0.25)}
    assert read.process.monotonic_s == 5.0


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path, ManualClock())
    lines.stage(EVENT)
    lines.stage(EVENT)
    lines.close()
    path.write_bytes(path.read_bytes()[:-20])
    assert read_event_file(path).events == (EVENT,)


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"kind":"stage"}\n', b'{"kind":"other","x":1}\n'])
def test_other_files_are_refused_by_name_and_line(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(RejectedError, match=r"event file .*a\.jsonl"):
        read_event_file(path)


def test_a_full_disk_ends_the_file_and_nothing_else():
    lines = JsonLines(Path("/dev/full"), ManualClock())
    lines.stage(EVENT)
    lines.close()
    assert "No space left" in lines.failure


def test_files_of_several_machines_are_put_on_one_axis(tmp_path):
    """The receiver's clock is 100 s ahead, as the coordinator found; a relay that nobody asked is placed by wall clocks."""
    files = []
    for name, now_s in (("coordinator", 10.0), ("receiver a", 110.0), ("relay n", 1000.0)):
        lines = JsonLines(tmp_path / f"{name}.jsonl", ManualClock(now_s))
        lines.stage(msgspec.structs.replace(EVENT, where=name, t0_s=now_s + 1, t1_s=now_s + 2))
        if name == "coordinator":
            lines.refit(REPORT, {"receiver a": ClockShift(100.0, 0.01)})
        lines.close()
        read = read_event_file(tmp_path / f"{name}.jsonl")
        process = msgspec.structs.replace(read.process, boot=name, wall_s=50.0)  # three machines whose wall clocks agree
        files.append(msgspec.structs.replace(read, process=process))
    events, shifts = merge_event_files(files)
    assert [event.t0_s for event in events] == [11.0, 11.0, 11.0]
    assert shifts["receiver a"].error_s == 0.01
    assert shifts["relay n"].error_s == float("inf")


# --- Prometheus -----------------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[a-zA-Z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-zA-Z_]+="(?:[^"\\\n]|\\.)*")*\})? (\S+)'
)


def samples(text):
    found = {}
    for line in text.splitlines():
        if line.startswith("# "):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, line
        found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_metrics_count_stages_and_refits():
    metrics = RefitMetrics()
    assert metrics.render() == ""
    metrics.stage(EVENT)
    metrics.stage(EVENT)
    metrics.refit(REPORT)
    found = samples(metrics.render())
    assert found['deltarefit_stage_seconds_total{stage="send",where="owner"}'] == 1.0
    assert found['deltarefit_stage_bytes_total{stage="send",where="owner"}'] == 400
    assert found["deltarefit_policy_version"] == 3
    assert found['deltarefit_attempts_total{outcome="failed"}'] == 1
    assert found['deltarefit_refit_seconds_bucket{le="0.1"}'] == 0
    assert found['deltarefit_refit_seconds_bucket{le="0.3"}'] == found['deltarefit_refit_seconds_bucket{le="+Inf"}'] == 1
    assert found['deltarefit_lower_bound_seconds{bound="transport"}'] == 1.5


def test_the_official_parser_reads_the_metrics():
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = RefitMetrics()
    metrics.stage(msgspec.structs.replace(EVENT, where='odd"name\\x'))
    metrics.refit(REPORT)
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics.render())}
    assert families["deltarefit_refit_seconds"].type == "histogram"
    assert families["deltarefit_stage_runs"].type == "counter"
    assert families["deltarefit_stage_runs"].samples[0].labels["where"] == 'odd"name\\x'


def test_metrics_are_served_and_nothing_else_is():
    metrics = RefitMetrics()
    metrics.refit(REPORT)
    with MetricsServer(metrics, "127.0.0.1:0") as server:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert samples(reply.read().decode())["deltarefit_refits_total"] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{server.address}/secrets", timeout=10)


@pytest.mark.parametrize("address", ["9464", "host:port", ":1", "127.0.0.1:70000", "203.0.113.7:9464"])
def test_bad_addresses_are_refused_at_start(address):
    with pytest.raises(RejectedError, match="metrics address"):
        Observers(ObservationSettings(metrics_address=address), "owner 0", SystemClock())


# --- OpenTelemetry --------------------------------------------------------------------------------------------------------


def test_spans_of_one_attempt_share_a_trace_whatever_process_writes_them():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    for where in ("owner 0", "receiver a"):  # two processes: two providers, two clocks
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        writer = SpanWriter(ManualClock(100.0), tracer=provider.get_tracer("test"))
        writer.stage(msgspec.structs.replace(EVENT, where=where))
    first, second = exporter.get_finished_spans()
    assert first.context.trace_id == second.context.trace_id
    assert first.name == "deltarefit.send"
    assert first.end_time - first.start_time == 500_000_000
    assert first.attributes["deltarefit.payload"] == EVENT.payload
    assert second.attributes["deltarefit.where"] == "receiver a"


def test_without_opentelemetry_the_setting_is_refused():
    if importlib.util.find_spec("opentelemetry") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(RejectedError, match=r"deltarefit\[otel\]"):
        Observers(ObservationSettings(opentelemetry=True), "owner 0", SystemClock())


# --- a whole refit --------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_a_refit_is_told_in_every_way_and_the_ways_agree(tmp_path):
    logs = tmp_path / "logs"
    with Pair(tmp_path, num_receivers=2) as pair:
        plan = FaultPlan()
        settings = msgspec.structs.replace(SETTINGS, min_receivers=2, event_directory=str(logs), metrics_address="127.0.0.1:0")
        publisher = pair.publisher(settings=settings, wrap_sender=lambda sender: CorruptingSender(sender, plan))
        perturb(pair.policy, 1)
        report = publisher.refit()
        metrics = samples(publisher.observers.metrics.render())
        assert publisher.observers.metrics_address.startswith("127.0.0.1:")
    assert report.attempts == 2
    assert report.bounds is not None
    assert report.bounds.binding in {"construction", "transport", "apply"}
    assert report.bounds.window_s > 0
    assert report.pause_s >= report.stage_s["apply"]
    assert report.cross_nbytes >= 2 * report.payload_nbytes  # two receivers fetched the last attempt's payload
    assert metrics["deltarefit_policy_version"] == 1
    assert metrics['deltarefit_attempts_total{outcome="failed"}'] == 1
    assert metrics['deltarefit_stage_runs_total{stage="pause",where="receiver"}'] == 2
    read = read_event_file(logs / "owner-0.jsonl")
    assert read.reports == (report,)
    assert len(read.failures) == 1
    assert "digest" in read.failures[0].reason
    heard = {event.where for event in read.events}
    assert heard == {"coordinator", "owner 0", "receiver rollout-0", "receiver rollout-1"}
    assert read.shifts == {"receiver rollout-0": ClockShift(0.0, 0.0), "receiver rollout-1": ClockShift(0.0, 0.0)}

    result = CliRunner().invoke(
        program, ["trace", str(logs), "-o", str(tmp_path / "t.json"), "--picture", str(tmp_path / "t.svg"), "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["bounds"] == msgspec.to_builtins(report.bounds)
    assert told["clock_error_s"] == 0
    trace = json.loads((tmp_path / "t.json").read_text())
    assert told["events"] == sum(row["ph"] == "X" for row in trace["traceEvents"]) > 10
    assert "<svg" in (tmp_path / "t.svg").read_text()


@pytest.mark.torch
def test_receivers_write_what_they_do_in_files_of_their_own(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, event_directory=str(tmp_path / "logs"))
        pair.stack.enter_context(
            deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=pair.run, name="r", settings=settings)
        )
        publisher = pair.publisher()
        perturb(pair.policy, 1)
        report = publisher.refit()
    stages = [event.stage for event in read_event_file(tmp_path / "logs" / "receiver-r.jsonl").events]
    assert stages.count("apply") == report.payloads
    assert stages[-1] == "pause"


def test_trace_of_a_version_that_is_not_there_names_those_that_are(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl", ManualClock())
    lines.stage(EVENT)
    lines.close()
    result = CliRunner().invoke(program, ["trace", str(tmp_path), "--version", "7"])
    assert result.exit_code == 1
    assert "they hold versions 3" in result.output


def test_event_log_tells_who_failed(caplog):
    log = EventLog(ManualClock(), "receiver a")
    heard = []
    log.subscribe_failures(lambda attempt, reason: heard.append((attempt, reason)))
    with caplog.at_level("WARNING"):
        log.failed("v000003-a1-0", "payload 3 of owner 1 has another digest")
    assert heard == [("v000003-a1-0", "payload 3 of owner 1 has another digest")]
    assert "receiver a: attempt v000003-a1-0 failed: payload 3 of owner 1" in caplog.text
