"""Every kind of source against every receiver layout: after each refit, raw bytes equal a dense reload of the same policy."""

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from source_kinds import HYBRID_SOURCES, SOURCES, Policies, build  # noqa: E402
from toy_receivers import LAYOUTS, ranks_of  # noqa: E402

from deltarefit import kernels, payload  # noqa: E402
from deltarefit.bits import logical_words  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.receiver import RankReceiver, ReceiverSettings  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.testing.oracle import differing, plan_for, raw_state  # noqa: E402

pytestmark = pytest.mark.torch
MODES = {1: EncodingMode.MIXED, 2: EncodingMode.OVERWRITE}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return Policies("qwen3_moe", tmp_path_factory.mktemp("policies"))


class Rollout:
    """A receiver layout at policy 0."""

    def __init__(self, layout, policies, published):
        self._layout, self._policies, self._published = layout, policies, published
        self.models = self._loaded(0)
        self.receivers = [
            RankReceiver(model, model.load_weights, settings=ReceiverSettings(verify_writes=True)) for model in self.models
        ]
        self.plan = plan_for([receiver.prewarm(policies.catalog) for receiver in self.receivers], policies.catalog)

    def _loaded(self, version):
        models = ranks_of(self._layout, self._policies)
        for model in models:
            model.load_weights(list(self._published(self._policies.tensors[version]).items()))
        return models

    def apply(self, sent):
        for receiver in self.receivers:
            receiver.prepare(self.plan)
            for data in sent:
                receiver.apply(payload.decode(data, catalog=self.plan.catalog))
            receiver.synchronize()

    def wrong(self, version):
        fresh = self._loaded(version)
        return [differing(raw_state(model), raw_state(new)) for model, new in zip(self.models, fresh, strict=True)]


@pytest.mark.parametrize("source", SOURCES)
def test_refits_equal_dense_reloads_in_every_layout(policies, source):
    job = SOURCES[source](policies).open()
    rollouts = {layout: Rollout(layout, policies, job.published) for layout in LAYOUTS}
    for version, mode in MODES.items():
        job.load(version)
        assert_says_what_changed(job, policies, version)
        for layout, rollout in rollouts.items():
            rollout.apply(build(job, rollout.plan, mode))
            assert rollout.wrong(version) == [[]] * len(rollout.models), (layout, version)
        job.commit()
    assert all(any(len(found) > 0 for found in Rollout(layout, policies, job.published).wrong(2)) for layout in LAYOUTS)


def assert_says_what_changed(job, policies, version):
    """Payloads of one policy differ in how they are cut, never in what they say."""
    plan = RefitPlan(policies.catalog, dict.fromkeys(policies.catalog, Encoding.DIFFERENCE), len(job.ranks))
    found = said(build(job, plan, EncodingMode.MIXED))
    expected = truth(*(job.published(policies.tensors[number]) for number in (version - 1, version)))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(mine, right) for name in found for mine, right in zip(found[name], expected[name], strict=True))


def said(sent):
    """Per tensor, positions and differences over all payloads, in order of position."""
    found = {}
    for data in sent:
        for item in payload.decode(data).items:
            pair = kernels.decode_positions(item), kernels.decode_values(item)
            found.setdefault(item.spec.name, []).append(pair)
    joined = {name: [np.concatenate(column) for column in zip(*pairs, strict=True)] for name, pairs in found.items()}
    return {name: (at[order := np.argsort(at)], values[order]) for name, (at, values) in joined.items()}


def truth(before, after):
    """The same, from two policies."""
    found = {}
    for name in before:
        old, new = logical_words(before[name]), logical_words(after[name])
        at = np.flatnonzero(old != new)
        if at.size:
            found[name] = (at, new[at] - old[at])
    return found


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("architecture", "kinds"), [("qwen3_moe", SOURCES), ("nemotron_h", HYBRID_SOURCES)])
def test_real_vllm_models_end_with_the_bits_of_a_dense_reload(tmp_path, architecture, kinds, world):
    """vLLM's own loaders on the far side: bare models on one and on two tensor-parallel ranks."""
    policies = Policies(architecture, tmp_path)
    for version in (1, 2):
        policies.model(version)  # writes the checkpoint
    with vllm_ranks(tmp_path, world) as ranks:
        (answers,) = exchange(ranks, [{"case": "planned"}], tmp_path)
        plan = RefitPlan.from_wire(Path(answers[0]["plan"]).read_bytes())
        for number, (source, make) in enumerate(kinds.items()):
            job = make(policies)
            if job.published(policies.tensors[0]) is not policies.tensors[0]:
                continue  # vLLM's side holds the plain policies
            job.open()
            orders = [order_of(job, plan, source, version, tmp_path / str(number)) for version in MODES]
            for shown in exchange(ranks, orders, tmp_path):
                assert [answer["wrong"] for answer in shown] == [[]] * world, (source, shown)


@contextlib.contextmanager
def vllm_ranks(work, world):
    """The processes of one vLLM model."""
    program = str(Path(__file__).with_name("vllm_rank.py"))
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            log = stack.enter_context((work / f"log{rank}").open("wb"))
            command = [sys.executable, program, str(work), str(rank), str(world)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        yield ranks
        for process in ranks:
            process.stdin.close()  # each ends by itself and leaves no shared memory behind
        assert [process.wait(60) for process in ranks] == [0] * world


def order_of(job, plan, source, version, directory):
    """Refit the job to this policy; what vLLM's ranks are told to do."""
    job.load(version)
    paths = []
    for place, data in enumerate(build(job, plan, MODES[version])):
        path = directory.with_name(f"payload-{directory.name}-{version}-{place}")
        path.write_bytes(data)
        paths.append(str(path))
    job.commit()
    return {"case": source, "version": version, "payloads": paths}


def exchange(ranks, orders, work):
    """Send every rank these orders one by one; their answers per order."""
    shown = []
    for order in orders:
        for process in ranks:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in ranks]
        logs = "\n".join((work / f"log{rank}").read_text(errors="replace")[-2000:] for rank in range(len(ranks)))
        assert all(answers), logs
        shown.append([json.loads(answer) for answer in answers])
    return shown
