"""One rank of a bare vLLM model that is refitted with payloads from files: ``vllm_rank.py <work> <rank> <world>``.

Reads orders and writes answers, one JSON document a line. The first order is answered with where the plan lies; each source
then begins anew at policy 0.
"""

import json
import os
import sys
from pathlib import Path

from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm

os.environ.update(ENVIRONMENT)

from deltarefit import payload
from deltarefit.bits import spec_of
from deltarefit.canonical import Catalog
from deltarefit.receiver import RankReceiver, ReceiverSettings
from deltarefit.testing.checkpoints import load_tensors
from deltarefit.testing.oracle import differing, plan_for, raw_state

WORK, RANK, WORLD = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.environ["VLLM_DIST_IDENT"] = f"{WORK.parent.name}-{WORK.name}"  # names shared memory: runs must not meet in it
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the engine prints goes to the log


def main():
    bare = BareVllm(WORK / "rendezvous", rank=RANK, world=WORLD)
    config = bare.configure(WORK / "v0")
    versions = [load_tensors(WORK / f"v{version}") for version in range(3)]
    catalog = Catalog(spec_of(name, tensor) for name, tensor in versions[0].items())
    fresh = [raw_state(bare.build(config, weights)) for weights in versions]
    at, model, receiver, plan = None, None, None, None
    for line in sys.stdin:
        order = json.loads(line)
        if order["case"] != at:
            at, model = order["case"], bare.build(config, versions[0])
            load = lambda weights, model=model: bare.load(config, model, weights)  # noqa: E731
            receiver = RankReceiver(model, load, settings=ReceiverSettings(verify_writes=True))
            plan = plan_for([receiver.prewarm(catalog)], catalog)
        if at == "planned":
            path = WORK / f"plan{RANK}"
            path.write_bytes(plan.to_wire())
            answer = {"plan": str(path)}
        else:
            receiver.prepare(plan)
            for payload_path in order["payloads"]:
                receiver.apply(payload.decode(Path(payload_path).read_bytes(), catalog=catalog))
            receiver.synchronize()
            answer = {"wrong": differing(raw_state(model), fresh[order["version"]])}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


main()
