"""Exports that compute: merged adapters, block-scaled float8, sums, and a user's own function."""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from deltarefit import kernels  # noqa: E402
from deltarefit.bits import logical_words  # noqa: E402
from deltarefit.canonical import Catalog  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.integrations.torch import torch_adapter  # noqa: E402
from deltarefit.pieces import Piece, whole  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.source import LocalCollective, SourceSettings, open_source  # noqa: E402
from deltarefit.testing.collective import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
DOCUMENT = Path(__file__).parents[2] / "docs" / "sources.md"
ONE_THREAD = SourceSettings(scan_threads=1)


class Lora(nn.Module):
    """A linear layer with an adapter, named as PEFT names them."""

    def __init__(self, width=8, rank=2):
        super().__init__()
        self.base_layer = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, rank, bias=False, dtype=torch.bfloat16)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, width, bias=False, dtype=torch.bfloat16)})


class Model(nn.Module):
    def __init__(self, layer, count=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([layer() for _ in range(count)])
        self.norm = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def merge(state):
    """The checkpoint without adapters: W + B A."""
    merged = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        at, base, leaf = name.partition(".base_layer.")
        if base:
            merged[f"{at}.{leaf}"] = tensor + state[f"{at}.lora_B.default.{leaf}"] @ state[f"{at}.lora_A.default.{leaf}"]
        else:
            merged[name] = tensor
    return merged


def quantise(state, block=4):
    """Block-scaled float8: the scale of a block is its largest magnitude."""
    stored = {}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            stored[name] = tensor
            continue
        blocks = tensor.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        stored[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(tensor.shape)
        stored[name + "_scale_inv"] = scale
    return stored


def add(state):
    """One tensor is a sum of two, another is handed on, one is a copy in another order."""
    return {"sum": state["a"] + state["b"], "a": state["a"], "rows": state["b"].flip(0)}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(12.0).reshape(4, 3))
        self.b = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 7)


def refit(models, export, change, world_size, **options):
    """Change the models on every rank, refit, apply; what a receiver holds, what the export gives, and the sources."""

    def work(collective):
        model = models[collective.rank]
        before = {name: logical_words(tensor).copy() for name, tensor in export(dict(model.state_dict())).items()}
        source = open_source(torch_adapter(model, collective=collective, export=export, **options), collective, ONE_THREAD)
        plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), world_size)
        assert list(source.owner.build(plan, EncodingMode.MIXED)) == []
        source.owner.commit()
        with torch.no_grad():
            change(model)
        buckets = list(source.owner.build(plan, EncodingMode.MIXED))
        source.owner.commit()
        return source, before, [item for bucket in buckets for item in bucket.items]

    results = run_ranks(world_size, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    held = results[0][1]
    for _, _, items in results:
        for item in items:
            view = whole(item.spec.shape)
            kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)
    expected = {name: logical_words(tensor) for name, tensor in export(dict(models[0].state_dict())).items()}
    return held, expected, [result[0] for result in results], [item for result in results for item in result[2]]


def assert_equal(held, expected):
    assert sorted(held) == sorted(expected)
    assert all(np.array_equal(held[name], expected[name]) for name in expected)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("by_layer", [False, True])
def test_merged_adapters_are_refitted_exactly(world_size, by_layer):
    def change(model):
        model.layers[1].lora_B["default"].weight[0, 0] += 1
        model.norm[2] = 5

    models = [Model(Lora) for _ in range(world_size)]
    held, expected, sources, items = refit(models, merge, change, world_size, export_by_layer=by_layer)
    assert_equal(held, expected)
    assert {item.spec.name for item in items} == {"layers.1.weight", "norm"}
    assert sources[0].residual_names == {f"layers.{n}.weight" for n in range(3)}


def test_the_documented_merge_gives_the_sums_under_the_checkpoints_names():
    (text,) = re.findall(r"```python\n(SCALING = .*?)\n\n\npublisher = ", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(text, documented := {})
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = Model(Lora)
    before = {name: tensor.clone() for name, tensor in documented["merged"](model.state_dict()).items()}
    assert sorted(before) == ["layers.0.weight", "layers.1.weight", "layers.2.weight", "norm"]
    layer = model.base_model.model.layers[1]
    factors = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.equal(before["layers.1.weight"], layer.base_layer.weight + factors * 2)
    held, expected, sources, items = refit(
        [model], documented["merged"], lambda model: layer.lora_A["default"].weight.mul_(2), 1, export_by_layer=True
    )
    assert_equal(held, expected)
    assert {item.spec.name for item in items} == {"layers.1.weight"}
    assert len(sources[0].residual_names) == 3


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_changed_scale_of_a_block_rewrites_values_whose_source_did_not_change(by_layer):
    def change(model):
        model.layers[0].weight[1, 1] = 1000  # the new largest magnitude of its block

    models = [Model(lambda: nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)) for _ in range(2)]
    held, expected, _, items = refit(models, quantise, change, 2, export_by_layer=by_layer)
    assert_equal(held, expected)
    changed = {item.spec.name: item.count for item in items}
    assert set(changed) == {"layers.0.weight", "layers.0.weight_scale_inv"}
    assert changed["layers.0.weight"] > 1
    assert changed["layers.0.weight_scale_inv"] == 1


def test_what_an_export_merely_rearranges_stays_direct():
    models = [Pair() for _ in range(2)]
    held, expected, sources, items = refit(models, add, lambda model: model.b[3].fill_(9), 2)
    assert_equal(held, expected)
    assert sources[0].residual_names == {"sum"}
    assert {item.spec.name for item in items} == {"sum", "rows"}


def test_an_export_that_changes_nothing_costs_nothing():
    source = open_source(torch_adapter(Pair(), export=dict), LocalCollective(), ONE_THREAD)
    assert source.residual_names == frozenset()


def test_an_export_that_edits_its_input_in_place_does_not_reach_the_model():
    model = Pair()
    before = model.a.detach().clone()

    def doubling(state):
        state["a"].mul_(2)
        return state

    source = open_source(torch_adapter(model, export=doubling), LocalCollective(), ONE_THREAD)
    assert source.residual_names == {"a"}
    assert torch.equal(model.a, before)
    assert np.array_equal(source.owner._residual.baseline.words("a"), logical_words(before * 2))


def test_an_export_that_looks_at_values_is_run_on_real_tensors():
    def clipped(state):
        return {name: tensor.clip(max=5.0) if float(tensor.max()) > 5 else tensor for name, tensor in state.items()}

    source = open_source(torch_adapter(Pair(), export=clipped), LocalCollective(), ONE_THREAD)
    assert source.residual_names == {"a", "b"}


def test_layers_of_one_kind_are_traced_once_and_the_others_are_proved():
    """The first layer is traced with digits; what it does is only a guess for the next ones, which random bits confirm."""

    def calls_per_layer(count):
        calls = []

        def export(state):
            calls.append(sorted(state))
            return quantise(state)

        model = Model(lambda: nn.Linear(8, 24, bias=False, dtype=torch.bfloat16), count)
        adapter = torch_adapter(model, export=export, export_by_layer=True)
        assert set(adapter.residual().reasons()) == {
            f"layers.{n}.weight{end}" for n in range(count) for end in ("", "_scale_inv")
        }
        return [sum(listed == [f"layers.{n}.weight"] for listed in calls) for n in range(count)]

    first, *others = calls_per_layer(4)
    assert all(2 <= other < first for other in others)


def test_a_layer_that_an_export_treats_differently_is_not_taken_for_its_twin():
    def odd_one_out(state):
        return {name: tensor.flip(0) if name == "layers.2.weight" else tensor.t() for name, tensor in state.items()}

    models = [Model(lambda: nn.Linear(8, 8, bias=False, dtype=torch.bfloat16), 4)]
    held, expected, sources, items = refit(
        models, odd_one_out, lambda model: [layer.weight[1, 2].fill_(7) for layer in model.layers], 1, export_by_layer=True
    )
    assert_equal(held, expected)
    assert not sources[0].residual_names
    assert len(items) == 4


def test_an_export_by_layer_that_mixes_layers_is_refused():
    model = Model(lambda: nn.Linear(8, 8, bias=False, dtype=torch.bfloat16), count=2)

    def mix(state):
        return {"sum": state["layers.0.weight"] + state["layers.1.weight"]}

    with pytest.raises(RejectedError, match=r"on its own: KeyError: 'layers.0.weight'; it needs tensors of other layers"):
        torch_adapter(model, export=mix, export_by_layer=True).catalog()

    def widen(state):
        return {name: tensor.repeat(len(state), 1) for name, tensor in state.items() if tensor.ndim == 2}

    with pytest.raises(RejectedError, match="expected layers to be converted independently"):
        torch_adapter(model, export=widen, export_by_layer=True).catalog()


def test_a_quantised_checkpoint_is_the_manifest_of_a_quantising_export(tmp_path):
    from safetensors.torch import save_file

    model = Model(lambda: nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
    save_file(
        {name: tensor.contiguous() for name, tensor in quantise(model.state_dict()).items()}, tmp_path / "model.safetensors"
    )
    adapter = torch_adapter(model, export=quantise, manifest=tmp_path)
    assert str(adapter.catalog()["layers.0.weight"]) == "layers.0.weight F8_E4M3[8, 8]"
    assert isinstance(adapter.catalog(), Catalog)
