"""State that a model derives from its weights and keeps outside parameters and buffers. Needs torch only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deltarefit.bits import spec_of
from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.integrations.sglang.derived import DerivedState, note_constants
from deltarefit.integrations.sglang.receiver import SglangReceiver
from deltarefit.receiver import RankReceiver
from deltarefit.testing.oracle import delta_payload, plan_for

pytestmark = pytest.mark.torch


class Attention(torch.nn.Module):
    """As MLA: a projection, and a transposed copy of half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.o_proj = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)
        self.w_kc = None
        self.view_of_it = self.kv_b_proj.data[:2]
        self.positions = torch.arange(4)


class Model(torch.nn.Module):
    """``uses_threads``: its loader hands host tensors to a pool unless they are marked, as SGLang's DeepSeek loader does."""

    def __init__(self, *, uses_threads: bool = False) -> None:
        super().__init__()
        self.attention = Attention()
        self.uses_threads = uses_threads
        self.num_hooks = 0

    def load_weights(self, weights) -> None:
        def copy(target, tensor) -> None:
            target.data.copy_(tensor)

        with ThreadPoolExecutor(1) as pool:
            for name, tensor in weights:
                target = self.get_parameter(name)
                if self.uses_threads and not getattr(tensor, "_sglang_runai_streamer_tensor", False):
                    pool.submit(copy, target, tensor).result()
                else:
                    copy(target, tensor)
        self.post_load_weights(weight_names=None)

    def post_load_weights(self, weight_names=None) -> None:
        self.num_hooks += 1
        half = self.attention.kv_b_proj.data[:4].t().contiguous()
        if self.attention.w_kc is None:
            self.attention.w_kc = half
        else:
            self.attention.w_kc.copy_(half)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"attention.kv_b_proj": (8, 4), "attention.o_proj": (4, 4)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


LIMIT = 2**20


def loaded(values, **options) -> Model:
    model = Model(**options)
    note_constants(model)
    model.load_weights(values.items())
    return model


def catalog() -> Catalog:
    return Catalog(spec_of(name, tensor) for name, tensor in weights(0).items())


@pytest.mark.parametrize("uses_threads", [False, True])
def test_a_refit_leaves_the_derived_state_of_a_fresh_load(uses_threads: bool) -> None:
    old, new = weights(0), weights(1)
    model, fresh = loaded(old, uses_threads=uses_threads), loaded(new, uses_threads=uses_threads)
    place = model.attention.w_kc.data_ptr()
    receiver = SglangReceiver(model, model.load_weights)
    report = receiver.prewarm(catalog())
    assert receiver.prewarm(catalog()) is report
    assert {name: route.is_rerun for name, route in report.routes.items()} == {
        "attention.kv_b_proj": True, "attention.o_proj": False,
    }  # fmt: skip
    assert torch.equal(model.attention.w_kc, loaded(old).attention.w_kc), "prewarm leaves it as it was"
    plan = plan_for([report], catalog())
    receiver.prepare(plan)
    receiver.apply(delta_payload(plan, old, new))
    receiver.synchronize()
    for name in ("kv_b_proj", "o_proj", "w_kc"):
        assert torch.equal(getattr(model.attention, name), getattr(fresh.attention, name)), name
    assert model.attention.w_kc.data_ptr() == place


def test_a_receiver_that_knows_nothing_of_it_is_refused_where_threads_write() -> None:
    model = loaded(weights(0), uses_threads=True)
    with pytest.raises(RejectedError, match="behind the dispatch hook"):
        RankReceiver(model, model.load_weights).prewarm(catalog())


def test_what_counts_as_derived() -> None:
    model = loaded(weights(0))
    model.attention.scales = [torch.ones(2), None]
    model.attention.tables = {"rows": torch.arange(3), "none": None}
    assert sorted(DerivedState(model).tensors()) == ["attention.scales.0", "attention.tables.rows", "attention.w_kc"]


def test_what_was_there_before_the_load_counts_once_somebody_writes_to_it() -> None:
    model = loaded(weights(0))
    model.attention.positions[0] = 0  # the same bits, but written
    assert "attention.positions" in DerivedState(model).tensors()
    model = loaded(weights(0))
    model.attention.positions.data[1] = 7  # a write that torch does not count
    assert "attention.positions" in DerivedState(model).tensors()
    model = loaded(weights(0))
    model.attention.positions = torch.arange(4)
    assert "attention.positions" in DerivedState(model).tensors()


def test_a_model_may_be_looked_at_again_before_its_load() -> None:
    model = Model()
    for _ in range(2):
        note_constants(model)
    model.load_weights(weights(0).items())
    assert sorted(DerivedState(model).tensors()) == ["attention.w_kc"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_state_of_whole_numbers_that_the_hook_does_not_compute_is_refused(dtype: torch.dtype) -> None:
    """Floating point is not the only thing that is derived: packed codes, zero points, compensation sums."""
    model = loaded(weights(0))
    model.attention.signs = (model.attention.kv_b_proj > 0).to(dtype)
    with pytest.raises(RejectedError, match=r"attention\.signs: is kept outside parameters and buffers"):
        SglangReceiver(model, model.load_weights).prewarm(catalog())


def with_signs(monkeypatch, write):
    """Have the hook keep the signs of a projection too, by ``write(signs, weight)``."""
    original = Model.post_load_weights

    def hook(self, weight_names=None) -> None:
        original(self)
        if not hasattr(self.attention, "signs"):
            self.attention.signs = torch.zeros(8, 4, dtype=torch.int8)
        write(self.attention.signs, self.attention.kv_b_proj.data)

    monkeypatch.setattr(Model, "post_load_weights", hook)


def test_state_of_whole_numbers_that_the_hook_computes_is_that_of_a_fresh_load(monkeypatch) -> None:
    with_signs(monkeypatch, lambda signs, weight: signs.copy_(weight > 0))
    old, new = weights(0), weights(1)
    model, fresh = loaded(old), loaded(new)
    receiver = SglangReceiver(model, model.load_weights)
    plan = plan_for([receiver.prewarm(catalog())], catalog())
    receiver.prepare(plan)
    receiver.apply(delta_payload(plan, old, new))
    receiver.synchronize()
    assert torch.equal(model.attention.signs, fresh.attention.signs)
    assert not torch.equal(model.attention.signs, loaded(old).attention.signs)


@pytest.mark.parametrize(
    "write",
    [
        lambda signs, weight: signs[:4].copy_(weight[:4] > 0),
        lambda signs, weight: signs.bitwise_or_((weight > 0).to(torch.int8)),
    ],
    ids=["a part of it", "on top of what was there"],
)
def test_a_hook_that_computes_state_only_in_part_is_refused(monkeypatch, write) -> None:
    with_signs(monkeypatch, write)
    model = loaded(weights(0))
    before = model.attention.signs.clone()
    with pytest.raises(RejectedError, match=r"attention\.signs: is kept outside"):
        DerivedState(model).check(LIMIT)
    assert torch.equal(model.attention.signs, before)


def test_the_trial_copies_no_weight_that_the_hook_leaves_alone(monkeypatch) -> None:
    model = loaded(weights(0))
    cloned, original, here = [], torch.Tensor.clone, threading.get_ident()

    def clone(self, **options):
        if threading.get_ident() == here:  # threads that other tests left may clone as well
            cloned.append(self.nbytes)
        return original(self, **options)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    DerivedState(model).check(LIMIT)
    assert cloned
    assert sum(cloned) <= 2 * model.attention.w_kc.nbytes
    cloned.clear()
    DerivedState(model).check(0)
    assert cloned == []


def test_what_was_too_large_to_keep_is_said_to_be_spoilt(monkeypatch) -> None:
    model = loaded(weights(0))
    monkeypatch.setattr(Model, "post_load_weights", lambda self, weight_names=None: scale_weight(self))
    with pytest.raises(RejectedError, match=r"bytes of attention\.o_proj are spoilt: load the model again"):
        DerivedState(model).check(0)


def test_a_hook_that_fails_is_refused_and_undone(monkeypatch) -> None:
    def fail(self, weight_names=None) -> None:
        self.attention.o_proj.data.mul_(2)
        raise ZeroDivisionError("oops")

    model = loaded(weights(0))
    before = model.attention.o_proj.clone()
    monkeypatch.setattr(Model, "post_load_weights", fail)
    with pytest.raises(RejectedError, match="post_load_weights fails when it runs again: ZeroDivisionError: oops"):
        DerivedState(model).check(LIMIT)
    assert torch.equal(model.attention.o_proj, before)


def test_state_that_the_hook_does_not_compute_is_refused_and_left_alone() -> None:
    model = loaded(weights(0))
    model.attention.row_sums = model.attention.kv_b_proj.float().sum(1)
    before = model.attention.row_sums.clone()
    receiver = SglangReceiver(model, model.load_weights)
    with pytest.raises(RejectedError, match=r"attention\.row_sums: is kept outside parameters and buffers"):
        receiver.prewarm(catalog())
    assert torch.equal(model.attention.row_sums, before)
    with pytest.raises(RejectedError, match="run prewarm first"):
        receiver.digests()


def rebind(model: Model) -> None:
    model.attention.w_kc = model.attention.kv_b_proj.data[:4].t().contiguous()


def scale_weight(model: Model) -> None:
    model.attention.o_proj.data.mul_(2)
    model.attention.w_kc.copy_(model.attention.kv_b_proj.data[:4].t())


@pytest.mark.parametrize(
    ("hook", "reason"),
    [(rebind, "post_load_weights replaces it"), (scale_weight, "o_proj: post_load_weights changes it when it runs again")],
)
def test_a_hook_that_cannot_be_run_again_is_refused_and_undone(monkeypatch, hook, reason: str) -> None:
    model = loaded(weights(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(Model, "post_load_weights", lambda self, weight_names=None: hook(self))
    with pytest.raises(RejectedError, match=reason):
        DerivedState(model).check(LIMIT)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_watched_loads_do_not_run_the_hook() -> None:
    model = loaded(weights(0))
    derived, count = DerivedState(model), model.num_hooks
    with derived.hook_held():
        model.load_weights(weights(1).items())
    assert model.num_hooks == count
    model.load_weights(weights(1).items())
    assert model.num_hooks == count + 1
