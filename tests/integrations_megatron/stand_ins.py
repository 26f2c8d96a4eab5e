"""Stand-ins for Megatron's objects: tasks, mappings and bridges that say what they are told to."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Task:
    """A WeightConversionTask."""

    param_name: str
    global_param_name: str
    mapping: Any
    vp_stage: int | None
    megatron_module: Any
    param_weight: Any
    export_hook: Any = None


def mapping(kind, hf_param, *, name="w", rank=0, size=1, **more):
    """An object of a class of this name."""
    return type(kind, (), {"hf_param": hf_param, "megatron_param": name, "tp_rank": rank, "tp_size": size, **more})()


def auto(hf_param, kind="column", **more):
    """An AutoMapping that resolves to this."""
    more.setdefault("permute_dims", None)
    found = mapping("AutoMapping", hf_param, **more)
    type(found)._detect_parallelism_type = lambda self, module: kind
    return found


class MegatronModelBridge:
    """The base class: its hook changes nothing."""

    def mapping_registry(self):
        return SimpleNamespace(megatron_to_hf_lookup=lambda name: None)

    def maybe_modify_converted_hf_weight(self, task, weights, state):
        raise AssertionError("the base class is never asked")


class Bridge:
    """Gives tasks, and exports what ``export`` makes of them."""

    def __init__(self, tasks, *, model_bridge=None, export=None):
        self.tasks = list(tasks)
        self.hf_pretrained = SimpleNamespace(state={})
        self._model_bridge = model_bridge or MegatronModelBridge()
        self.export = export
        self.exports = []

    def get_conversion_tasks(self, chunks):
        del chunks
        return list(self.tasks)

    def export_hf_weights(self, chunks, *, cpu, show_progress, conversion_tasks):
        del chunks
        assert cpu
        assert not show_progress
        self.exports.append([task.global_param_name for task in conversion_tasks])
        return self.export(conversion_tasks)


class Chunk(nn.Module):
    """A model chunk with parameters under dotted names."""

    def __init__(self, tensors, config=None):
        super().__init__()
        for name, tensor in tensors.items():
            module, leaf = self.place(name, config or SimpleNamespace())
            module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))

    def place(self, name, config):
        *path, leaf = name.split(".")
        module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.config = config
        return module, leaf

    def task(self, name, found, *, global_name=None, chunk=0, export_hook=None):
        """The task of one of the chunk's parameters."""
        path, _, _ = name.rpartition(".")
        module = self.get_submodule(path)
        return Task(name, global_name or name, found, chunk, module, self.get_parameter(name), export_hook)


def elsewhere(name, found):
    """The task of a parameter on another pipeline stage."""
    return Task(name, name, found, None, None, None)
