"""Refits bare vLLM models whose weights vLLM packed after loading, and compares every storage with a fresh load.

A program of its own: ``python after_load_scenario.py WORK SELECTION CASE...``, a case being a checkpoint directory in WORK.
SELECTION says which of vLLM's kernels may be *selected*; none is ever run, for nothing here computes a forward pass:

* ``plain``: as on a CPU without AMX tiles.
* ``amx``: as on a CPU with AMX tiles; packing works without them.
* ``cuda``: classes made for CUDA, registered for CPU, whose post-load step is plain torch.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm, everything, missing_kernels, select_kernels

os.environ.update(ENVIRONMENT)

import torch

from deltarefit.bits import spec_of
from deltarefit.canonical import Catalog
from deltarefit.errors import RefitError
from deltarefit.ids import EncodingMode
from deltarefit.integrations.vllm.after_load import IGNORED, UNFILLED, VllmAfterLoad
from deltarefit.placement.reach import reach
from deltarefit.receiver import RankReceiver, ReceiverSettings, tensor_outcomes
from deltarefit.testing.checkpoints import load_tensors, perturbed, three_versions
from deltarefit.testing.oracle import delta_payload, differing, plan_for
from deltarefit.testing.quantised import next_codes

WORK, SELECTION = Path(sys.argv[1]), sys.argv[2]
BARE = BareVllm(WORK / f"rendezvous-after-load-{SELECTION}")


class Case:
    def __init__(self, name: str) -> None:
        self.config = BARE.configure(WORK / name)
        change = next_codes if "quantization_config" in (WORK / name / "config.json").read_text() else perturbed
        self.versions = three_versions(load_tensors(WORK / name), change)
        self.catalog = Catalog(spec_of(name, tensor) for name, tensor in self.versions[0].items())
        self.settings = ReceiverSettings(may_ignore=IGNORED, may_lack=UNFILLED)

    def after_load(self) -> VllmAfterLoad:
        return VllmAfterLoad(self.config, torch.device("cpu"))

    def run(self) -> dict:
        model = BARE.served(self.config, self.versions[0])
        before = everything(model)
        receiver = RankReceiver(model, model.load_weights, settings=self.settings, after_load=self.after_load())
        report = receiver.prewarm(self.catalog)
        result: dict = {"prewarm_changed": differing(everything(model), before)}
        plan = plan_for([report], self.catalog)
        result["encodings"] = sorted({encoding.name for encoding in plan.encodings.values()})
        receiver.prepare(plan)
        result["base"] = self.wrong_digests(receiver, 0)
        receiver.apply(delta_payload(plan, self.versions[0], self.versions[1]))
        receiver.synchronize()
        result["wrong_v1"] = differing(everything(model), everything(BARE.served(self.config, self.versions[1])))
        result["digests_v1"] = self.wrong_digests(receiver, 1)
        result["drift"] = receiver.drift()
        failed = delta_payload(plan, self.versions[1], self.versions[2], attempt="v000002-a1-test")
        receiver.apply(type(failed)(failed.header, failed.items[::2], failed.nbytes, failed.digest))
        receiver.prepare(plan)
        mode = EncodingMode.OVERWRITE
        receiver.apply(delta_payload(plan, self.versions[1], self.versions[2], mode=mode, attempt="v000002-a2-test"))
        receiver.synchronize()
        result["wrong_v2"] = differing(everything(model), everything(BARE.served(self.config, self.versions[2])))
        result["unnoticed"] = self.unnoticed(receiver, model)
        result["kinds"] = self.kinds(report)
        result["changed"] = len(differing(everything(model), before))
        return result

    def wrong_digests(self, receiver, version: int) -> list[str]:
        from deltarefit import kernels
        from deltarefit.bits import logical_words
        from deltarefit.pieces import Piece, StridedView

        wrong = []
        for name, shown in receiver.digests().items():
            words = logical_words(self.versions[version][name])
            view = StridedView(0, (words.size,), (1,))
            if shown.digest != kernels.digest(words, [Piece(view, view)]):
                wrong.append(name)
        return wrong

    @staticmethod
    def unnoticed(receiver, model) -> list[str]:
        """Paths of storages in which one flipped bit changes neither a digest nor what is watched beside them."""
        proven, unnoticed = receiver.digests(), []
        one_of_each = {path.rpartition(".")[2]: (path, t) for path, t in reach({"": model}).tensors.items()}
        for path, tensor in one_of_each.values():
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            if not raw.numel() or "rotary" in path or path.endswith(("_scale_cpu", "kv_cache")):
                continue
            place = raw.numel() // 3
            raw[place] ^= 4
            if receiver.digests() == proven and not receiver.drift():
                unnoticed.append(path)
            raw[place] ^= 4
        return unnoticed

    def kinds(self, report) -> dict[str, int]:
        from deltarefit.receiver import outcomes_of

        kinds: dict[str, int] = {}
        for row in outcomes_of(report, self.catalog):
            kinds[row.outcome] = kinds.get(row.outcome, 0) + row.nbytes
        return kinds


def main() -> None:
    if missing := missing_kernels(SELECTION):
        (WORK / f"after-load-{SELECTION}.json").write_text(json.dumps({"missing": missing}))
        return
    select_kernels(SELECTION)
    results: dict[str, object] = {}
    BARE.configure(WORK / "first")
    for name in sys.argv[3:]:
        try:
            case = Case(name)
            results[name] = case.run()
        except RefitError as error:
            rows = tensor_outcomes(BARE.served(case.config, case.versions[0]), lambda pairs: None, case.catalog,
                                   settings=case.settings, after_load=case.after_load())  # fmt: skip
            results[name] = {"refused": str(error), "rows": [[row.name, row.outcome, row.reason] for row in rows]}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        (WORK / f"after-load-{SELECTION}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
