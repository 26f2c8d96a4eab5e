"""What a Publisher is told about the checkpoint: its names and dtypes, and a function that makes it. With real receivers."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

import deltarefit  # noqa: E402
from deltarefit.bits import logical_words  # noqa: E402
from deltarefit.canonical import Catalog, TensorSpec  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.integrations.torch import torch_adapter  # noqa: E402
from deltarefit.offline import catalog_of_checkpoint  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from pair import RECEIVER_SETTINGS, SETTINGS  # noqa: E402

pytestmark = pytest.mark.torch


class Masters(nn.Module):
    """32-bit parameters, as an optimizer keeps them, and an integer buffer."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(12, 8, generator=generator))
        self.second = nn.Parameter(torch.randn(8, generator=generator))
        self.register_buffer("steps", torch.tensor(3))

    def step(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-2)
            self.steps += 1


class Adapted(nn.Module):
    """A frozen weight with an adapter attached."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base_layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.lora_a = nn.Parameter(torch.randn(2, 8, generator=generator).bfloat16())
        self.lora_b = nn.Parameter(torch.zeros(8, 2, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))


def merged(state):
    """The checkpoint of an Adapted: the sum, and the norm as it is. Of a layer, what that layer gives."""
    norm = {"norm": state["norm"]} if "norm" in state else {}
    return {"weight": state["base_layer.weight"] + state["lora_b"] @ state["lora_a"], **norm}


class Rollout(nn.Module):
    """Holds a checkpoint's tensors in one storage and loads them by name."""

    def __init__(self, tensors):
        super().__init__()
        self.names = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self.parts = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.zeros_like(t), requires_grad=False) for name, t in tensors.items()}
        )
        self.load_weights(tensors.items())

    def load_weights(self, weights):
        for name, tensor in weights:
            self.parts[name.replace(".", "/")].data.copy_(tensor)

    def bits(self):
        return {name: logical_words(self.parts[name.replace(".", "/")]).tobytes() for name in self.names}


def checkpoint_of(model):
    """What a trainer with 32-bit masters saves for 16-bit serving."""
    return {
        name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }


def bits(tensors):
    return {name: logical_words(tensor).tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def run(tmp_path):
    return (tmp_path / "run").as_uri()


def attach(rollout, run):
    return deltarefit.Receiver.attach(rollout, load_weights=rollout.load_weights, run=run, name="r", settings=RECEIVER_SETTINGS)


@pytest.mark.parametrize("kind", ["directory", "text", "catalog"])
def test_masters_are_published_in_the_checkpoints_dtype(tmp_path, run, kind):
    model = Masters()
    save_file(checkpoint_of(model), tmp_path / "model.safetensors")
    manifest = {"directory": tmp_path, "text": str(tmp_path), "catalog": catalog_of_checkpoint(tmp_path)}[kind]
    rollout = Rollout(checkpoint_of(model))
    with attach(rollout, run), deltarefit.Publisher(model, run=run, settings=SETTINGS, manifest=manifest) as publisher:
        for seed in range(2):
            model.step(seed)
            report = publisher.refit()
            assert rollout.bits() == bits(checkpoint_of(model))
        assert 0 < report.changed_elements < report.total_elements
        coverage = publisher.coverage()
    assert (coverage.tensors_direct, coverage.tensors_total) == (3, 3)
    assert {row.path: row.tensors for row in coverage.by_type} == {"cast": 2, "direct": 1}
    assert "held as F32, rounded to BF16" in next(row.reason for row in coverage.by_type if row.path == "cast")


def test_an_update_that_rounds_away_sends_nothing(tmp_path, run):
    model = Masters()
    save_file(checkpoint_of(model), tmp_path / "model.safetensors")
    rollout = Rollout(checkpoint_of(model))
    with attach(rollout, run), deltarefit.Publisher(model, run=run, settings=SETTINGS, manifest=tmp_path) as publisher:
        with torch.no_grad():
            model.first[0, 0] = model.first[0, 0].bfloat16().float() * (1 + 2**-20)
        assert publisher.refit().changed_elements <= 1
        changed = publisher.refit()
        assert (changed.changed_elements, changed.payloads) == (0, 0)


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_an_export_computes_arrives_bit_for_bit(run, by_layer):
    model = Adapted()
    rollout = Rollout(merged(model.state_dict()))
    with (
        attach(rollout, run),
        deltarefit.Publisher(model, run=run, settings=SETTINGS, export=merged, export_by_layer=by_layer) as publisher,
    ):
        coverage = publisher.coverage()
        assert [(row.path, row.tensors, row.items) for row in coverage.by_type] == [("direct", 1, 1), ("residual", 1, 1)]
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                model.lora_b.add_(torch.randn(8, 2, generator=generator).bfloat16())
                model.norm[seed] += 1
            publisher.refit()
            assert rollout.bits() == bits(merged(model.state_dict()))


def test_a_manifest_with_other_tensors_is_refused_with_names(run):
    manifest = Catalog([TensorSpec("first", "BF16", (12, 8)), TensorSpec("third", "BF16", (4,))])
    with pytest.raises(RejectedError, match=r"third: the checkpoint has it, the model gives no source for it"):
        deltarefit.Publisher(Masters(), run=run, settings=SETTINGS, manifest=manifest)


def test_options_beside_an_adapter_are_refused(run):
    model = Masters()
    with pytest.raises(RejectedError, match="got an adapter and export; give these to the adapter itself"):
        deltarefit.Publisher(model, run=run, settings=SETTINGS, adapter=torch_adapter(model), export=dict)


def test_options_of_another_integration_are_refused(run):
    with pytest.raises(RejectedError, match=r"got bridge for a .*Masters: .* takes manifest, export, export_by_layer"):
        deltarefit.Publisher(Masters(), run=run, settings=SETTINGS, bridge=object())


def quantised(state, block=4):
    """A checkpoint with 8-bit weights, each block of them under a scale of its own; everything else as it is."""
    stored = {}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            stored[name] = tensor
            continue
        blocks = tensor.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / 448
        stored[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(tensor.shape)
        stored[name + "_scale_inv"] = scale
    return stored


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def test_a_quantised_checkpoint_is_refitted_to_the_bit(tmp_path, run):
    """What receivers hold are 8-bit weights and scales; the bits of both are compared and sent."""
    model = Layers()
    save_file({name: t.contiguous() for name, t in quantised(model.state_dict()).items()}, tmp_path / "model.safetensors")
    rollout = Rollout(quantised(model.state_dict()))
    options = {"export": quantised, "export_by_layer": True, "manifest": tmp_path, "settings": SETTINGS}
    with attach(rollout, run), deltarefit.Publisher(model, run=run, **options) as publisher:
        coverage = publisher.coverage()
        assert (coverage.tensors_direct, coverage.tensors_total) == (2, 6)
        assert all(row.reason for row in coverage.by_type if row.path == "residual")
        counts = []
        for row, value in ((1, 1000.0), (1, 999.0), (2, 0.0), (2, -0.0)):
            before = quantised(model.state_dict())
            with torch.no_grad():
                model.layers[1].weight[row, 2] = value
            after = quantised(model.state_dict())
            assert publisher.refit().changed_elements == sum(
                int((logical_words(after[name]) != logical_words(before[name])).sum()) for name in after
            )
            assert rollout.bits() == bits(after)
            counts.append({name: (logical_words(after[name]) != logical_words(before[name])).sum() for name in after})
        assert publisher.refit().changed_elements == 0
    assert counts[0]["layers.1.weight"] > 1, "the scale of its block changed, so values changed whose sources did not"
    assert counts[0]["layers.1.weight_scale_inv"] == 1
    assert counts[3] == {**dict.fromkeys(counts[3], 0), "layers.1.weight": 1}, "a zero that changes its sign"
