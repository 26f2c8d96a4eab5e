"""Refits a real SGLang engine while it generates in an event loop, and writes what came out as ``serving.json``.

A program of its own: ``python serving_scenario.py WORK_DIRECTORY``, with checkpoints ``v0``, ``v1`` and ``v2`` there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from engine_scenario import PROMPT, Source, open_engine, sampling, shown, state_of

MODES = (("retract", "v0", "v1"), ("abort", "v1", "v2"), ("in_place", "v2", "v1"))
NUM_TOKENS = 400
NUM_BEFORE = 8
NUM_COMPARED = 32


class Streamed:
    """One request, read as it is generated."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.last: dict = {}

    async def run(self, engine) -> None:
        answers = await engine.async_generate(
            input_ids=PROMPT, sampling_params=sampling(NUM_TOKENS), return_logprob=True, stream=True
        )
        async for answer in answers:
            self.last = answer
            if len(answer["output_ids"]) >= NUM_BEFORE:
                self.has_begun.set()
        self.has_begun.set()

    def shown(self) -> dict:
        return shown(self.last) | {"spans": self.last["meta_info"].get("weight_versions")}


async def generate(engine, prompt: list[int] = PROMPT, num_tokens: int = 16) -> dict:
    answer = await engine.async_generate(input_ids=prompt, sampling_params=sampling(num_tokens), return_logprob=True)
    return shown(answer)


async def refit_while_it_generates(engine, source: Source, mode: str, base: str, target: str) -> dict:
    from deltarefit.integrations.sglang import SglangEngine

    loop = asyncio.get_running_loop()
    driver = SglangEngine(engine, in_flight=mode, loop=loop)
    begun = await asyncio.to_thread(source.begin, driver, base, target)
    running = Streamed()
    task = asyncio.create_task(running.run(engine))
    await asyncio.wait_for(running.has_begun.wait(), 60)
    at_start = len(running.last["output_ids"])
    out = await asyncio.to_thread(source.finish, driver, *begun, target)
    await asyncio.wait_for(task, 120)
    out |= {"running": running.shown(), "tokens_at_start": at_start, "generated": await generate(engine)}
    await asyncio.to_thread(driver.close)
    return out


async def all_modes(work: Path) -> dict:
    engine, source, out = open_engine(work / "v0"), Source(work), {}
    try:
        for mode, base, target in MODES:
            out[mode] = await refit_while_it_generates(engine, source, mode, base, target)
    finally:
        engine.shutdown()
    return out


async def fresh(work: Path, version: str, requests: dict[str, dict]) -> dict:
    """A fresh engine, and how it goes on with requests that another engine had begun under older weights."""
    from deltarefit.integrations.sglang import SglangEngine

    engine = open_engine(work / version)
    try:
        driver = SglangEngine(engine, in_flight="retract", loop=asyncio.get_running_loop())
        out = {"state": await asyncio.to_thread(state_of, driver)}
        for mode, request in requests.items():
            await engine.tokenizer_manager.flush_cache()
            begun = request["tokens"][: request["spans"][-1]["start"]]
            out[mode] = await generate(engine, PROMPT + begun, NUM_COMPARED)
            out[mode]["warm"] = await generate(engine)
        await asyncio.to_thread(driver.close)
        return out
    finally:
        engine.shutdown()


async def main(work: Path) -> dict:
    out = await all_modes(work)
    (work / "serving.json").write_text(json.dumps(out))
    return out | {"fresh": await fresh(work, "v1", {mode: out[mode]["running"] for mode in ("retract", "in_place")})}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    result = asyncio.run(main(directory))
    (directory / "serving.json").write_text(json.dumps(result))
