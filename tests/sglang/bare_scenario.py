"""Refits one bare SGLang model (no engine) through its own loader and writes what came out as JSON.

A program of its own, because SGLang keeps one configuration a process: ``python bare_scenario.py WORK ARCHITECTURE``.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from deltarefit.bits import spec_of
from deltarefit.canonical import Catalog
from deltarefit.errors import RefitError
from deltarefit.ids import EncodingMode
from deltarefit.integrations.sglang.derived import DerivedState, note_constants
from deltarefit.integrations.sglang.receiver import SglangReceiver
from deltarefit.receiver import ApplyPath, RankReceiver, ReceiverSettings, outcomes_of
from deltarefit.records import Encoding
from deltarefit.testing.bare_sglang import BareSglang, write_sglang_checkpoint
from deltarefit.testing.checkpoints import load_tensors, three_versions
from deltarefit.testing.oracle import delta_payload, differing, plan_for, raw_state

WORK, ARCHITECTURE = Path(sys.argv[1]), sys.argv[2]


def whole_state(model) -> dict[str, bytes]:
    """Parameters, buffers, and what SGLang derives from them outside of both."""
    derived = DerivedState(model).tensors()
    kept = {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in derived.items()}
    return raw_state(model) | {f"derived {name}": data for name, data in kept.items()}


def addresses(model) -> dict[str, int]:
    named = [*model.named_parameters(), *model.named_buffers(), *DerivedState(model).tensors().items()]
    return {name: tensor.data_ptr() for name, tensor in named}


class Refits:
    def __init__(self) -> None:
        checkpoint = write_sglang_checkpoint(WORK / ARCHITECTURE, ARCHITECTURE)
        self.bare = BareSglang(checkpoint, WORK / f"rendezvous-{ARCHITECTURE}", watch=note_constants)
        self.versions = three_versions(load_tensors(checkpoint))
        self.catalog = Catalog(spec_of(name, tensor) for name, tensor in self.versions[0].items())
        self.fresh = [whole_state(self.bare.loaded(weights)) for weights in self.versions]

    def refit(self, path: ApplyPath, prefer: Encoding) -> dict:
        """v0 to v1 with masks, then v2 by overwrites over a mixture that a failed attempt left."""
        model = self.bare.loaded(self.versions[0])
        before, places = whole_state(model), addresses(model)
        receiver = SglangReceiver(model, model.load_weights, settings=ReceiverSettings(path=path, verify_writes=True))
        report = receiver.prewarm(self.catalog)
        result = {"prewarm_changed": differing(whole_state(model), before)}
        plan = plan_for([report], self.catalog, prefer=prefer)
        receiver.prepare(plan)
        receiver.apply(delta_payload(plan, self.versions[0], self.versions[1]))
        receiver.synchronize()
        result["wrong_v1"] = differing(whole_state(model), self.fresh[1])
        failed = delta_payload(plan, self.versions[1], self.versions[2], attempt="v000002-a1-test")
        receiver.apply(type(failed)(failed.header, failed.items[::2], failed.nbytes, failed.digest))
        receiver.prepare(plan)
        retry = delta_payload(plan, self.versions[1], self.versions[2], mode=EncodingMode.OVERWRITE, attempt="v000002-a2-test")
        receiver.apply(retry)
        receiver.synchronize()
        result["wrong_v2"] = differing(whole_state(model), self.fresh[2])
        result["moved"] = [name for name, place in addresses(model).items() if places[name] != place]
        result["outcomes"] = [msgspec.to_builtins(row) for row in outcomes_of(report, self.catalog)]
        return result

    def through_the_loader(self) -> dict:
        """The paper's path, one tensor at a time; a loader that wants two tensors in one call is refused there."""
        try:
            return self.refit(ApplyPath.SCRATCH, Encoding.XOR)
        except RefitError as error:
            return {"refused": f"{type(error).__name__}: {error}"}

    def plain_receiver(self) -> str:
        """What a receiver that knows nothing of SGLang says about the same model and loader."""
        model = self.bare.loaded(self.versions[0])
        before = whole_state(model)
        try:
            RankReceiver(model, model.load_weights).prewarm(self.catalog)
        except RefitError as error:
            return f"{type(error).__name__}: {error}"
        return f"accepted, changed {differing(whole_state(model), before)}"


def main() -> None:
    try:
        refits = Refits()
        result = {
            "changed_v1": len(differing(refits.fresh[1], refits.fresh[0])),
            "state": sorted(refits.fresh[0]),
            "compiled": refits.refit(ApplyPath.COMPILED, Encoding.DIFFERENCE),
            "scratch": refits.through_the_loader(),
            "plain": refits.plain_receiver(),
        }
    except (RefitError, AssertionError, ValueError, RuntimeError, TypeError, KeyError, AttributeError):
        result = {"error": traceback.format_exc()}
    (WORK / f"{ARCHITECTURE}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
