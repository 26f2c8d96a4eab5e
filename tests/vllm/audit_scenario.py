"""Audits a two-rank vLLM engine after single bits were flipped in it, and writes what was found as JSON.

A program of its own: ``python audit_scenario.py WORK``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="0|1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
)

FLIPS = {
    "a row of rank 1's experts": (1, "model.layers.1.mlp.experts.routed_experts.w2_weight", 3),
    "a norm that both ranks hold": (0, "model.layers.0.input_layernorm.weight", 5),
    "query rows of rank 0": (0, "model.layers.0.self_attn.qkv_proj.weight", 1),
    "a padding row of the vocabulary, on rank 1": (1, "model.embed_tokens.weight", 127),
}


def main(work: Path) -> None:
    import torch

    import deltarefit
    from deltarefit.testing.checkpoints import perturbed, tiny_model
    from vllm import LLM

    model = tiny_model("qwen3_moe")
    model.save_pretrained(work / "v0")
    llm = LLM(
        model=str(work / "v0"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        dtype="bfloat16",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        weight_transfer_config={"backend": "deltarefit"},
        worker_extension_cls="flip_extension.FlipExtension",
    )
    run = (work / "run").as_uri()
    found = {}
    with (
        deltarefit.Receiver.attach(llm, run=run, name="rollout") as receiver,
        deltarefit.Publisher(model, run=run) as publisher,
    ):
        with torch.no_grad():
            model.load_state_dict(perturbed(dict(model.state_dict()), 0.03, seed=1))
        publisher.refit()
        found["clean"] = publisher.audit().describe()
        for what, flip in FLIPS.items():
            with receiver.serving(60.0):
                llm.collective_rpc("flip_bit", args=flip)
            (shown,) = publisher.audit().receivers
            found[what] = {"differing": shown.differing, "disagreeing": shown.disagreeing, "drifted": shown.drifted}
            with receiver.serving(60.0):
                llm.collective_rpc("flip_bit", args=flip)
        found["mended"] = publisher.audit().describe()
        found["covered"] = shown.covered
    (work / "audit.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
