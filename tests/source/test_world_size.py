"""A training job that comes back with another number of ranks: its baseline is made anew, and digests say whether it fits."""

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from pair import SETTINGS, Pair, Policy, perturb  # noqa: E402
from source_cases import row_shards  # noqa: E402

import deltarefit  # noqa: E402
from deltarefit import payload  # noqa: E402
from deltarefit.bits import logical_words, spec_of  # noqa: E402
from deltarefit.canonical import Catalog  # noqa: E402
from deltarefit.source import open_source  # noqa: E402
from deltarefit.testing.collective import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch


class RowShards:
    """A rank's rows of every tensor of a policy, in memory of their own, filled from the whole policy when told."""

    def __init__(self, policy, collective):
        self._policy = policy
        self._collective = collective
        self._tasks = []
        for name, tensor in policy.state_dict().items():
            task = row_shards(spec_of(name, tensor), collective.world_size)[collective.rank]
            self._tasks.append(task)
        self.load()

    def load(self):
        for task in self._tasks:
            words = logical_words(self._policy.state_dict()[task.spec.name])
            for piece in task.pieces:
                start = piece.canonical.offset
                task.words()[:] = words[start : start + piece.num_elements]

    def catalog(self):
        return Catalog(spec_of(name, tensor) for name, tensor in self._policy.state_dict().items())

    def tasks(self):
        return self._tasks

    def barrier(self):
        self._collective.barrier()


class CountingSender:
    """Counts the elements that payloads carry, per policy version."""

    def __init__(self, inner, counts):
        self._inner = inner
        self._counts = counts

    def send(self, payload_id, data):
        received = payload.decode(data)
        version = received.header.target_version
        self._counts[version] = self._counts.get(version, 0) + sum(item.count for item in received.items)
        self._inner.send(payload_id, data)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def train(world_size, run, policy, seeds, *, sharded):
    """Refit once per seed on so many ranks; the reports, which are equal on all of them, and the elements sent per version."""
    counts = [{} for _ in range(world_size)]

    def work(collective):
        mine = Policy()
        mine.load_state_dict(policy.state_dict())
        adapter = RowShards(mine, collective) if sharded else None
        options = {"adapter": adapter} if sharded else {}
        options["wrap_sender"] = lambda sender: CountingSender(sender, counts[collective.rank])
        publisher = deltarefit.Publisher(mine, run=run, settings=SETTINGS, collective=collective, **options)
        with publisher:
            reports = []
            for seed in seeds:
                perturb(mine, seed)
                if sharded:
                    adapter.load()
                reports.append(publisher.refit())
            return reports

    results = run_ranks(world_size, work)
    assert not [result for result in results if isinstance(result, Exception)], results
    for seed in seeds:
        perturb(policy, seed)
    sent = [sum(count.get(report.policy_version, 0) for count in counts) for report in results[0]]
    return results[0], sent


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (3, 1)])
def test_another_number_of_ranks_goes_on_where_the_others_stopped(tmp_path, before, after, sharded):
    with Pair(tmp_path) as pair:
        first, _ = train(before, pair.run, pair.policy, (1, 2), sharded=sharded)
        pair.assert_equal()
        second, sent = train(after, pair.run, pair.policy, (3, 4), sharded=sharded)
        pair.assert_equal()
    assert [report.policy_version for report in (*first, *second)] == [1, 2, 3, 4]
    assert all(report.attempts == 1 for report in second)
    assert sent == [report.changed_elements for report in second], "only changes: digests showed that the base fits"
    assert all(count < report.total_elements / 2 for count, report in zip(sent, second, strict=True))


def test_ranks_that_come_back_with_other_weights_send_everything(tmp_path):
    """The baseline is what the new ranks hold; receivers hold the committed policy, and digests tell the two apart."""
    with Pair(tmp_path) as pair:
        train(2, pair.run, pair.policy, (1, 2), sharded=True)
        other = Policy(seed=7)
        (report,), sent = train(3, pair.run, other, (5,), sharded=True)
        pair.policy.load_state_dict(other.state_dict())
        pair.assert_equal()
    assert report.policy_version == 3
    assert sent == [report.total_elements]


def test_shards_of_four_ranks_and_of_two_make_the_same_policy():
    policy = Policy()

    def digests(world_size):
        def work(collective):
            source = open_source(RowShards(policy, collective), collective)
            return source.owner.digests()

        total = {}
        for part in run_ranks(world_size, work):
            for name, digest in part.items():
                total[name] = total[name] + digest if name in total else digest
        return total

    assert digests(4) == digests(2) == digests(1)
    assert np.array_equal(sorted(digests(1)), sorted(policy.state_dict()))
