"""Feeds real vLLM engines that hold quantised checkpoints from deltas of ``deltarefit diff``; compares with fresh engines.

A program of its own: ``python quantised_scenario.py WORK CHECKPOINT...``, checkpoints being directories in WORK.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from engine_scenario import Engine

import deltarefit
from deltarefit.errors import RefitError
from deltarefit.integrations.checkpoints import CheckpointSource
from deltarefit.offline import diff_checkpoints
from deltarefit.source import LocalCollective
from deltarefit.testing.checkpoints import load_tensors, write_checkpoint
from deltarefit.testing.quantised import next_codes


def run(work: Path, name: str) -> dict:
    """An engine of the checkpoint, fed from a delta to the next one; then a fresh engine of that."""
    base, target, delta = work / name, work / f"{name}-next", work / f"{name}.delta"
    write_checkpoint(target, next_codes(load_tensors(base), 0.03, seed=1), like=base)
    diff_checkpoints(base, target, delta)
    engine = Engine(base)
    out: dict = {"before": engine.generate(), "changes": engine.changes()}
    try:
        out |= feed(engine, (work / f"run-{name}").as_uri(), base, delta)
    except RefitError as error:
        out["refused"] = str(error)
    out |= {"state": engine.state(), "generated": engine.generate()}
    engine.stop()
    fresh = Engine(target)
    out |= {"fresh_state": fresh.state(), "fresh_generated": fresh.generate()}
    fresh.stop()
    return out


def feed(engine: Engine, run_url: str, base: Path, delta: Path) -> dict:
    settings = deltarefit.PublisherSettings(join_timeout_s=60.0)
    with (
        deltarefit.Receiver(engine.driver, run=run_url, name="rollout").start(),
        CheckpointSource(base) as source,
        deltarefit.Publisher(None, run=run_url, adapter=source, collective=LocalCollective(), settings=settings) as publisher,
    ):
        source.move_by(delta)
        report = publisher.refit()
        return {"audited": report.audited, "changed": report.changed_fraction, "audit": publisher.audit().describe()}


def main() -> None:
    work, results = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        try:
            results[name] = run(work, name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (work / "quantised.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
