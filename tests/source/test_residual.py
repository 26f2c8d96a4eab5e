"""Residual conversion between ranks: flags, dependencies, assembly, and what is sent (paper 4.3, A.1)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_cases import apply_buckets, plain, plan_for, random_words, spec, whole_task

from deltarefit.canonical import Catalog
from deltarefit.errors import AttemptFailedError, OperatorRequiredError, RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.pieces import StridedView, whole
from deltarefit.records import Encoding
from deltarefit.source import ResidualPart, SourceSettings, assembler_of, open_source, required_tensors
from deltarefit.source.assembly import assemble, decode_parts, encode_parts
from deltarefit.source.conversion import check_dependencies
from deltarefit.testing.collective import run_ranks

MIXED, OVERWRITE = EncodingMode.MIXED, EncodingMode.OVERWRITE
ONE_THREAD = SourceSettings(scan_threads=1, check_replicas=False)


# --- which tensors must be converted ---


def test_changes_reach_tensors_through_intermediates():
    """A to b to u1, a to u2, u3 apart."""
    dependencies = {"b": frozenset("a"), "u1": frozenset("b"), "u2": frozenset("a"), "u3": frozenset("c")}
    names = ["u1", "u2", "u3"]
    assert required_tensors({"a"}, names, dependencies) == {"u1", "u2"}
    assert required_tensors({"c"}, names, dependencies) == {"u3"}
    assert required_tensors(set(), names, dependencies) == set()


def test_unknown_dependencies_select_everything_on_any_change_and_nothing_on_none():
    names = [f"u{n}" for n in range(5)]
    assert required_tensors({"a"}, names, {}) == set(names)
    assert required_tensors(set(), names, {}) == set()


def test_dependencies_on_nothing_that_exists_are_refused():
    with pytest.raises(RejectedError, match=r"name \['gone'\]"):
        check_dependencies({"u"}, {"a"}, {"u": frozenset(["gone", "a"])})
    with pytest.raises(RejectedError, match=r"sources \['b'\] are read by no residual tensor"):
        check_dependencies({"u"}, {"a", "b"}, {"u": frozenset("a")})
    check_dependencies({"u", "v"}, {"a", "b"}, {"u": frozenset("a")})


def test_assemblers_are_fixed_by_names_and_spread():
    assert [assembler_of(f"u{n}", 4) for n in range(8)] == ASSEMBLERS
    assert {assembler_of(f"u{n}", 4) for n in range(20)} == {0, 1, 2, 3}


ASSEMBLERS = [3, 2, 2, 3, 2, 0, 0, 0]


# --- assembly ---


def part(tensor, start, words, dtype="<u2"):
    return ResidualPart(tensor, (StridedView(start, (len(words),), (1,)),), np.array(words, dtype))


def test_parts_are_put_in_place_whatever_their_order():
    tensor = spec("u", (2, 3))
    columns = ResidualPart(tensor, (StridedView(0, (2, 2), (3, 1)),), np.array([1, 2, 4, 5], "<u2"))
    last = ResidualPart(tensor, (StridedView(2, (2,), (3,)),), np.array([3, 6], "<u2"))
    for parts in ([(0, columns), (1, last)], [(1, last), (0, columns)]):
        assert assemble(tensor, parts).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_part_survives_the_way_between_ranks():
    tensor = spec("u", (2, 3), "F8_E4M3")
    sent = ResidualPart(tensor, (StridedView(0, (2, 2), (3, 1)), StridedView(2, (1,), (1,))), np.arange(5, dtype=np.uint8))
    (got,) = decode_parts(encode_parts([sent]), 0)
    assert (got.spec, got.views, got.words.tolist()) == (sent.spec, sent.views, sent.words.tolist())
    with pytest.raises(AttemptFailedError, match="residual parts from rank 3"):
        decode_parts(b"\x93garbage", 3)


def test_a_hole_fails_naming_the_first_missing_element():
    tensor = spec("u", (6,))
    with pytest.raises(AttemptFailedError, match=r"1 elements are in no part, first flat index 2; ranks \[0, 1\] gave parts"):
        assemble(tensor, [(0, part(tensor, 0, [1, 2])), (1, part(tensor, 3, [4, 5, 6]))])
    with pytest.raises(AttemptFailedError, match="6 elements are in no part"):
        assemble(tensor, [])


def test_overlapping_parts_must_agree_in_bits_not_in_values():
    tensor = spec("u", (4,))
    nan = [0x7FC0, 0x7FC0]
    assert assemble(tensor, [(0, part(tensor, 0, [1, *nan])), (1, part(tensor, 1, [*nan, 2]))]).tolist() == [1, *nan, 2]
    with pytest.raises(AttemptFailedError, match="ranks 0 and 1 give different bits for flat index 2"):
        assemble(tensor, [(0, part(tensor, 0, [1, 0, 0x0000])), (1, part(tensor, 2, [0x8000, 2]))])


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda t: part(spec("u", (4,), "F32"), 0, [0] * 4, "<u4"), r"rank 5 converted it as u F32\[4\]"),
        (lambda t: part(spec("u", (2, 2)), 0, [0] * 4), r"rank 5 converted it as u BF16\[2, 2\]"),
        (lambda t: part(t, 2, [0] * 4), "gives flat index 5, past the tensor's end"),
        (lambda t: ResidualPart(t, (whole((4,)),), np.zeros(3, "<u2")), "gives 3 words of uint16 for 4 elements"),
        (lambda t: ResidualPart(t, (whole((4,)),), np.zeros(4, "<u4")), "gives 4 words of uint32 for 4 elements"),
    ],
)
def test_a_part_of_another_tensor_is_refused(made, complaint):
    tensor = spec("u", (4,))
    with pytest.raises(AttemptFailedError, match=complaint):
        assemble(tensor, [(5, made(tensor))])


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 8)), max_size=8))
def test_assembly_succeeds_exactly_when_the_parts_cover_the_tensor(runs):
    tensor = spec("u", (20,))
    words = random_words(tensor)
    parts = [(n, part(tensor, start, words[start : start + length])) for n, (start, length) in enumerate(runs)]
    covered = {k for start, length in runs for k in range(start, min(20, start + length))}
    if len(covered) == 20:
        assert np.array_equal(assemble(tensor, parts), words)
    else:
        with pytest.raises(AttemptFailedError, match="are in no part"):
            assemble(tensor, parts)


# --- the stage between ranks ---


class Scaled:
    """Per layer: canonical = source * scale in float32, rounded to 16 bits; each rank holds and converts one part of the rows.

    The scale is one shared element that rank 0 owns. ``plain`` is sent directly.
    """

    def __init__(self, collective, rows=6, layers=3):
        self.rank, self.world_size = collective.rank, collective.world_size
        self.rows, self.layers = rows, layers
        each = -(-rows // self.world_size)
        self.start, self.stop = min(rows, self.rank * each), min(rows, (self.rank + 1) * each)
        rng = np.random.default_rng(0)
        every = rng.standard_normal((layers, rows, 4)).astype("<f4")
        self.shards = [every[layer, self.start : self.stop].copy() for layer in range(layers)]
        self.scale = np.full(layers, 1.5, "<f4")
        self.direct = random_words(spec("plain", (3, 3)))
        self.converted = 0
        self.lose = None

    def catalog(self):
        return Catalog([spec("plain", (3, 3)), *(self.spec(layer) for layer in range(self.layers))])

    def spec(self, layer):
        return spec(f"layers.{layer}", (self.rows, 4))

    def tasks(self):
        return [whole_task(spec("plain", (3, 3)), self.direct, range(self.world_size))]

    def barrier(self):
        pass

    def residual(self):
        return self

    def groups(self):
        return [(self.spec(layer),) for layer in range(self.layers)]

    def sources(self):
        found = []
        for layer in range(self.layers):
            source = spec(f"w{layer}", (self.rows, 4), "F32")
            task = whole_task(spec(f"w{layer}", (self.stop - self.start, 4), "F32"), self.shards[layer].reshape(-1).view("<u4"))
            object.__setattr__(task, "spec", source)
            object.__setattr__(task, "key", f"w{layer}@{self.rank}")
            object.__setattr__(task, "replicas", (self.rank,))
            found.append(task)
        return [*found, whole_task(spec("scale", (self.layers,), "F32"), self.scale.view("<u4"), range(self.world_size))]

    def dependencies(self):
        return {f"layers.{layer}": frozenset([f"w{layer}", "scale"]) for layer in range(self.layers)}

    def convert(self, specs):
        for tensor in specs:
            layer = int(tensor.name.split(".")[1])
            if self.stop > self.start and tensor.name != self.lose:
                self.converted += 1
                yield ResidualPart(
                    tensor, (StridedView(self.start * 4, (self.stop - self.start, 4), (4, 1)),), self.words(layer)
                )

    def words(self, layer):
        return ((self.shards[layer] * self.scale[layer]).view("<u4") >> 16).astype("<u2").reshape(-1)


def held_by(source):
    """What receivers hold of what this rank sends: a copy of everything, changed by items only."""
    return {tensor.name: np.zeros(tensor.num_elements, tensor.word_dtype) for tensor in source.catalog.values()}


def world(world_size, steps):
    """Run ``steps(scaled, source, collective)`` on every rank of a job with residual tensors."""

    def work(collective):
        scaled = Scaled(collective)
        source = open_source(scaled, collective, ONE_THREAD)
        return steps(scaled, source, collective)

    results = run_ranks(world_size, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def build(source, mode=MIXED, **plan):
    return list(source.owner.build(plan_for(*source.catalog.values(), **plan), mode))


def items(buckets):
    return {item.spec.name: item for bucket in buckets for item in bucket.items}


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_changed_element_converts_its_tensor_and_sends_only_that_element(world_size):
    def steps(scaled, source, collective):
        scaled.converted = 0
        if scaled.start <= 4 < scaled.stop:
            scaled.shards[1][4 - scaled.start, 2] *= 2
        buckets = build(source)
        source.owner.commit()
        again = build(source)
        return scaled.converted, [(i.spec.name, i.count) for i in items(buckets).values()], again

    results = world(world_size, steps)
    assert sum(len(sent) for _, sent, _ in results) == 1
    assert [sent for _, sent, _ in results if sent] == [[("layers.1", 1)]]
    assert {converted for converted, _, _ in results} <= {0, 1}
    assert [again for _, _, again in results] == [[]] * world_size


def test_a_changed_shared_scale_reaches_everything_converted_with_it():
    """Every other source bit is unchanged."""

    def steps(scaled, source, collective):
        scaled.scale[2] = 1.25
        buckets = build(source)
        digests = source.owner.candidate_digests()
        source.owner.commit()
        assert source.owner.digests() == digests
        return [(i.spec.name, i.count) for i in items(buckets).values()]

    sent = [one for result in world(3, steps) for one in result]
    assert [name for name, _ in sent] == ["layers.2"]
    assert 0 < sent[0][1] <= 24


@pytest.mark.parametrize("encoding", list(Encoding))
def test_receivers_end_with_the_bits_of_a_dense_conversion(encoding):
    def steps(scaled, source, collective):
        baseline = source.owner._residual.baseline
        held = {name: baseline.words(name).copy() for name in baseline.digests()}
        for layer in range(3):
            scaled.shards[layer] += np.float32(0.01)
        scaled.scale[:] = 0.75
        mixed = build(source, encoding=encoding)
        retry = build(source, OVERWRITE)
        apply_buckets(mixed, held)
        apply_buckets(retry, held)
        source.owner.commit()
        for name in baseline.digests():
            assert np.array_equal(baseline.words(name), held[name])
        return held, [scaled.words(layer) for layer in range(3)]

    results = world(3, steps)
    held = {name: words for mine, _ in results for name, words in mine.items()}
    for layer in range(3):
        assert np.array_equal(held[f"layers.{layer}"], np.concatenate([parts[layer] for _, parts in results]))


def test_direct_and_residual_tensors_travel_together():
    def steps(scaled, source, collective):
        scaled.direct[4] ^= 1
        scaled.scale[0] = 2
        return sorted(items(build(source))), source.residual_names

    results = world(2, steps)
    assert sorted(name for names, _ in results for name in names) == ["layers.0", "plain"]
    assert results[0][1] == {"layers.0", "layers.1", "layers.2"}


def test_dense_tensors_are_converted_without_a_change():
    def steps(scaled, source, collective):
        return [(i.spec.name, i.count) for i in items(build(source, dense=["layers.1"])).values()]

    assert [one for result in world(3, steps) for one in result] == [("layers.1", 24)]


def test_a_lost_part_fails_the_attempt_on_every_rank_before_anything_is_sent():
    def work(collective):
        scaled = Scaled(collective)
        source = open_source(scaled, collective, ONE_THREAD)
        scaled.scale[:] = 3
        scaled.direct[0] ^= 1
        scaled.lose = "layers.1" if collective.rank == 2 else None
        next(source.owner.build(plan_for(*source.catalog.values()), MIXED))

    for result in run_ranks(3, work):
        assert isinstance(result, AttemptFailedError)
        assert "residual tensor layers.1 BF16[6, 4]: 8 elements are in no part, first flat index 16" in str(result)


def test_a_conversion_that_gives_other_bits_at_a_retry_is_an_operators_matter():
    def work(collective):
        scaled = Scaled(collective)
        source = open_source(scaled, collective, ONE_THREAD)
        scaled.scale[0] = 3
        build(source)
        real = scaled.words
        scaled.words = lambda layer: real(layer) ^ 1
        build(source, OVERWRITE)

    results = run_ranks(2, work)
    assert all(isinstance(result, OperatorRequiredError) for result in results)
    assert "layers.0 BF16[6, 4]: an earlier attempt of this transition converted it to other bits" in str(results)


def test_a_source_that_moves_between_attempts_is_an_operators_matter_everywhere():
    def work(collective):
        scaled = Scaled(collective)
        source = open_source(scaled, collective, ONE_THREAD)
        scaled.scale[1] = 3
        build(source)
        if collective.rank == 1:
            scaled.shards[0][0, 0] += 1
        build(source, OVERWRITE)

    results = run_ranks(3, work)
    assert all(isinstance(result, OperatorRequiredError) for result in results)
    assert "tensor w0 (task w0@1) changed" in str(results[0])


def test_a_source_that_is_written_between_proof_and_copy_is_found_once_it_is_doubted():
    """As publish() does it: owners prove, gates reopen, owners copy, and a step in between must not reach the baseline."""

    def work(collective):
        scaled = Scaled(collective)
        source = open_source(scaled, collective, ONE_THREAD)
        scaled.scale[1] = 3
        build(source)
        source.owner.prove()
        scaled.shards[0][0, 0] += 1
        source.owner.doubt()
        source.owner.commit()

    (result,) = run_ranks(1, work)
    assert isinstance(result, OperatorRequiredError)
    assert "tensor w0 (task w0@0) changed" in str(result)


def test_every_attempt_sends_the_same_residual_changes():
    def steps(scaled, source, collective):
        scaled.scale[:] = [3, 1.5, 2]
        return [plain(build(source)) for _ in range(3)]

    for made in world(2, steps):
        assert made[0] == made[1] == made[2]


def test_a_tensor_that_is_both_residual_and_owned_directly_is_refused():
    class Both(Scaled):
        def tasks(self):
            return [*super().tasks(), whole_task(self.spec(0), np.zeros(24, "<u2"), range(self.world_size))]

    for result in run_ranks(2, lambda c: open_source(Both(c), c, ONE_THREAD)):
        assert isinstance(result, RejectedError)
        assert "layers.0 BF16[6, 4]: declared residual, but owned directly" in str(result)
