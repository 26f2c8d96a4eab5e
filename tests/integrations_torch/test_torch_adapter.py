"""Plain modules: names, aliases, strides, rebinding, and what is refused."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from deltarefit import kernels  # noqa: E402
from deltarefit.bits import DTYPES, logical_words  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.integrations.torch import local, tasks, torch_adapter  # noqa: E402
from deltarefit.integrations.torch.local import clean_name, host_copy  # noqa: E402
from deltarefit.pieces import Piece, merge_pieces, whole  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.source import LocalCollective, SourceSettings, open_source  # noqa: E402

pytestmark = pytest.mark.torch


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.arange(3.0), persistent=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))


def values(adapter):
    """Logical words by name, gathered through the tasks' pieces."""
    found = {}
    for task in adapter.tasks():
        (group,) = merge_pieces(task.pieces) or ((),)
        found[task.spec.name] = kernels.gather(task.words(), group) if group else np.empty(0)
    return found


def expected(model):
    return {name: logical_words(tensor) for name, tensor in model.state_dict().items()}


def assert_same(found, wanted):
    assert sorted(found) == sorted(wanted)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_parameters_and_persistent_buffers_are_the_state_dict():
    model = Small()
    adapter = torch_adapter(model)
    assert_same(values(adapter), expected(model))
    assert "cache" not in adapter.catalog()
    assert str(adapter.catalog()["norm.num_batches_tracked"]) == "norm.num_batches_tracked I64[]"


def test_wrappers_leave_no_trace_in_names():
    model = Small()
    compiled = torch.compile(model, backend="eager")
    assert torch_adapter(compiled).catalog() == torch_adapter(model).catalog()
    assert torch_adapter(nn.DataParallel(model)).catalog() == torch_adapter(model).catalog()
    inner = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert list(torch_adapter(inner).catalog()) == ["0.bias", "0.weight"]
    assert clean_name("_orig_mod.a._checkpoint_wrapped_module.b_orig_mod.w") == "a.b_orig_mod.w"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(5, 9)[1:, 2:8],
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 8)[:, ::2],
        lambda: torch.randn(7)[3],
    ],
)
def test_strided_parameters_are_read_in_logical_order(make):
    """Storage order is not logical order."""
    model = nn.Module()
    model.weight = nn.Parameter(make())
    adapter = torch_adapter(model)
    assert_same(values(adapter), expected(model))
    (task,) = adapter.tasks()
    assert np.shares_memory(task.words(), np.asarray(model.weight.detach()))


def test_tied_parameters_of_a_plain_module_are_declared_once():
    model = nn.Module()
    model.embed = nn.Embedding(5, 4)
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    assert list(torch_adapter(model).catalog()) == ["embed.weight"]


def test_views_of_one_storage_that_are_not_equal_are_separate_tensors():
    fused = torch.randn(6, 4)
    model = nn.Module()
    model.q, model.k = nn.Parameter(fused[:4]), nn.Parameter(fused[4:])
    assert_same(values(torch_adapter(model)), expected(model))


def test_a_rebound_parameter_is_followed():
    """Trainers replace ``.data`` and whole Parameter objects between steps."""
    model = Small()
    adapter = torch_adapter(model)
    tasks = {task.spec.name: task for task in adapter.tasks()}
    model.embed.weight.data = torch.randn(5, 4)
    model.conv.weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    for name in ("embed.weight", "conv.weight"):
        assert np.array_equal(tasks[name].words(), logical_words(model.state_dict()[name]))


def test_a_replaced_module_is_followed():
    """It is found by where it hangs; the one that was there is nobody's any more."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    adapter = torch_adapter(model)
    adapter.catalog()
    model.layers[1] = nn.Linear(3, 3)
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    adapter.barrier()
    assert_same(values(adapter), expected(model))


def appended(model):
    model.more = nn.Linear(2, 2)


def taken_away(model):
    model.norm = nn.Identity()


def set_to_none(model):
    model.conv.bias = None


def wider(model):
    model.embed = nn.Embedding(6, 4)


def untied(model):
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def negated(model):
    model.embed.weight.data = torch._neg_view(model.embed.weight.data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (appended, r"tensor more.weight, more.bias: 2 tensors were added to the model"),
        (taken_away, r"tensor norm.weight: is not in the model any more"),
        (set_to_none, r"tensor conv.bias: is not in the model any more"),
        (wider, r"embed.weight: .*shape=\(6, 4\).* was .*shape=\(5, 4\)"),
        (untied, r"tensor head.weight: shared its memory with embed.weight when the publisher was made, and does not now"),
        (negated, r"tensor embed.weight: is a view that torch negates as it reads it"),
    ],
)
def test_a_model_that_became_another_is_refused_before_anything_is_read(change, message):
    """Else what was added, untied or hung in its place would silently never be sent."""
    model = Small()
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    adapter = torch_adapter(model)
    adapter.catalog()
    adapter.barrier()
    change(model)
    with pytest.raises(RejectedError, match=message):
        adapter.barrier()


def test_tied_weights_that_a_manifest_lists_both_may_come_apart():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    manifest = torch_adapter(model).catalog()
    model.head.weight = model.embed.weight
    adapter = torch_adapter(model, manifest=manifest)
    adapter.catalog()
    untied(model)
    adapter.barrier()
    assert_same(values(adapter), expected(model))


def test_lazily_conjugated_parameters_are_refused():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, 2))
    model.weight.data = torch.zeros(2, 2, dtype=torch.complex64).conj()
    with pytest.raises(RejectedError, match="tensor weight: is a view that torch conjugates as it reads it"):
        torch_adapter(model).catalog()


def test_a_dtype_that_cannot_be_sent_names_its_tensor():
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(RejectedError, match=r"tensor phase: torch dtype torch.complex128: expected one of"):
        torch_adapter(model).catalog()


def test_a_parameter_that_changes_dtype_or_layout_is_refused_with_both():
    model = Small()
    tasks = {task.spec.name: task for task in torch_adapter(model).tasks()}
    model.embed.to(torch.bfloat16)
    with pytest.raises(RejectedError, match=r"embed.weight: is torch.bfloat16 .* was torch.float32"):
        tasks["embed.weight"].words()


def test_state_dict_hooks_that_change_values_are_refused():
    model = Small()
    model.embed.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({prefix + "weight": module.weight * 2})
    )
    with pytest.raises(RejectedError, match=r"embed.weight: the model's state_dict returns something other"):
        torch_adapter(model).catalog()


def test_a_dtensor_is_refused_with_the_adapter_to_use():
    class Fake(nn.Parameter):
        placements = ()
        device_mesh = None

    model = nn.Module()
    model.weight = Fake(torch.zeros(2))
    with pytest.raises(RejectedError, match="weight is a DTensor"):
        torch_adapter(model).catalog()


def test_weights_that_were_never_loaded_are_refused():
    with pytest.raises(RejectedError, match="weight is on the meta device"):
        torch_adapter(nn.Linear(2, 2, bias=False, device="meta")).catalog()


def test_attached_adapters_are_refused_for_now():
    model = nn.Module()
    model.q = nn.Module()
    model.q.base_layer = nn.Linear(2, 2, bias=False)
    with pytest.raises(RejectedError, match=r"q.base_layer.weight: adapters are attached"):
        torch_adapter(model).catalog()


def test_extra_state_of_a_module_is_not_a_tensor_of_the_policy():
    class WithState(nn.Linear):
        def get_extra_state(self):
            return torch.zeros(3)

        def set_extra_state(self, state):
            del state

    assert list(torch_adapter(WithState(2, 2)).catalog()) == ["bias", "weight"]


def test_shards_on_an_accelerator_are_copied_to_the_host():
    """The copying path, on the host: there is no accelerator here."""
    part = torch.arange(5, dtype=torch.bfloat16)
    words = host_copy(part)
    assert np.array_equal(words, logical_words(part))
    assert not np.shares_memory(words, logical_words(part))


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"))


def assert_refits(model, dtype):
    """Refit a model twice, once with overwrites; what a receiver then holds is its state_dict in that dtype."""
    source = open_source(torch_adapter(model, dtype=dtype), LocalCollective(), SourceSettings())
    held = {name: logical_words(tensor.cpu().to(dtype)).copy() for name, tensor in model.state_dict().items()}
    held["norm.num_batches_tracked"] = logical_words(model.norm.num_batches_tracked.cpu()).copy()
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), 1)
    for mode in EncodingMode:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        source.adapter.barrier()
        for bucket in source.owner.build(plan, mode):
            for item in bucket.items:
                view = whole(item.spec.shape)
                kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)
        source.owner.commit()
        floats = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        assert sorted(held) == sorted(source.catalog)
        for name, spec in source.catalog.items():
            assert np.array_equal(held[name], logical_words(floats[name].to(DTYPES[spec.dtype]))), name
    return source


class Turned(Small):
    """With parameters that do not lie in the order of their elements."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(24, 40).t())
        self.columns = nn.Parameter(torch.randn(40, 64)[:, 3:20])
        self.plain = nn.Parameter(torch.randn(32, 40))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_refitted_wherever_they_are(device, dtype):
    """From pinned copies where that is an accelerator."""
    assert_refits(Turned().to(device), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_copied_from_an_accelerator_is_bounded_however_it_lies(monkeypatch, dtype):
    """The code that copies from an accelerator, on the host, with parts of 512 bytes."""
    copied = []

    def watched(part):
        copied.append(part.nbytes)
        return host_copy(part)

    for module in (local, tasks):
        monkeypatch.setattr(module, "is_in_host_memory", lambda tensor: False)
    monkeypatch.setattr(local, "host_copy", watched)
    monkeypatch.setattr(tasks, "cut_into_parts", functools.partial(tasks.cut_into_parts, target_nbytes=512))
    model = Turned()
    source = assert_refits(model, dtype)
    assert len([tracker for tracker in source.owner.baseline.trackers if tracker.task.spec.name == "turned"]) >= 4
    assert copied
    assert max(copied) <= 2 * 512
    assert model.turned.numel() * model.turned.element_size() > 2 * 512
