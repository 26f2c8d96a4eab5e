"""Toy models whose loaders do, one at a time, what real engines' loaders do to weights, and what they must not do.

Each case says what a receiver is expected to make of it. An engine author can add a case for a loader of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deltarefit.bits import DTYPES, storage_words, tensor_from_words
from deltarefit.canonical import Catalog, TensorSpec

__all__ = ["LOADERS", "ToyCase", "ToyModel", "random_weights"]

Rule = Callable[[Any, torch.Tensor], None]
"""Puts a canonical tensor into a model. ``Any``: torch types every attribute of a module as tensor or module."""
Shape = tuple[int, ...]
_Spec = tuple[str, Shape]


class ToyModel(torch.nn.Module):
    """Parameters and buffers by name, and a rule per canonical name that puts a tensor into them."""

    def __init__(
        self,
        parameters: Mapping[str, _Spec],
        rules: Mapping[str, Rule],
        *,
        buffers: Mapping[str, _Spec] | None = None,
        reports: Callable[[str], str | None] = lambda name: None,
        ignores_unknown: bool = False,
    ) -> None:
        super().__init__()
        for name, (dtype, shape) in parameters.items():
            data = torch.zeros(shape, dtype=torch.float32).to(DTYPES[dtype])
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        for name, (dtype, shape) in (buffers or {}).items():
            self.register_buffer(name, torch.zeros(shape).to(DTYPES[dtype]))
        self._rules = dict(rules)
        self._reports = reports
        self._ignores_unknown = ignores_unknown
        self.calls: list[list[str]] = []
        self.pending: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Place tensors; returns what it claims to have loaded."""
        self.calls.append([])
        self.pending.clear()
        claimed: set[str] = set()
        for name, tensor in weights:
            self.calls[-1].append(name)
            if name not in self._rules:
                if self._ignores_unknown:
                    continue
                raise KeyError(name)
            self._rules[name](self, tensor)
            if (said := self._reports(name)) is not None:
                claimed.add(said)
        return claimed


@dataclass(frozen=True, slots=True)
class ToyCase:
    """A model, the canonical tensors it loads, and what a receiver should find."""

    specs: Mapping[str, _Spec]
    build: Callable[[], ToyModel]
    routes: Mapping[str, str] = field(default_factory=dict)
    """Expected route kinds that are not ``pieces``."""
    refused: str | None = None
    """Part of the text with which prewarm must refuse it."""
    equal_pairs: tuple[tuple[str, str], ...] = ()
    """Tensors that must always have equal bits for a dense reload to have one meaning."""

    @property
    def catalog(self) -> Catalog:
        return Catalog(TensorSpec(name, dtype, shape) for name, (dtype, shape) in self.specs.items())


def random_weights(catalog: Catalog, seed: int, *, finite: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of random stored bits, special patterns included; ordinary numbers only if ``finite``."""
    from deltarefit.placement.digits import random_words

    generator = np.random.default_rng(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, spec in catalog.items():
        if finite and DTYPES[spec.dtype].is_floating_point:
            weights[name] = torch.from_numpy(generator.standard_normal(spec.shape)).to(DTYPES[spec.dtype])
        else:
            weights[name] = tensor_from_words(random_words(spec.dtype, spec.num_elements, generator), spec)
    return weights


def _copy(parameter: str, place: Callable[[torch.Tensor], torch.Tensor] = lambda p: p) -> Rule:
    return lambda model, w: void(place(getattr(model, parameter).data).copy_(w))


def _through(parameter: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Rule:
    return lambda model, w: void(getattr(model, parameter).data.copy_(change(w)))


def void(_: object) -> None:
    """Drop a value: rules return nothing."""


def _single(stored: _Spec, canonical: _Spec, rule: Rule, **expected: Any) -> ToyCase:
    """One parameter ``w`` that one canonical tensor ``w`` fills."""
    return ToyCase({"w": canonical}, lambda: ToyModel({"w": stored}, {"w": rule}), **expected)


BF16 = "BF16"


def _fused_qkv() -> ToyCase:
    rules = {
        "q": _copy("qkv", lambda p: p.narrow(0, 0, 8)),
        "k": _copy("qkv", lambda p: p[8:12]),
        "v": lambda m, w: m.qkv.data.__setitem__(slice(12, 16), w),
    }
    specs = {"q": (BF16, (8, 6)), "k": (BF16, (4, 6)), "v": (BF16, (4, 6))}
    return ToyCase(specs, lambda: ToyModel({"qkv": (BF16, (16, 6))}, rules))


def _gate_up_of_rank_1() -> ToyCase:
    rules = {
        "gate": lambda m, w: void(m.gate_up.data[:4].copy_(w.narrow(0, 4, 4))),
        "up": lambda m, w: void(m.gate_up.data[4:].copy_(w.narrow(0, 4, 4))),
        "down": lambda m, w: void(m.down.data.copy_(w.narrow(1, 4, 4))),
    }
    specs = {"gate": (BF16, (8, 5)), "up": (BF16, (8, 5)), "down": (BF16, (5, 8))}
    return ToyCase(specs, lambda: ToyModel({"gate_up": (BF16, (8, 5)), "down": (BF16, (5, 4))}, rules))


def _experts(held: tuple[int, ...], slots: Mapping[int, tuple[int, ...]], reports: bool) -> ToyCase:
    """Experts fused into w13 and w2; those that are not held are skipped."""

    def gate(expert: int, row: int) -> Rule:
        def rule(model: Any, w: torch.Tensor) -> None:
            for slot in slots.get(expert, ()):
                model.w13.data[slot].narrow(0, row, 4).copy_(w)

        return rule

    def down(expert: int) -> Rule:
        def rule(model: Any, w: torch.Tensor) -> None:
            for slot in slots.get(expert, ()):
                model.w2.data[slot].copy_(w)

        return rule

    rules: dict[str, Rule] = {}
    specs: dict[str, _Spec] = {}
    for expert in range(4):
        rules |= {f"{expert}.gate": gate(expert, 0), f"{expert}.up": gate(expert, 4), f"{expert}.down": down(expert)}
        specs |= {f"{expert}.gate": (BF16, (4, 6)), f"{expert}.up": (BF16, (4, 6)), f"{expert}.down": (BF16, (6, 4))}
    count = sum(len(places) for places in slots.values())
    skipped = {name: "skipped" for name in specs if int(name[0]) not in held}
    parameters = {"w13": (BF16, (count, 8, 6)), "w2": (BF16, (count, 6, 4))}
    report: Callable[[str], str | None] = (lambda name: name) if reports else (lambda name: None)
    return ToyCase(specs, lambda: ToyModel(parameters, rules, reports=report), routes=skipped)


def _stacked_experts() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        for expert in range(w.shape[0]):
            gate, up = w[expert].chunk(2)
            model.w13.data[expert][:3].copy_(up)
            model.w13.data[expert][3:].copy_(gate)

    return ToyCase({"w": (BF16, (3, 6, 5))}, lambda: ToyModel({"w13": (BF16, (3, 6, 5))}, {"w": rule}))


class _TiedModel(ToyModel):
    """The head is the embedding."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        super().__init__({"embed": (BF16, (10, 4))}, rules)
        self.head = self.embed


def _tied(head_rule: Rule, **expected: Any) -> ToyCase:
    rules = {"embed": _copy("embed"), "head": head_rule}
    specs = {"embed": (BF16, (10, 4)), "head": (BF16, (10, 4))}
    return ToyCase(specs, lambda: _TiedModel(rules), **expected)


def _head_copied_from_embedding() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        model.embed.data.copy_(w)
        model.head.data.copy_(model.embed.data)

    parameters = {"embed": (BF16, (8, 4)), "head": (BF16, (8, 4))}
    return ToyCase({"embed": (BF16, (8, 4))}, lambda: ToyModel(parameters, {"embed": rule}))


def _vocab_padding() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        model.embed.data[:10].copy_(w)
        model.embed.data[10:].fill_(0)

    return ToyCase({"embed": (BF16, (10, 4))}, lambda: ToyModel({"embed": (BF16, (16, 4))}, {"embed": rule}))


def _zeroed_first() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        model.embed.data.zero_()
        model.embed.data[3:7].copy_(w[:4])

    return ToyCase({"embed": (BF16, (10, 4))}, lambda: ToyModel({"embed": (BF16, (8, 4))}, {"embed": rule}))


def _composed_a_log() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        model.w.data.copy_(w)
        model.w.data.copy_(-torch.exp(model.w.float()))

    return _single(("F32", (12,)), ("F32", (12,)), rule, routes={"w": "scratch"})


def _two_names(change: Callable[[torch.Tensor], torch.Tensor], **expected: Any) -> ToyCase:
    """A fused parameter that is written only when both halves came in one call."""

    def rule(name: str) -> Rule:
        def load(model: Any, w: torch.Tensor) -> None:
            model.pending[name] = w
            if len(model.pending) == 2:
                model.fused.data.copy_(change(torch.cat([model.pending["a"], model.pending["b"]])))

        return load

    specs = {"a": (BF16, (4, 8)), "b": (BF16, (2, 8)), "c": (BF16, (3,))}
    rules = {"a": rule("a"), "b": rule("b"), "c": _copy("c")}
    parameters = {"fused": (BF16, (6, 8)), "c": (BF16, (3,))}
    return ToyCase(specs, lambda: ToyModel(parameters, rules), **expected)


def _alias_needs_embedding() -> ToyCase:
    """The loader refuses the tied head when it comes alone, and ignores it when the embedding is there too."""

    class Model(_TiedModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            given = dict(weights)
            if set(given) == {"head"}:
                raise ValueError("head is tied to embed; load both")
            return super().load_weights((name, w) for name, w in given.items() if name != "head")

    specs = {"embed": (BF16, (10, 4)), "head": (BF16, (10, 4))}
    return ToyCase(
        specs, lambda: Model({"embed": _copy("embed")}), routes={"head": "skipped"}, equal_pairs=(("embed", "head"),)
    )


def _threaded() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: model.w.data.copy_(w + 1))
        thread.start()
        thread.join()

    return _single((BF16, (4, 4)), (BF16, (4, 4)), rule, refused="behind the dispatch hook")


def _raw_memory(model: Any, w: torch.Tensor) -> None:
    storage_words(model.w.data)[:] = storage_words((w + 1).contiguous())


def _rebind_data(model: Any, w: torch.Tensor) -> None:
    model.w.data = w.clone()


def _rebind_parameter(model: Any, w: torch.Tensor) -> None:
    model.w = torch.nn.Parameter(w.clone(), requires_grad=False)


def _in_place_on_input(model: Any, w: torch.Tensor) -> None:
    w.mul_(2)
    model.w.data.copy_(w)


def _scalar_fill(model: Any, w: torch.Tensor) -> None:
    model.w.data.fill_(w.item())


def _overlapping_rows(model: Any, w: torch.Tensor) -> None:
    model.w.data[0:4].copy_(w[0:4])
    model.w.data[2:6].copy_(w[2:6])


def _conflicting_rows(model: Any, w: torch.Tensor) -> None:
    model.w.data[0:4].copy_(w[0:4])
    model.w.data[2:6].copy_(w[0:4])


def _even_and_odd_columns(model: Any, w: torch.Tensor) -> None:
    model.w.data[:, 0::2].copy_(w[:, :3])
    model.w.data[:, 1::2].copy_(w[:, 3:])


def _index_put(model: Any, w: torch.Tensor) -> None:
    model.w.data.index_put_((torch.arange(4),), w)


def _one_more() -> ToyCase:
    """Norms that compute with ``1 + weight`` and keep that sum ready: copied, then added to in place."""

    def rule(model: Any, w: torch.Tensor) -> None:
        model.w.data.copy_(w)
        model.more.data.copy_(model.w.data).add_(1.0)

    specs: dict[str, tuple[str, tuple[int, ...]]] = {"w": (BF16, (6, 4))}
    return ToyCase(specs, lambda: ToyModel({"w": _MATRIX, "more": _MATRIX}, {"w": rule}), routes={"w": "scratch"})


def _added_twice(model: Any, w: torch.Tensor) -> None:
    """Copies into one view, then adds to a wider one: what is there besides counts too."""
    model.w.data[:3].copy_(w[:3])
    model.w.data.add_(w)


def _row_normalise(w: torch.Tensor) -> torch.Tensor:
    wide = w.float()
    return wide / wide.nan_to_num().abs().clamp(max=1e3).sum(1, keepdim=True).add(1)


def _zero_other() -> ToyCase:
    def rule(model: Any, w: torch.Tensor) -> None:
        model.w.data.zero_()
        model.w.data[4:].copy_(w)

    specs = {"a": (BF16, (4, 3)), "b": (BF16, (4, 3))}
    rules = {"a": _copy("w", lambda p: p[:4]), "b": rule}
    return ToyCase(specs, lambda: ToyModel({"w": (BF16, (8, 3))}, rules), refused="with a constant when it loads b")


def _shared_bytes() -> ToyCase:
    rules = {"a": _copy("w", lambda p: p[:4]), "b": _copy("w", lambda p: p[2:])}
    specs = {"a": (BF16, (4, 3)), "b": (BF16, (4, 3))}
    return ToyCase(specs, lambda: ToyModel({"w": (BF16, (6, 3))}, rules), refused="which one wins")


def _never_written() -> ToyCase:
    specs = {"a": (BF16, (4,)), "b": (BF16, (4,))}
    rules: dict[str, Rule] = {"a": _copy("a"), "b": lambda model, w: None}
    return ToyCase(
        specs, lambda: ToyModel(specs, rules, reports=lambda name: name), refused="reports it as loaded, but no write"
    )


def _lacking() -> ToyCase:
    parameters = {"a": (BF16, (4,)), "b": (BF16, (4,))}
    return ToyCase({"a": (BF16, (4,))}, lambda: ToyModel(parameters, {"a": _copy("a")}), refused="the checkpoint lacks it")


def _unknown_name() -> ToyCase:
    specs = {"a": (BF16, (4,)), "a.base_layer": (BF16, (4,))}
    return ToyCase(specs, lambda: ToyModel({"a": (BF16, (4,))}, {"a": _copy("a")}), refused="the loader refuses it: KeyError")


def _packed() -> ToyCase:
    return ToyCase(
        {"a": (BF16, (4,))}, lambda: ToyModel({"a": (BF16, (0,))}, {"a": lambda model, w: None}), refused="packed this weight"
    )


def _every_dtype() -> ToyCase:
    names = [name for name in DTYPES if name not in ("C64", "U16", "U32", "U64")]
    specs = {name: (name, (5, 3)) for name in names}
    return ToyCase(specs, lambda: ToyModel(specs, {name: _copy(name) for name in names}))


def _buffers() -> ToyCase:
    """A checkpoint-borne buffer, and one that only the receiver has."""

    def build() -> ToyModel:
        model = ToyModel(
            {"w": (BF16, (4,))},
            {"w": _copy("w"), "bias": _copy("bias")},
            buffers={"bias": ("F32", (6,)), "root": ("BF16", (1,))},
        )
        model.get_buffer("root").fill_(0.018798828125)
        return model

    return ToyCase({"w": (BF16, (4,)), "bias": ("F32", (6,))}, build)


def _no_elements() -> ToyCase:
    specs = {"empty": (BF16, (0, 4)), "scalar": ("F32", ()), "w": (BF16, (2,))}
    return ToyCase(specs, lambda: ToyModel(specs, {name: _copy(name) for name in specs}), routes={"empty": "skipped"})


_MATRIX = (BF16, (6, 4))
_TURNED = (BF16, (4, 6))

LOADERS: Mapping[str, Callable[[], ToyCase]] = {
    "fused qkv": _fused_qkv,
    "gate and up of one rank, row-parallel down": _gate_up_of_rank_1,
    "all experts": lambda: _experts((0, 1, 2, 3), {e: (e,) for e in range(4)}, reports=False),
    "experts of another rank": lambda: _experts((2, 3), {2: (0,), 3: (1,)}, reports=False),
    "experts of another rank, reported as loaded": lambda: _experts((2, 3), {2: (0,), 3: (1,)}, reports=True),
    "redundant experts": lambda: _experts((0, 1, 2, 3), {2: (0, 4), 0: (1, 5), 3: (2,), 1: (3,)}, reports=False),
    "stacked experts with halves swapped": _stacked_experts,
    "tied head ignored": lambda: _tied(lambda m, w: None, routes={"head": "skipped"}, equal_pairs=(("embed", "head"),)),
    "tied head loaded twice": lambda: _tied(_copy("embed"), equal_pairs=(("embed", "head"),)),
    "tied head only with its embedding": _alias_needs_embedding,
    "head copied from the embedding": _head_copied_from_embedding,
    "vocabulary padding": _vocab_padding,
    "zeroed before a partial copy": _zeroed_first,
    "transposed view": lambda: _single(_TURNED, _MATRIX, _through("w", lambda w: w.t())),
    "transposed copy": lambda: _single(_TURNED, _MATRIX, _through("w", lambda w: w.t().contiguous())),
    "clone": lambda: _single(_MATRIX, _MATRIX, _through("w", torch.clone)),
    "concatenation": lambda: _single(_MATRIX, _MATRIX, _through("w", lambda w: torch.cat([w[4:], w[:4]]))),
    "concatenation with padding": lambda: _single(
        (BF16, (6, 4)), (BF16, (4, 4)), _through("w", lambda w: torch.cat([w, torch.ones(2, 4, dtype=w.dtype)]))
    ),
    "index select": lambda: _single(
        _MATRIX, _MATRIX, _through("w", lambda w: w.index_select(0, torch.tensor([5, 0, 3, 1, 2, 4])))
    ),
    "interleaved heads": lambda: _single(
        (BF16, (8, 3)), (BF16, (8, 3)), _through("w", lambda w: w.view(2, 4, 3).transpose(0, 1).reshape(8, 3))
    ),
    "flipped rows": lambda: _single(_MATRIX, _MATRIX, _through("w", lambda w: w.flip(0))),
    "copied as bytes": lambda: _single(
        _MATRIX, _MATRIX, lambda m, w: void(m.w.data.untyped_storage().copy_(w.untyped_storage()))
    ),
    "copied as wider integers": lambda: _single(
        _MATRIX, _MATRIX, lambda m, w: void(m.w.data.view(torch.int32).copy_(w.view(torch.int32)))
    ),
    "even and odd columns": lambda: _single((BF16, (5, 6)), (BF16, (5, 6)), _even_and_odd_columns),
    "written twice with the same elements": lambda: _single((BF16, (6, 3)), (BF16, (6, 3)), _overlapping_rows),
    "written twice with different elements": lambda: _single((BF16, (6, 3)), (BF16, (6, 3)), _conflicting_rows),
    "scale spread over rows": lambda: _single(("F32", (4,)), ("F32", ()), lambda m, w: void(m.w.data.fill_(w))),
    "scale taken into Python": lambda: _single(("F32", (4,)), ("F32", ()), _scalar_fill, routes={"w": "scratch"}),
    "widened": lambda: _single(("F32", (6, 4)), _MATRIX, _copy("w")),
    "widened by a temporary": lambda: _single(("F32", (6, 4)), _MATRIX, _through("w", lambda w: w.float())),
    "narrowed": lambda: _single(_MATRIX, ("F32", (6, 4)), _copy("w"), routes={"w": "scratch"}),
    "cast to half": lambda: _single(("F16", (6, 4)), _MATRIX, _copy("w"), routes={"w": "scratch"}),
    "A_log composed": _composed_a_log,
    "A_log computed": lambda: _single(
        ("F32", (12,)), (BF16, (12,)), _through("w", lambda w: -torch.exp(w.float())), routes={"w": "scratch"}
    ),
    "scaled in place before the copy": lambda: _single(_MATRIX, _MATRIX, _in_place_on_input, routes={"w": "scratch"}),
    "nan_to_num": lambda: _single(_MATRIX, _MATRIX, _through("w", torch.nan_to_num), routes={"w": "scratch"}),
    "clamped": lambda: _single(_MATRIX, _MATRIX, _through("w", lambda w: w.clamp(-300, 300)), routes={"w": "scratch"}),
    "rows normalised": lambda: _single(_MATRIX, _MATRIX, _through("w", _row_normalise), routes={"w": "scratch"}),
    "two names in one call": lambda: _two_names(lambda w: w),
    "two names in one call, computed": lambda: _two_names(lambda w: w * 2, refused="only together with other tensors"),
    "every dtype": _every_dtype,
    "buffers": _buffers,
    "no elements": _no_elements,
    "writes from a thread": _threaded,
    "writes raw memory": lambda: _single(_MATRIX, _MATRIX, _raw_memory, refused="behind the dispatch hook"),
    "data rebound": lambda: _single(_MATRIX, _MATRIX, _rebind_data, refused="moves or replaces"),
    "parameter rebound": lambda: _single(_MATRIX, _MATRIX, _rebind_parameter, refused="moves or replaces"),
    "index_put": lambda: _single((BF16, (4, 3)), (BF16, (4, 3)), _index_put, refused="index_put_"),
    "adds to what is there": lambda: _single(_MATRIX, _MATRIX, lambda m, w: void(m.w.data.add_(w)), refused="add_"),
    "one more than the weight, in place": _one_more,
    "adds to more than it copied": lambda: _single(_MATRIX, _MATRIX, _added_twice, refused="add_"),
    "copies a sum with what is there": lambda: _single(
        _MATRIX, _MATRIX, lambda m, w: void(m.w.data.copy_(m.w.data + w)), refused="held before"
    ),
    "zeroes another tensor's elements": _zero_other,
    "two tensors on the same bytes": _shared_bytes,
    "reported but never written": _never_written,
    "parameter that the checkpoint lacks": _lacking,
    "name that the loader does not know": _unknown_name,
    "packed away after loading": _packed,
}
"""All cases by name."""
