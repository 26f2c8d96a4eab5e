"""What an engine's configuration decides: the CPU switch, under which matrices get torch's plain product; moving experts."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deltarefit.errors import RejectedError
from deltarefit.integrations.vllm.after_load import VllmAfterLoad
from deltarefit.integrations.vllm.experts import check_experts
from deltarefit.integrations.vllm.plain_linears import plain_for_matrices

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("shape", "is_plain"), [((4, 6), True), ((4, 1, 4), False), ((2, 4, 6), False)])
def test_linear_layers_get_the_plain_product(shape: tuple[int, ...], is_plain: bool) -> None:
    asked = []
    layer = SimpleNamespace(weight=torch.zeros(shape))
    plain_for_matrices(lambda layer, remove_weight: asked.append((layer, remove_weight)))(layer, remove_weight=True)
    assert (getattr(layer, "cpu_linear", None) is torch.nn.functional.linear) == is_plain
    assert asked == ([] if is_plain else [(layer, True)])
    assert tuple(layer.weight.shape) == shape


def test_an_engine_that_moves_its_experts_is_refused() -> None:
    check_experts(SimpleNamespace(enable_eplb=False))
    with pytest.raises(RejectedError, match="--enable-eplb"):
        check_experts(SimpleNamespace(enable_eplb=True))


class Layered(torch.nn.Module):
    """Notes on which device, and with which dtype, what names neither is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {"build": self.makes()}
        self.child = torch.nn.Identity()
        self.child.quant_method = QuantizeMethod()

    @staticmethod
    def makes() -> tuple[str, torch.dtype]:
        tensor = torch.empty(1)
        return tensor.device.type, tensor.dtype

    def load_weights(self, weights) -> None:
        self.made["load"] = self.makes()

    def process_weights_after_loading(self) -> None:
        self.made["whole"] = self.makes()


class QuantizeMethod:
    """What vLLM takes a layer with work to do by."""


@pytest.fixture
def loaders(monkeypatch):
    """The parts of vLLM's loaders that are used here."""

    @contextmanager
    def default_dtype(dtype):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(before)

    def process(holder, model_config, device) -> None:
        holder.layer.made = Layered.makes()

    parts = {
        "vllm.config": {"set_current_vllm_config": lambda config: nullcontext()},
        "vllm.utils.torch_utils": {"set_default_torch_dtype": default_dtype},
        "vllm.model_executor.model_loader.utils": {
            "initialize_model": lambda **options: Layered(),
            "process_weights_after_loading": process,
        },
        "vllm.model_executor.layers.quantization.base_config": {"QuantizeMethodBase": QuantizeMethod},
        "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda module: False},
    }
    for path in parts:
        for end in range(path.count(".") + 1):
            parent = ".".join(path.split(".")[: end + 1])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for path, names in parts.items():
        vars(sys.modules[path]).update(names)


@pytest.mark.usefixtures("loaders")
def test_a_second_model_is_built_on_the_device_and_loaded_and_finished_from_host_memory() -> None:
    """As by vLLM's loaders. A load that makes indices, say, makes them beside the weights that it is given."""
    compilation = SimpleNamespace(static_forward_context={}, static_all_moe_layers=[])
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16), compilation_config=compilation)
    after_load = VllmAfterLoad(config, torch.device("meta"))
    model = after_load.build()
    after_load.load(model, [])
    for step in after_load.steps(model):
        step.run()
    assert model.made["build"] == ("meta", torch.bfloat16)
    assert model.made["load"] == model.child.made == model.made["whole"] == ("cpu", torch.bfloat16)
