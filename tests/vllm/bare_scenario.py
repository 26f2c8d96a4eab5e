"""Refits bare vLLM models (no engine) through their own loaders, and writes what came out as JSON.

A program of its own, one process a rank: ``python bare_scenario.py WORK RANK WORLD (tp|ep) ARCHITECTURE...``
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm, allow_ungated_experts

os.environ.update(ENVIRONMENT)

import msgspec
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words, spec_of
from deltarefit.canonical import Catalog
from deltarefit.errors import RefitError
from deltarefit.ids import EncodingMode
from deltarefit.pieces import Piece, StridedView
from deltarefit.receiver import ApplyPath, RankReceiver, ReceiverSettings
from deltarefit.records import Encoding
from deltarefit.testing.checkpoints import load_tensors, three_versions
from deltarefit.testing.oracle import delta_payload, differing, plan_for, raw_state

WORK, RANK, WORLD, EXPERT_PARALLEL = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "ep"


BARE = BareVllm(WORK / f"rendezvous-{WORLD}-{EXPERT_PARALLEL}", rank=RANK, world=WORLD, expert_parallel=EXPERT_PARALLEL)


def addresses(model) -> dict[str, int]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.data_ptr() for name, tensor in named}


def source_digest(tensor) -> str:
    words = logical_words(tensor)
    view = StridedView(0, (words.size,), (1,))
    return kernels.digest(words, [Piece(view, view)]).hex()


def shown(receiver) -> dict:
    return msgspec.to_builtins(receiver.digests())


class Refits:
    """One architecture on this rank, through policies v0, v1, v2."""

    def __init__(self, architecture: str, config) -> None:
        self.config = config
        self.versions = three_versions(load_tensors(WORK / architecture))
        self.catalog = Catalog(spec_of(name, tensor) for name, tensor in self.versions[0].items())
        self.fresh = [raw_state(BARE.build(config, weights)) for weights in self.versions]

    def receiver(self, path: ApplyPath, model, **settings):
        def load(weights):
            return BARE.load(self.config, model, weights)

        return RankReceiver(model, load, settings=ReceiverSettings(path=path, verify_writes=True, **settings))

    def refit(self, path: ApplyPath, prefer: Encoding, **settings) -> dict:
        """v0 to v1 with masks, then v2 by overwrites over a mixture that a failed attempt left."""
        model = BARE.build(self.config, self.versions[0])
        before, places = raw_state(model), addresses(model)
        receiver = self.receiver(path, model, **settings)
        report = receiver.prewarm(self.catalog)
        result = {"prewarm_changed": differing(raw_state(model), before), "equal": []}
        plan = plan_for([report], self.catalog, prefer=prefer)
        receiver.prepare(plan)
        receiver.apply(delta_payload(plan, self.versions[0], self.versions[1]))
        receiver.synchronize()
        result["wrong_v1"] = differing(raw_state(model), self.fresh[1])
        failed = delta_payload(plan, self.versions[1], self.versions[2], attempt="v000002-a1-test")
        half = type(failed)(failed.header, failed.items[::2], failed.nbytes, failed.digest)
        receiver.apply(half)
        receiver.prepare(plan)
        retry = delta_payload(plan, self.versions[1], self.versions[2], mode=EncodingMode.OVERWRITE, attempt="v000002-a2-test")
        receiver.apply(retry)
        receiver.synchronize()
        result["wrong_v2"] = differing(raw_state(model), self.fresh[2])
        result["moved"] = [name for name, place in addresses(model).items() if places[name] != place]
        result["encodings"] = sorted({encoding.name for encoding in plan.encodings.values()})
        return result

    def audit(self) -> dict:
        """A dense attempt, after which everything is proven; then one flipped bit in every storage in turn."""
        model = BARE.build(self.config, self.versions[0])
        receiver = self.receiver(ApplyPath.COMPILED, model)
        report = receiver.prewarm(self.catalog)
        plan = plan_for([report], self.catalog)
        dense = type(plan)(plan.catalog, plan.encodings, 1, frozenset(self.catalog))
        receiver.prepare(dense)
        receiver.apply(delta_payload(dense, self.versions[0], self.versions[1]))
        receiver.synchronize()
        proven, rest = shown(receiver), receiver.residue()
        unnoticed = []
        for name, parameter in model.named_parameters():
            if not parameter.numel():
                continue
            words = parameter.detach().reshape(-1).view(torch.uint8)
            place = words.numel() // 3
            words[place] ^= 4
            if shown(receiver) == proven and receiver.residue() == rest:
                unnoticed.append(name)
            words[place] ^= 4
        routes = {name: [route.kind, route.cast, route.is_dense] for name, route in report.routes.items()}
        source = {name: source_digest(tensor) for name, tensor in self.versions[1].items()}
        return {
            "wrong": differing(raw_state(model), self.fresh[1]),
            "digests": proven,
            "source": source,
            "unnoticed": unnoticed,
            "routes": routes,
            "specs": {name: [spec.dtype, list(spec.shape)] for name, spec in self.catalog.items()},
        }


def main() -> None:
    allow_ungated_experts()
    results: dict[str, object] = {}
    for architecture in sys.argv[5:]:
        try:
            refits = Refits(architecture, BARE.configure(WORK / architecture))
            results[architecture] = {
                "compiled": refits.refit(ApplyPath.COMPILED, Encoding.DIFFERENCE),
                "compiled xor": refits.refit(ApplyPath.COMPILED, Encoding.XOR),
                "torch": refits.refit(ApplyPath.COMPILED, Encoding.DIFFERENCE, torch_writes=True),
                "scratch": refits.refit(ApplyPath.SCRATCH, Encoding.XOR),
                "audit": refits.audit(),
            }
        except (RefitError, AssertionError, ValueError, RuntimeError, TypeError, KeyError):
            results[architecture] = {"error": traceback.format_exc()}
    (WORK / f"bare-{RANK}-of-{WORLD}-{sys.argv[4]}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
