"""Refits real SGLang engines and loads fresh ones; writes what each held and generated as ``SCENARIO.json``.

A program of its own: ``python engine_scenario.py SCENARIO WORK_DIRECTORY``. Checkpoints ``v0``, ``v1`` and ``v2`` lie in the
work directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMPT = [5 + (7 * i) % 240 for i in range(40)]


def sampling(num_tokens: int) -> dict:
    return {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def shown(answer: dict) -> dict:
    logprobs = [float(entry[0]).hex() for entry in answer["meta_info"].get("output_token_logprobs", [])]
    about = answer["meta_info"]
    return {
        "tokens": answer["output_ids"],
        "logprobs": logprobs,
        "weight_version": about["weight_version"],
        "cached_tokens": about["cached_tokens"],
        "finish_reason": about["finish_reason"]["type"],
    }


def open_engine(checkpoint: Path):
    import sglang
    from deltarefit.integrations.sglang import LOADER
    from deltarefit.testing.sglang_cpu import ENGINE_OPTIONS

    return sglang.Engine(model_path=str(checkpoint), custom_weight_loader=[LOADER], **ENGINE_OPTIONS)


class Source:
    """The training side in short: what one owner would send for a whole checkpoint."""

    def __init__(self, work: Path) -> None:
        from deltarefit.bits import spec_of
        from deltarefit.canonical import Catalog
        from deltarefit.testing.checkpoints import load_tensors

        self.tensors = {version: load_tensors(work / version) for version in ("v0", "v1", "v2")}
        self.catalog = Catalog(spec_of(name, tensor) for name, tensor in self.tensors["v0"].items())

    def refit(self, driver, base: str, target: str) -> dict:
        """One refit as the receiver's agent runs it."""
        return self.finish(driver, *self.begin(driver, base, target), target)

    def begin(self, driver, base: str, target: str) -> tuple:
        """What happens while the engine serves."""
        from deltarefit.testing.oracle import delta_bytes, plan_for

        plan = plan_for(driver.prewarm(self.catalog), self.catalog)
        driver.prepare(plan)
        return plan, delta_bytes(plan, self.tensors[base], self.tensors[target], attempt=f"v00000{target[1:]}-a1-test")

    def finish(self, driver, plan, data: bytes, target: str) -> dict:
        """What happens behind the closed gate."""
        from deltarefit.receiver import merge_digests

        driver.close_gate(120.0)
        written = driver.apply(data)
        driver.synchronize()
        digests = merge_digests(driver.digests(), self.catalog)
        driver.drop_caches()
        driver.publish(int(target[1:]))
        driver.reopen_gate()
        return {
            "written": written,
            "proved": sum(digest is not None for digest in digests.values()),
            "encodings": sorted({encoding.name for encoding in plan.encodings.values()}),
            "state": state_of(driver),
        }


def state_of(driver) -> list[dict]:
    return [{name: [raw.dtype, list(raw.shape), raw.sha256] for name, raw in rank.items()} for rank in driver.raw_state()]


def checksums(engine) -> dict:
    """SGLang's own checksums of what its ranks hold."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    request = CheckWeightsReqInput(action="checksum")
    success, message, ranks, _ = engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(request, None))
    assert success, message
    return {"ranks": json.loads(json.dumps(ranks, default=str))}


def generate(engine) -> dict:
    return shown(engine.generate(input_ids=PROMPT, sampling_params=sampling(16), return_logprob=True))


def fresh(work: Path, version: str) -> dict:
    from deltarefit.integrations.sglang import SglangEngine

    engine = open_engine(work / version)
    try:
        driver = SglangEngine(engine)
        out = {"generated": generate(engine), "checksums": checksums(engine), "state": state_of(driver)}
        driver.close()
        return out
    finally:
        engine.shutdown()


def one_engine(work: Path) -> dict:
    """v0 to v1 by the plug-in, v1 to v2 in SGLang's session; fresh engines of both."""
    from deltarefit.errors import RefitError
    from deltarefit.integrations.sglang import SglangEngine

    source = Source(work)
    out: dict = {"tensors": len(source.catalog)}
    engine = open_engine(work / "v0")
    try:
        out["v0"] = {"cold": generate(engine), "warm": generate(engine)}
        for through, base, target in (("plug-in", "v0", "v1"), ("session", "v1", "v2")):
            driver = SglangEngine(engine, through=through)
            out[target] = source.refit(driver, base, target)
            out[target] |= {"name": driver.name, "generated": generate(engine), "checksums": checksums(engine)}
            if through == "plug-in":
                try:
                    driver.apply(b"no payload")
                except RefitError as error:
                    out["refused"] = [type(error).__name__, str(error)]
            driver.close()
    finally:
        engine.shutdown()
    for version in ("v1", "v2"):
        out[version]["fresh"] = fresh(work, version)
    return out


if __name__ == "__main__":
    scenario = {"one_engine": one_engine}[sys.argv[1]]
    result = scenario(Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(json.dumps(result))
