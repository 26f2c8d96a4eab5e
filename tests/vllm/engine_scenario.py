"""Refits a real vLLM engine and loads fresh ones beside it; writes what each held and generated as ``SCENARIO.json``.

A program of its own, because engines leave settings, threads and process groups behind:
``python engine_scenario.py SCENARIO WORK_DIRECTORY``. Checkpoints ``v0``, ``v1`` and ``v2`` lie in the work directory.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from deltarefit.runtime.clock import SystemClock

CLOCK = SystemClock()
NUM_RUNNING_TOKENS = 400  # of the request that runs when a refit begins: enough to be still running
PROMPT = [5 + (7 * i) % 240 for i in range(140)]  # longer than one KV block of 128 tokens, so that its prefix is cached


def environment() -> dict[str, str]:
    """What a CPU engine of this test needs; read by vLLM when it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if sys.argv[1:2] == ["tensor_parallel"] else "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def engine_arguments(checkpoint: Path, num_ranks: int) -> dict:
    return {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 480,
        "max_num_seqs": 4,
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "tensor_parallel_size": num_ranks,
        "distributed_executor_backend": "mp" if num_ranks > 1 else "uni",
        "weight_transfer_config": {"backend": "deltarefit"},
    }


def state_of(driver) -> list[dict]:
    return [{name: [raw.dtype, list(raw.shape), raw.sha256] for name, raw in rank.items()} for rank in driver.raw_state()]


class Engine:
    """A real engine with the deltarefit backend."""

    def __init__(self, checkpoint: Path, num_ranks: int = 1, draft: Path | None = None) -> None:
        from deltarefit.integrations.vllm import VllmEngine
        from vllm import LLM

        begun = CLOCK.monotonic_s()
        arguments = engine_arguments(checkpoint, num_ranks)
        if draft is not None:
            arguments["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        self.llm = LLM(**arguments)
        self.start_s = CLOCK.monotonic_s() - begun
        self.driver = VllmEngine(self.llm)

    def generate(self) -> dict:
        """Tokens and logprobs (exactly, as hexadecimal floats) of a greedy completion; how much of the prompt was cached."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True, logprobs=1)
        answer = self.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        tokens = list(answer.outputs[0].token_ids)
        logprobs = [step[token].logprob.hex() for token, step in zip(tokens, answer.outputs[0].logprobs, strict=True)]
        return {"tokens": tokens, "logprobs": logprobs, "cached_tokens": answer.num_cached_tokens}

    def state(self) -> list[dict]:
        return state_of(self.driver)

    def changes(self) -> list[str]:
        """What vLLM's post-load step did to the weights, a line each."""
        from deltarefit.integrations.exchange import changed_after_load

        return [line for lines in self.llm.apply_model(changed_after_load) for line in lines]

    def addresses(self) -> list[dict]:
        return [{name: raw.address for name, raw in rank.items()} for rank in self.driver.raw_state()]

    def stop(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.driver.close()
        self.llm.llm_engine.engine_core.shutdown()
        del self.driver, self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


class Source:
    """The training side in short: what one owner would send for a whole checkpoint."""

    def __init__(self, work: Path, draft: bool = False, versions: tuple[str, ...] = ("v0", "v1", "v2")) -> None:
        from deltarefit.bits import logical_words, spec_of
        from deltarefit.canonical import Catalog
        from deltarefit.testing.checkpoints import load_tensors

        tensors = {version: load_tensors(work / version) for version in versions}
        for version in ("v0", "v1") if draft else ():
            tensors[version] |= {f"draft.{name}": t for name, t in load_tensors(work / f"draft_{version}").items()}
        self.catalog = Catalog(spec_of(name, tensor) for name, tensor in tensors[versions[0]].items())
        self.words = {v: {name: logical_words(t) for name, t in named.items()} for v, named in tensors.items()}

    def pieces(self, name: str):
        from deltarefit.pieces import Piece, whole

        view = whole(self.catalog[name].shape)
        return (Piece(view, view).normalised(),)

    def digests(self, version: str) -> dict:
        from deltarefit.kernels import digest

        return {name: digest(self.words[version][name], self.pieces(name)) for name in self.catalog}

    def payload(self, plan, mode, base: str, target: str) -> bytes:
        from deltarefit.ids import OwnerId, PolicyVersion, attempt_id
        from deltarefit.kernels import scan
        from deltarefit.payload import encode

        items = []
        for name, spec in self.catalog.items():
            found = scan(
                spec,
                self.words[target][name],
                self.words[base][name],
                self.pieces(name),
                plan.encoding(name, mode),
                everything=name in plan.dense,
            )
            items += [found.item] if found.item is not None else []
        return encode(
            items,
            attempt=attempt_id(number_of(target), 1, "0a0b0c0d"),
            owner=OwnerId(0),
            sequence=0,
            base_version=PolicyVersion(number_of(base)),
            target_version=PolicyVersion(number_of(target)),
            plan_digest=plan.digest,
        )


def number_of(version: str) -> int:
    return int(version.rpartition("v")[2])


def make_plan(driver, source: Source):
    from deltarefit.plan import RefitPlan
    from deltarefit.receiver import merge_reports
    from deltarefit.records import Encoding

    merged = merge_reports(driver.prewarm(source.catalog), source.catalog)
    encodings = {name: Encoding(code) for name, code in merged.encodings.items()}
    return RefitPlan(source.catalog, encodings, num_owners=1, dense=frozenset(merged.dense))


def refit(driver, source: Source, plan, mode, base: str, target: str) -> dict:
    """One refit as the receiver's agent runs it."""
    data = source.payload(plan, mode, base, target)
    driver.prepare(plan)
    driver.close_gate(120.0)
    begun = CLOCK.monotonic_s()
    written = driver.apply(data)
    driver.synchronize()
    apply_s = CLOCK.monotonic_s() - begun
    digests = check_digests(driver, source, target)
    driver.drop_caches()
    driver.publish(number_of(target))
    driver.reopen_gate()
    return {"written": written, "nbytes": len(data), "apply_s": apply_s, **digests}


def check_digests(driver, source: Source, version: str) -> dict:
    from deltarefit.receiver import merge_digests

    merged = merge_digests(driver.digests(), source.catalog)
    want = source.digests(version)
    proved = [name for name, digest in merged.items() if digest is not None]
    return {"proved": len(proved), "disproved": [name for name in proved if merged[name] != want[name]]}


def one_rank(work: Path) -> dict:
    """Difference refit to v1, overwrite refit to v2; fresh engines of both."""
    from deltarefit.ids import EncodingMode

    source = Source(work)
    engine = Engine(work / "v0")
    out: dict = {"start_s": engine.start_s, "tensors": len(source.catalog), "vllm": engine.driver.name}
    out["v0"] = {"state": engine.state(), "cold": engine.generate(), "warm": engine.generate()}
    out["packed"] = engine.changes()
    addresses = engine.addresses()
    plan = make_plan(engine.driver, source)
    out["encodings"] = sorted({encoding.name for encoding in plan.encodings.values()})
    out["dense"] = sorted(plan.dense)
    out["base"] = check_digests(engine.driver, source, "v0")
    for mode, base, target in ((EncodingMode.MIXED, "v0", "v1"), (EncodingMode.OVERWRITE, "v1", "v2")):
        out[target] = refit(engine.driver, source, plan, mode, base, target)
        out[target] |= {
            "state": engine.state(),
            "generated": engine.generate(),
            "weight_version": engine.llm.get_weight_version(),
        }
    out["moved"] = [a != b for a, b in zip(addresses, engine.addresses(), strict=True)]
    out["refused"] = refusal(lambda: engine.driver.apply(b"not a payload"))
    engine.stop()
    for version in ("v1", "v2"):
        fresh = Engine(work / version)
        out[version] |= {"fresh_state": fresh.state(), "fresh_generated": fresh.generate()}
        fresh.stop()
    return out


def packed_convolution(work: Path) -> dict:
    """A gated delta net, whose short convolution vLLM packs and keeps unpacked too."""
    from deltarefit.ids import EncodingMode
    from deltarefit.testing.bare_vllm import missing_kernels

    source = Source(work, versions=("delta_net_v0", "delta_net_v1"))
    engine = Engine(work / "delta_net_v0")
    out: dict = {"packed": engine.changes(), "before": engine.generate(), "missing": missing_kernels("amx")}
    plan = make_plan(engine.driver, source)
    out["refit"] = refit(engine.driver, source, plan, EncodingMode.MIXED, "delta_net_v0", "delta_net_v1")
    out |= {"state": engine.state(), "generated": engine.generate()}
    engine.stop()
    fresh = Engine(work / "delta_net_v1")
    out |= {"fresh_state": fresh.state(), "fresh_generated": fresh.generate()}
    fresh.stop()
    return out


def tensor_parallel(work: Path) -> dict:
    """Two ranks in two processes."""
    from deltarefit.ids import EncodingMode

    source = Source(work)
    engine = Engine(work / "v0", 2)
    out: dict = {"start_s": engine.start_s, "tensors": len(source.catalog)}
    addresses = engine.addresses()
    plan = make_plan(engine.driver, source)
    out["base"] = check_digests(engine.driver, source, "v0")
    out["v1"] = refit(engine.driver, source, plan, EncodingMode.MIXED, "v0", "v1")
    out["v1"] |= {"state": engine.state(), "generated": engine.generate(), "weight_version": engine.llm.get_weight_version()}
    out["moved"] = [a != b for a, b in zip(addresses, engine.addresses(), strict=True)]
    out["refused"] = refusal(lambda: engine.driver.apply(b"not a payload"))
    engine.stop()
    fresh = Engine(work / "v1", 2)
    out["v1"] |= {"fresh_state": fresh.state(), "fresh_generated": fresh.generate()}
    fresh.stop()
    return out


def speculative(work: Path) -> dict:
    """An engine that speculates with a draft model; policy and draft are refitted in one session."""
    from deltarefit.ids import EncodingMode
    from deltarefit.integrations.vllm import VllmEngine

    source, alone = Source(work, draft=True), Source(work)
    engine = Engine(work / "v0", draft=work / "draft_v0")
    out: dict = {"tensors": len(source.catalog), "refused": refusal(lambda: engine.driver.prewarm(alone.catalog))}
    plan = make_plan(engine.driver, source)
    out["base"] = check_digests(engine.driver, source, "v0")
    out["v0"] = {"state": engine.state()}
    out["v1"] = refit(engine.driver, source, plan, EncodingMode.MIXED, "v0", "v1")
    out["v1"] |= {"state": engine.state(), "generated": engine.generate()}
    engine.driver.close()
    engine.driver = VllmEngine(engine.llm, refit_drafts=False)
    out["kept"] = {"tensors": len(engine.driver.prewarm(alone.catalog)[0].routes), "names": sorted(engine.state()[0])}
    engine.stop()
    fresh = Engine(work / "v1", draft=work / "draft_v1")
    fresh.driver.prewarm(source.catalog)
    out["v1"] |= {"fresh_state": fresh.state(), "fresh_generated": fresh.generate()}
    fresh.stop()
    return out


def served(work: Path) -> dict:
    """An ``AsyncLLM`` in its own process, refitted from another thread while it generates: wait, keep and abort."""
    import asyncio

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import SamplingParams

    source = Source(work)

    async def generate(llm, prompt: list[int], num_tokens: int, request_id: str, begun: asyncio.Event | None = None) -> dict:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True)
        async for answer in llm.generate({"prompt_token_ids": prompt}, params, request_id):
            last = answer
            if begun is not None:
                begun.set()
        return {"tokens": list(last.outputs[0].token_ids), "finish_reason": last.outputs[0].finish_reason}

    async def run() -> dict:
        arguments = engine_arguments(work / "v0", 1)
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        loop = asyncio.get_running_loop()
        out = {}
        for policy, base, target in (("wait", "v0", "v1"), ("keep", "v1", "v2"), ("abort", "v0", "v2")):
            begun = asyncio.Event()
            request = asyncio.create_task(generate(llm, [9, 8, 7], NUM_RUNNING_TOKENS, f"running while {policy}", begun))
            await begun.wait()
            out[policy] = await asyncio.to_thread(one_refit, llm, loop, source, policy, base, target)
            out[policy] |= {"running": await request, "generated": await generate(llm, PROMPT, 16, f"after {policy}")}
            out[policy]["weight_version"] = await llm.get_weight_version()
        llm.shutdown()
        return out

    return asyncio.run(run())


def one_refit(llm, loop, source: Source, policy: str, base: str, target: str) -> dict:
    from deltarefit.ids import EncodingMode
    from deltarefit.integrations.vllm import VllmEngine

    driver = VllmEngine(llm, loop=loop, in_flight=policy)
    plan = make_plan(driver, source)
    mode = EncodingMode.MIXED if policy == "wait" else EncodingMode.OVERWRITE
    out = refit(driver, source, plan, mode, base, target)
    out["state"] = state_of(driver)
    driver.close()
    return out


def refusal(call) -> list[str]:
    from deltarefit.errors import RefitError

    try:
        call()
    except RefitError as error:
        return [type(error).__name__, str(error)]
    return ["", "nothing was refused"]


if __name__ == "__main__":
    os.environ.update(environment())
    scenarios = {
        "one_rank": one_rank,
        "packed_convolution": packed_convolution,
        "served": served,
        "speculative": speculative,
        "tensor_parallel": tensor_parallel,
    }
    scenario = scenarios[sys.argv[1]]
    result = scenario(Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(json.dumps(result))
