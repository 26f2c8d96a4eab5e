"""Models whose weights a post-load step packed, cut, copied, derived from or hid: refits equal a fresh load, or are refused."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words, spec_of
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import LoaderContractError, PayloadMissingError, RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.pieces import Piece, StridedView
from deltarefit.placement.after_load import PostLoadStep
from deltarefit.placement.reach import reach
from deltarefit.receiver import JointAfterLoad, JointModel, RankReceiver, ReceiverSettings, Target, tensor_outcomes
from deltarefit.records import Encoding
from deltarefit.testing.loaders import random_weights
from deltarefit.testing.oracle import delta_payload, differing, plan_for

pytestmark = pytest.mark.torch

Finish = Callable[[torch.nn.Module], None]


class Helper:
    """What engines call a kernel or a quantisation method: a plain object beside the module."""


class Layer(torch.nn.Module):
    def __init__(self, finish: Finish, **shapes: tuple[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, (dtype, shape) in shapes.items():
            zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
            self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
        self.finish = finish
        self.helper = Helper()


class Model(torch.nn.Module):
    """Two layers of one kind, whose tensors a checkpoint names ``0.weight`` and so on, and a norm that nothing touches."""

    def __init__(self, finish: Finish, rules: dict[str, Callable] | None = None, **shapes) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(finish, **shapes), Layer(finish, **shapes)])
        self.norm = torch.nn.Parameter(torch.zeros(12, dtype=torch.bfloat16), requires_grad=False)
        self.rules = rules or {}

    def load_weights(self, weights) -> None:
        for name, w in weights:
            if name == "norm":
                self.norm.data.copy_(w)
                continue
            number, leaf = name.split(".")
            parameter = getattr(self.layers[int(number)], leaf)
            parameter.data.copy_(self.rules.get(leaf, lambda w: w)(w))


class Engine:
    """An adapter; ``serve`` is what the engine itself does."""

    def __init__(self, finish: Finish, rules=None, **shapes) -> None:
        self._make = lambda: Model(finish, rules, **shapes)
        self.init: Finish = lambda layer: None
        self.built: list[weakref.ref[Model]] = []

    def build(self) -> Model:
        model = self._make()
        for layer in model.layers:
            self.init(layer)
        self.built.append(weakref.ref(model))
        return model

    def load(self, model: Model, weights) -> object:
        return model.load_weights(weights)

    def steps(self, model: Model) -> list[PostLoadStep]:
        return [PostLoadStep(layer, lambda layer=layer: layer.finish(layer)) for layer in model.layers]

    def serve(self, weights) -> Model:
        model = self._make()
        with torch.no_grad():
            model.load_weights(list(weights.items()))
            for step in self.steps(model):
                step.run()
        return model


# --- post-load steps ----------------------------------------------------------------------------------------------------


def replace(layer, name: str, tensor: torch.Tensor) -> None:
    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


def tiles(layer) -> None:
    """Tiles of 4 x 2 one after another, in a new parameter: as CPU and GPU kernels pack expert weights."""
    replace(layer, "weight", layer.weight.data.view(2, 4, 3, 2).permute(0, 2, 3, 1).contiguous())


def halves_swapped_and_padded(layer) -> None:
    top, bottom = layer.weight.data.chunk(2)
    replace(layer, "weight", torch.cat([bottom, top, torch.zeros_like(top)]))


def nibbles(layer) -> None:
    """Nibbles of each int32 in another order, and their upper bits flipped, as unsigned codes become signed ones."""
    raw = layer.weight.data.view(torch.uint8).view(-1, 4)
    low, high = raw & 15, raw >> 4
    ordered = torch.stack([low, high], 1).reshape(-1, 8)
    packed = (ordered[:, 0::2] | (ordered[:, 1::2] << 4)) ^ 0x88
    replace(layer, "weight", packed.contiguous().view(torch.int32).view(layer.weight.shape))


def nothing_done(layer) -> None:
    """As for most layers of most engines: a kernel is chosen, and shapes are looked at."""
    SEEN.append((layer, logical_words(layer.weight.data).tobytes()))
    layer.helper.kernel = torch.nn.functional.linear
    layer.helper.columns = layer.weight.shape[1]
    layer.view = layer.weight.data[2:4].t()


def copied_behind_the_hook(layer) -> None:
    """Nothing that torch sees."""
    layer.helper.packed = layer.weight.data.view(torch.int16).numpy().copy()


def looked_at(layer) -> None:
    """A value is read, and nothing comes of it."""
    layer.helper.kernel = "fast" if bool((layer.weight.data == 0).all()) else "any"


def kept_beside(layer) -> None:
    """A packed weight, and the unpacked one as a plain attribute: two destinations."""
    layer.unpacked = layer.weight.data.clone()
    layer.weight.data = layer.weight.data.t().contiguous()


def in_a_closure(layer) -> None:
    packed = layer.weight.data.t().contiguous()
    layer.helper.forward = lambda x: x @ packed
    replace(layer, "weight", torch.empty(0, dtype=torch.bfloat16))


def sums_appended(layer) -> None:
    """Row sums behind each row, in the same storage: compensation of int8 kernels."""
    weight = layer.weight.data
    sums = weight.sum(1, keepdim=True, dtype=torch.int32).to(torch.int8)
    replace(layer, "weight", torch.cat([weight.flip(1), sums], 1))


def largest_scale(layer) -> None:
    layer.alpha = 1 / layer.scale.data.max()
    replace(layer, "scale", layer.scale.data.max().reshape(1))
    tiles(layer)


def scale_kept_and_inverted(layer) -> None:
    """A maximum over one shard is that shard, but for the bit that quietens NaN: three bytes of four seem to be moved."""
    layer.inverse = 1 / layer.scale.data.max()
    layer.kept = layer.scale.data.max()
    replace(layer, "scale", torch.empty(0))
    tiles(layer)


def drops_zeros(layer) -> None:
    del layer.zeros
    tiles(layer)


def behind_a_handle(layer) -> None:
    """The weight is where nobody sees it; only its address shows."""
    HIDDEN.append(layer.weight.data.clone())
    layer.helper.handle = torch.tensor([HIDDEN[-1].data_ptr()])
    replace(layer, "weight", torch.empty(0, dtype=torch.bfloat16))


HIDDEN: list[torch.Tensor] = []
SEEN: list[tuple[torch.nn.Module, bytes]] = []


class Slots:
    __slots__ = ("packed",)


def in_a_slot(layer) -> None:
    layer.helper.slots = Slots()
    layer.helper.slots.packed = layer.weight.data.t().contiguous()
    replace(layer, "weight", torch.empty(0, dtype=torch.bfloat16))


def in_a_set(layer) -> None:
    layer.helper.packed = {layer.weight.data.t().contiguous()}
    replace(layer, "weight", torch.empty(0, dtype=torch.bfloat16))


def far_away(layer) -> None:
    found = layer.weight.data.t().contiguous()
    for _ in range(12):
        found = [found]
    layer.helper.nested = found
    replace(layer, "weight", torch.empty(0, dtype=torch.bfloat16))


def in_an_array(layer) -> None:
    layer.helper.packed = layer.weight.data.view(torch.int16).t().contiguous().numpy()
    replace(layer, "weight", torch.empty(0, dtype=torch.bfloat16))


def copied_to_bytes(layer) -> None:
    """The weight stays, but the kernel computes with a copy that nobody can look into."""
    layer.helper.packed = bytearray(logical_words(layer.weight.data).tobytes())


def kept_as_a_number(layer) -> None:
    """As kernels keep scales that they are called with. What was packed is still there."""
    layer.helper.calls = getattr(layer.helper, "calls", 0) + 1
    layer.helper.address = layer.scale.data_ptr()
    layer.helper.scale = layer.scale.data.max().item()
    tiles(layer)


def two_in_a_set(layer) -> None:
    """Which is which cannot be told."""
    layer.helper.packed = set(layer.weight.data.clone().chunk(2))


BF16 = ("bfloat16", (8, 6))
KINDS = {
    "tiles": (tiles, None, {"weight": BF16}),
    "halves swapped and padded": (halves_swapped_and_padded, None, {"weight": BF16}),
    "nibbles": (nibbles, None, {"weight": ("int32", (4, 6))}),
    "nothing done": (nothing_done, None, {"weight": BF16}),
    "copied behind the hook": (copied_behind_the_hook, None, {"weight": BF16}),
    "looked at": (looked_at, None, {"weight": BF16}),
    "kept beside": (kept_beside, None, {"weight": BF16}),
    "in a closure": (in_a_closure, None, {"weight": BF16}),
    "in a slot": (in_a_slot, None, {"weight": BF16}),
    "in a set": (in_a_set, None, {"weight": BF16}),
    "far away": (far_away, None, {"weight": BF16}),
    "in an array": (in_an_array, None, {"weight": BF16}),
    "sums appended": (sums_appended, None, {"weight": ("int8", (8, 6))}),
    "largest scale": (largest_scale, None, {"weight": BF16, "scale": ("float32", (3,))}),
    "scale kept and inverted": (scale_kept_and_inverted, None, {"weight": BF16, "scale": ("float32", (1,))}),
    "computed by the loader": (tiles, {"a": lambda w: -torch.exp(w.float())}, {"weight": BF16, "a": ("float32", (4,))}),
}
REFUSED = {
    "behind a handle": (behind_a_handle, None, {"weight": BF16}, "differs between two equal loads"),
    "copied to bytes": (copied_to_bytes, None, {"weight": BF16}, "helper.packed is a bytearray, whose content cannot be read"),
    "kept as a number": (
        kept_as_a_number,
        None,
        {"weight": BF16, "scale": ("float32", (3,))},
        "helper.scale is a number of Python that post-load computes from weights",
    ),
    "two in a set": (two_in_a_set, None, {"weight": BF16}, "in a set of several things"),
    "dropped": (drops_zeros, None, {"weight": BF16, "zeros": ("int32", (4,))}, "dropped, or hidden"),
    "narrowed": (tiles, {}, {"weight": BF16, "gate": ("float8_e4m3fn", (4, 4))}, "squeezes BF16"),
    "fails on a probe": (lambda layer: layer.nothing, None, {"weight": BF16}, "fails on a probe"),
}


def engine_and_catalog(kind) -> tuple[Engine, Catalog]:
    finish, rules, shapes = kind[:3]
    model = Model(finish, rules, **shapes)
    specs = [TensorSpec("norm", "BF16", (12,))]
    for number in (0, 1):
        for leaf, parameter in model.layers[number].named_parameters():
            spec = spec_of(f"{number}.{leaf}", parameter)
            specs.append(TensorSpec(spec.name, "BF16", spec.shape) if leaf in {"a", "gate"} else spec)
    return Engine(finish, rules, **shapes), Catalog(specs)


def raw_state(model) -> dict[str, bytes]:
    found = reach({"": model}).tensors
    return {path: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes() for path, t in found.items()}


def digest(tensor) -> object:
    words = logical_words(tensor)
    view = StridedView(0, (words.size,), (1,))
    return kernels.digest(words, [Piece(view, view)])


def changed(weights, seed: int):
    generator, new = np.random.default_rng(seed), {}
    for name, other in random_weights(Catalog(spec_of(n, t) for n, t in weights.items()), seed, finite=True).items():
        mask = torch.from_numpy(generator.random(other.shape) < 0.3)
        new[name] = torch.where(mask, other, weights[name])
    return new


class Subject:
    def __init__(self, name: str, *, prefer: Encoding = Encoding.XOR, **settings) -> None:
        self.engine, self.catalog = engine_and_catalog(KINDS[name])
        self.old = random_weights(self.catalog, 1, finite=True)
        self.model = self.engine.serve(self.old)
        self.receiver = RankReceiver(
            self.model, self.model.load_weights, settings=ReceiverSettings(**settings), after_load=self.engine
        )
        self.report = self.receiver.prewarm(self.catalog)
        self.plan = plan_for([self.report], self.catalog, prefer=prefer)
        self.attempts = 0

    def payload(self, new, mode=EncodingMode.MIXED):
        self.attempts += 1
        return delta_payload(self.plan, self.old, new, mode=mode, attempt=f"v000001-a{self.attempts}-test")

    def refit(self, new, mode=EncodingMode.MIXED) -> None:
        self.receiver.prepare(self.plan)
        self.receiver.apply(self.payload(new, mode))
        self.receiver.synchronize()

    def wrong(self, new) -> list[str]:
        return differing(raw_state(self.model), raw_state(self.engine.serve(new)))


@pytest.mark.parametrize(
    ("name", "torch_writes"), [*((name, False) for name in KINDS), ("tiles", True), ("nibbles", True), ("sums appended", True)]
)
def test_refits_leave_the_bits_of_a_fresh_load(name: str, torch_writes: bool) -> None:
    subject = Subject(name, torch_writes=torch_writes)
    for seed in (2, 3):
        new = changed(subject.old, seed)
        subject.refit(new)
        assert subject.wrong(new) == []
        assert subject.receiver.drift() == ()
        shown = subject.receiver.digests()
        assert {n: s.digest for n, s in shown.items()} == {n: digest(new[n]) for n in shown}
        assert set(shown) == set(subject.catalog)
        subject.old = new


@pytest.mark.parametrize("name", ["nibbles", "kept beside", "largest scale"])
def test_prewarm_changes_nothing_and_learns_layers_of_one_kind_once(name: str) -> None:
    engine, catalog = engine_and_catalog(KINDS[name])
    model = engine.serve(random_weights(catalog, 1, finite=True))
    before = raw_state(model)
    report = RankReceiver(model, model.load_weights, after_load=engine).prewarm(catalog)
    assert raw_state(model) == before
    assert set(report.routes) == set(catalog)
    assert len(engine.built) == 1


@pytest.mark.parametrize("name", ["tiles", "nibbles", "kept beside"])
def test_nothing_of_the_second_model_outlives_the_prewarm(name: str) -> None:
    subject = Subject(name)
    assert [model() for model in subject.engine.built] == [None]
    subject.refit(new := changed(subject.old, 2))
    assert subject.wrong(new) == []


def checksums(layer) -> None:
    layer.sums = layer.weight.data.sum(1, dtype=torch.int32)


def test_layers_that_run_again_take_no_memory_between_refits() -> None:
    """Neither on the second model nor in copies of what it held."""
    Subject("tiles")  # imports what is imported late
    engine, catalog = engine_and_catalog((checksums, None, {"weight": ("int8", (1024, 1024))}))
    old, new = random_weights(catalog, 1), random_weights(catalog, 2)
    model = engine.serve(old)
    receiver = RankReceiver(model, model.load_weights, after_load=engine)
    tracemalloc.start()
    try:
        plan = plan_for([receiver.prewarm(catalog)], catalog)
        gc.collect()  # what cycles hold is not kept
        kept_nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    def second_model_nbytes() -> int:
        (twin,) = (built() for built in engine.built)
        storages = {tensor.untyped_storage() for tensor in reach({"": twin}).tensors.values()}
        return sum(raw.nbytes() for raw in storages)

    assert kept_nbytes < catalog.nbytes // 8
    assert second_model_nbytes() < catalog.nbytes // 8
    receiver.prepare(plan)
    receiver.apply(delta_payload(plan, old, new))
    receiver.synchronize()
    assert differing(raw_state(model), raw_state(engine.serve(new))) == []
    assert second_model_nbytes() < catalog.nbytes // 8


SHARED: dict[str, int] = {}


def notes_itself(layer) -> None:
    """An engine's registry, which layers write to once and the engine all the time."""
    layer.registry = SHARED
    SHARED.setdefault("finished", 1)
    checksums(layer)


def test_what_an_engine_changes_between_refits_stays_changed() -> None:
    engine, catalog = engine_and_catalog((notes_itself, None, {"weight": ("int8", (8, 6))}))
    engine.init = lambda layer: setattr(layer, "registry", SHARED)
    old, new = random_weights(catalog, 1), random_weights(catalog, 2)
    model = engine.serve(old)
    receiver = RankReceiver(model, model.load_weights, after_load=engine)
    plan = plan_for([receiver.prewarm(catalog)], catalog)
    SHARED["requests"] = 7
    receiver.prepare(plan)
    receiver.apply(delta_payload(plan, old, new))
    receiver.synchronize()
    assert SHARED == {"finished": 1, "requests": 7}


def tiles_and_says_so(layer) -> None:
    SEEN.append((layer, logical_words(layer.weight.data).tobytes()))
    tiles(layer)


def test_a_layer_is_believed_after_twenty_loads_of_random_bits() -> None:
    """And four of ordinary numbers; a second layer of its kind after two."""
    engine, catalog = engine_and_catalog((tiles_and_says_so, None, {"weight": BF16}))
    model = engine.serve(random_weights(catalog, 1, finite=True))
    SEEN.clear()
    RankReceiver(model, model.load_weights, settings=ReceiverSettings(cross_check=0), after_load=engine).prewarm(catalog)
    loads: dict[torch.nn.Module, set[bytes]] = {}
    for layer, content in SEEN:
        loads.setdefault(layer, set()).add(content)
    zeros, digits = bytes(96), bytes(range(1, 97))
    looks = 1  # whether anything is done at all
    assert [len(contents - {zeros, digits}) for contents in loads.values()] == [24 + looks, 2]


def test_a_layer_that_is_left_as_loaded_is_not_learnt() -> None:
    """Two loads tell; learning takes some thirty and several times the layer's memory."""
    engine, catalog = engine_and_catalog(KINDS["nothing done"])
    model = engine.serve(random_weights(catalog, 1, finite=True))
    SEEN.clear()
    report = RankReceiver(model, model.load_weights, after_load=engine).prewarm(catalog)
    assert len(SEEN) == 4
    assert {(route.kind, route.reason) for route in report.routes.values()} == {("pieces", "")}


@pytest.mark.parametrize("name", ["nibbles", "kept beside", "sums appended", "largest scale"])
def test_an_overwrite_retry_mends_half_an_attempt(name: str) -> None:
    subject = Subject(name)
    new = changed(subject.old, 4)
    subject.receiver.prepare(subject.plan)
    payload = subject.payload(new)
    subject.receiver.apply(type(payload)(payload.header, payload.items[::2], payload.nbytes, payload.digest))
    subject.refit(new, EncodingMode.OVERWRITE)
    assert subject.wrong(new) == []


@pytest.mark.parametrize("name", KINDS)
def test_one_flipped_bit_anywhere_shows(name: str) -> None:
    subject = Subject(name)
    new = changed(subject.old, 5)
    subject.refit(new)
    proven = subject.receiver.digests()
    for path, tensor in reach({"": subject.model}).tensors.items():
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        for place in range(0, raw.numel(), 7):
            raw[place] ^= 1
            assert subject.receiver.digests() != proven or subject.receiver.drift(), f"{path} byte {place}"
            raw[place] ^= 1
    assert subject.receiver.digests() == proven


def test_each_tensor_takes_what_its_places_allow() -> None:
    def outcomes(name: str) -> dict[str, str]:
        engine, catalog = engine_and_catalog(KINDS[name])
        model = engine.serve(random_weights(catalog, 1, finite=True))
        rows = tensor_outcomes(model, model.load_weights, catalog, after_load=engine)
        return {row.name: row.outcome for row in rows if row.name.startswith(("0.", "norm"))}

    assert outcomes("tiles") == {"0.weight": "exact", "norm": "exact"}
    assert outcomes("sums appended") == {"0.weight": "rerun", "norm": "exact"}
    assert outcomes("largest scale") == {"0.weight": "rerun", "0.scale": "dense", "norm": "exact"}
    assert outcomes("computed by the loader") == {"0.weight": "rerun", "0.a": "dense", "norm": "exact"}
    assert Subject("nibbles").report.routes["0.weight"].encodings == (Encoding.XOR, Encoding.OVERWRITE)
    assert Subject("tiles").report.routes["0.weight"].encodings[0] == Encoding.DIFFERENCE
    assert Subject("tiles").report.routes["0.weight"].num_pieces == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(name: str) -> None:
    *kind, reason = REFUSED[name]
    engine, catalog = engine_and_catalog(kind)
    try:
        model = engine.serve(random_weights(catalog, 1, finite=True))
    except AttributeError:
        model = engine.build()
    before = raw_state(model)
    rows = tensor_outcomes(model, model.load_weights, catalog, after_load=engine)
    assert any(row.outcome == "refused" and reason in row.reason for row in rows), rows
    assert raw_state(model) == before


def test_a_second_model_that_finds_no_room_is_a_refusal(monkeypatch) -> None:
    engine, catalog = engine_and_catalog(KINDS["tiles"])
    model = engine.serve(random_weights(catalog, 1, finite=True))

    def build() -> torch.nn.Module:
        raise torch.OutOfMemoryError("tried to allocate 40 GiB")

    monkeypatch.setattr(engine, "build", build)
    with pytest.raises(RejectedError, match=r"the second model on which to learn how could not be built: .*40 GiB"):
        RankReceiver(model, model.load_weights, after_load=engine).prewarm(catalog)


def test_dropped_tensors_are_skipped_where_that_is_known() -> None:
    engine, catalog = engine_and_catalog(REFUSED["dropped"])
    model = engine.serve(random_weights(catalog, 1, finite=True))
    settings = ReceiverSettings(may_ignore=("*.zeros",))
    rows = {row.name: row for row in tensor_outcomes(model, model.load_weights, catalog, settings=settings, after_load=engine)}
    assert rows["0.zeros"].outcome == "skipped"
    assert rows["0.weight"].outcome == "exact"


def test_layers_that_must_be_sent_whole_are_refused_beyond_the_allowance() -> None:
    with pytest.raises(RejectedError, match="dense_nbytes allows 8") as caught:
        Subject("largest scale", dense_nbytes=8)
    assert "0.scale" in str(caught.value)


def test_part_of_a_tensor_that_must_come_whole_is_noticed() -> None:
    subject = Subject("largest scale")
    new = changed(subject.old, 6)
    subject.receiver.prepare(subject.plan)
    payload = subject.payload(new)
    kept = tuple(item for item in payload.items if item.spec.name != "1.scale")
    subject.receiver.apply(type(payload)(payload.header, kept, payload.nbytes, payload.digest))
    with pytest.raises(PayloadMissingError, match=r"1\.scale"):
        subject.receiver.synchronize()


def test_a_model_that_was_finished_otherwise_is_refused() -> None:
    engine, catalog = engine_and_catalog(KINDS["tiles"])
    weights = random_weights(catalog, 1, finite=True)
    model = engine.serve(weights)
    model.layers[0].weight.data = model.layers[0].weight.data.flatten()
    with pytest.raises(RejectedError, match="of a fresh one"):
        RankReceiver(model, model.load_weights, after_load=engine).prewarm(catalog)
    spoilt = Engine(sums_appended, None, weight=("int8", (8, 6)))
    catalog = engine_and_catalog(KINDS["sums appended"])[1]
    model = spoilt.serve(random_weights(catalog, 1, finite=True))
    model.layers[1].weight.data.view(-1)[6] ^= 1  # a sum
    with pytest.raises(RejectedError, match="cross-check"):
        RankReceiver(model, model.load_weights, after_load=spoilt).prewarm(catalog)


def test_a_model_that_ties_layers_after_loading_is_refused() -> None:
    """A change of one would count twice."""
    engine, catalog = engine_and_catalog(KINDS["tiles"])
    model = engine.serve(random_weights(catalog, 1, finite=True))
    model.layers[1].weight = model.layers[0].weight
    with pytest.raises(RejectedError, match=r"layers\.1\.weight and layers\.0\.weight share storage in the serving model"):
        RankReceiver(model, model.load_weights, after_load=engine).prewarm(catalog)


class Pair:
    """A policy and a draft that takes over the policy's first layer and its norm after both were loaded."""

    def __init__(self) -> None:
        self.parts = {"policy": engine_and_catalog(KINDS["tiles"])[0], "draft": engine_and_catalog(KINDS["kept beside"])[0]}

    def joined(self, policy: Model, draft: Model) -> tuple[JointModel, dict[str, Target]]:
        targets = {"policy": Target(policy, policy.load_weights), "draft": Target(draft, draft.load_weights, "draft.")}
        return JointModel(targets), targets

    def serve(self, weights) -> tuple[JointModel, dict[str, Target]]:
        own = {name: w for name, w in weights.items() if not name.startswith("draft.")}
        others = {name.removeprefix("draft."): w for name, w in weights.items() if name.startswith("draft.")}
        policy, draft = self.parts["policy"].serve(own), self.parts["draft"].serve(others)
        draft.layers[0] = policy.layers[0]
        draft.norm = policy.norm
        return self.joined(policy, draft)


def test_a_policy_and_a_draft_that_share_modules_are_refitted_as_one() -> None:
    pair = Pair()
    catalog = engine_and_catalog(KINDS["tiles"])[1]
    catalog = Catalog([*catalog.values(), TensorSpec("draft.1.weight", "BF16", (8, 6))])
    old, new = random_weights(catalog, 1, finite=True), random_weights(catalog, 2, finite=True)
    model, targets = pair.serve(old)
    receiver = RankReceiver(model, model.load_weights, after_load=JointAfterLoad(model, targets, pair.parts))
    plan = plan_for([receiver.prewarm(catalog)], catalog)
    receiver.prepare(plan)
    receiver.apply(delta_payload(plan, old, new))
    receiver.synchronize()
    assert differing(raw_state(model), raw_state(pair.serve(new)[0])) == []
    assert set(receiver.digests()) == set(catalog)


def test_a_derived_tensor_that_was_replaced_makes_the_prewarm_stale() -> None:
    subject = Subject("kept beside")
    assert subject.receiver.stale() == ""
    subject.model.layers[0].unpacked = subject.model.layers[0].unpacked.clone()
    assert "layers.0.unpacked" in subject.receiver.stale()
    with pytest.raises(LoaderContractError, match="unpacked"):
        subject.receiver.synchronize()


class Halves(Model):
    """Takes a second name for the first half of each weight; who comes last wins."""

    def load_weights(self, weights) -> None:
        for name, w in weights:
            if name.endswith("half"):
                self.layers[int(name[0])].weight.data[:4].copy_(w)
            else:
                super().load_weights([(name, w)])


@pytest.mark.parametrize("half", ["half", "zhalf"])
@pytest.mark.parametrize("may_ignore", [("*half",), ("*half", "*.weight")])
@pytest.mark.parametrize("finish", [nothing_done, tiles])
@pytest.mark.parametrize("finished", [1, 2])
def test_tensors_that_share_bytes_are_refused_whichever_wins(
    monkeypatch, half: str, may_ignore: tuple[str, ...], finish: Finish, finished: int
) -> None:
    """In layers with post-load steps, whatever these do, and in one without any: who may be ignored may be who wins."""
    engine, catalog = engine_and_catalog((finish, None, {"weight": BF16}))
    engine._make = lambda: Halves(finish, None, weight=BF16)
    every = engine.steps
    monkeypatch.setattr(engine, "steps", lambda model: every(model)[:finished])
    catalog = Catalog([TensorSpec(f"{n}.{half}", "BF16", (4, 6)) for n in range(2)] + list(catalog.values()))
    model = engine.serve(random_weights(catalog, 1, finite=True))
    before = raw_state(model)
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(may_ignore=may_ignore), after_load=engine)
    with pytest.raises(RejectedError, match=r"depends on their order\. Have it take one of the two"):
        receiver.prewarm(catalog)
    assert differing(raw_state(model), before) == []
