"""A mixture-of-experts transformer in synthetic shapes, in bf16: as a trainer holds it, and as an engine fuses and stacks it.

Only its shapes and its loader matter; nothing is ever computed with it. Names are as in published MoE checkpoints; the rollout
side joins query, key and value, gate and up, and stacks experts, as serving engines do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["Shapes", "SyntheticEngine", "SyntheticPolicy", "change", "shapes_of"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the model is made of."""

    vocabulary: int
    hidden: int
    intermediate: int
    """Of one expert."""
    experts: int
    layers: int

    @property
    def keys(self) -> int:
        """Rows of key and value: a quarter of the query's, as with grouped heads."""
        return self.hidden // 4

    def named(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Checkpoint names and shapes, in the order of layers."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (self.keys, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (self.keys, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                at = f"{prefix}.mlp.experts.{expert}"
                yield f"{at}.gate_proj.weight", (self.intermediate, self.hidden)
                yield f"{at}.up_proj.weight", (self.intermediate, self.hidden)
                yield f"{at}.down_proj.weight", (self.hidden, self.intermediate)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    @property
    def nbytes(self) -> int:
        return 2 * sum(torch.Size(shape).numel() for _, shape in self.named())


def shapes_of(nbytes: int) -> Shapes:
    """Shapes of about that many bytes."""
    base = Shapes(16384, 1024, 512, 32, 0) if nbytes >= 200 << 20 else Shapes(1024, 256, 128, 8, 0)
    layer = Shapes(base.vocabulary, base.hidden, base.intermediate, base.experts, 1).nbytes - base.nbytes
    layers = max(1, round((nbytes - base.nbytes) / layer))
    return Shapes(base.vocabulary, base.hidden, base.intermediate, base.experts, layers)


def initial_weights(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """The same everywhere: each tensor's values follow from its place in the list."""
    for number, (name, shape) in enumerate(shapes.named()):
        generator = torch.Generator().manual_seed(number)
        yield name, torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)


class SyntheticPolicy(torch.nn.Module):
    """The trainer's side: one parameter per checkpoint tensor."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, tensor in initial_weights(shapes):
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


class SyntheticEngine(torch.nn.Module):
    """The rollout side: joined and stacked parameters, and a loader that knows where each name goes."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self._homes: dict[str, torch.Tensor] = {}
        hidden, wide = shapes.hidden, shapes.intermediate
        self._add("embed", (shapes.vocabulary, hidden), {"model.embed_tokens.weight": slice(None)})
        for layer in range(shapes.layers):
            self._add_layer(layer, shapes)
            experts, prefix = shapes.experts, f"model.layers.{layer}.mlp.experts"
            joined = self._parameter(f"w13_{layer}", (experts, 2 * wide, hidden))
            down = self._parameter(f"w2_{layer}", (experts, hidden, wide))
            for expert in range(experts):
                self._homes[f"{prefix}.{expert}.gate_proj.weight"] = joined[expert, :wide]
                self._homes[f"{prefix}.{expert}.up_proj.weight"] = joined[expert, wide:]
                self._homes[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
        self._add("head", (shapes.vocabulary, hidden), {"lm_head.weight": slice(None)})
        self.load_weights(initial_weights(shapes))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write each tensor where it belongs."""
        for name, tensor in weights:
            self._homes[name].copy_(tensor)

    def _add_layer(self, layer: int, shapes: Shapes) -> None:
        hidden, keys, prefix = shapes.hidden, shapes.keys, f"model.layers.{layer}"
        self._add(f"norm_{layer}", (hidden,), {f"{prefix}.input_layernorm.weight": slice(None)})
        rows = {
            f"{prefix}.self_attn.q_proj.weight": slice(0, hidden),
            f"{prefix}.self_attn.k_proj.weight": slice(hidden, hidden + keys),
            f"{prefix}.self_attn.v_proj.weight": slice(hidden + keys, hidden + 2 * keys),
        }
        self._add(f"qkv_{layer}", (hidden + 2 * keys, hidden), rows)
        self._add(f"o_{layer}", (hidden, hidden), {f"{prefix}.self_attn.o_proj.weight": slice(None)})
        self._add(f"router_{layer}", (shapes.experts, hidden), {f"{prefix}.mlp.gate.weight": slice(None)})

    def _add(self, name: str, shape: tuple[int, ...], rows: dict[str, slice]) -> None:
        home = self._parameter(name, shape)
        for checkpoint_name, which in rows.items():
            self._homes[checkpoint_name] = home[which]

    def _parameter(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)
        self.register_parameter(name, parameter)
        return parameter.data


def change(policy: torch.nn.Module, fraction: float, seed: int) -> None:
    """Change that fraction of all elements, chosen uniformly, each by 0.5 to 1.5 percent, up or down (paper 8.1).

    Half a percent is more than half the distance between neighbouring bf16 values, so every chosen element really changes.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        flat = parameter.data.view(-1)
        chosen = (torch.rand(flat.numel(), generator=generator) < fraction).nonzero(as_tuple=True)[0]
        amount = torch.rand(chosen.numel(), generator=generator).mul_(0.01).add_(0.005)
        amount *= torch.randint(0, 2, (chosen.numel(),), generator=generator) * 2 - 1
        flat[chosen] = (flat[chosen].float() * (1 + amount)).to(torch.bfloat16)
