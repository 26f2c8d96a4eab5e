"""The conformance suite for an engine's loader: run it on a model of yours before you serve refits with it.

The contract that it checks, for any torch module and its ``load_weights``:

* every weight lives in a parameter or buffer, and a load writes it with ``aten.copy_`` (any spelling) on the calling thread;
* what a load leaves depends only on the tensor's bits, not on what was there before or on other tensors;
* storage is never moved, replaced or packed away;
* a load of all tensors and loads of single tensors put them in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words, spec_of, tensor_from_words
from deltarefit.canonical import Catalog, TensorDigest
from deltarefit.ids import EncodingMode
from deltarefit.pieces import Piece, StridedView
from deltarefit.placement.digits import random_words
from deltarefit.plan import RefitPlan
from deltarefit.receiver import ApplyPath, PrewarmReport, RankReceiver, ReceiverSettings, merge_digests
from deltarefit.records import Encoding
from deltarefit.testing.oracle import delta_payload, differing, plan_for, raw_state

__all__ = ["LoaderVerdict", "check_loader"]

Weights = Mapping[str, torch.Tensor]
Load = Callable[[torch.nn.Module, Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class LoaderVerdict:
    """What the suite found. Everything in ``failures`` is a broken promise; empty means that the loader conforms."""

    report: PrewarmReport
    failures: tuple[str, ...]

    def require(self) -> None:
        """Fail a test.

        Raises:
            AssertionError: the failures, one a line.
        """
        if self.failures:
            raise AssertionError("the loader does not conform:\n" + "\n".join(f"  {failure}" for failure in self.failures))


def check_loader(
    build: Callable[[], torch.nn.Module], load: Load, weights: Weights, *, change_share: float = 0.03, seed: int = 0
) -> LoaderVerdict:
    """Refit a model in every way and compare each with a dense reload, raw bytes, parameters and buffers.

    Args:
        build: makes a fresh model, not loaded. The same each time.
        load: the engine's loader, as ``load(model, pairs)``.
        weights: a checkpoint: canonical names and tensors.
        change_share: part of each tensor's elements that a refit changes.
        seed: of the changes.

    Raises:
        RejectedError: prewarm refuses the loader; the text names tensors and reasons.
    """
    return _Suite(build, load, weights, change_share, seed).run()


class _Suite:
    def __init__(
        self, build: Callable[[], torch.nn.Module], load: Load, weights: Weights, change_share: float, seed: int
    ) -> None:
        self._build = build
        self._load = load
        self._catalog = Catalog(spec_of(name, tensor) for name, tensor in weights.items())
        generator = np.random.default_rng(seed)
        self._versions = [dict(weights)]
        for _ in range(2):
            self._versions.append(self._changed(self._versions[-1], change_share, generator))
        self._fresh = [raw_state(self._loaded(version)) for version in self._versions]
        self._failures: list[str] = []

    def run(self) -> LoaderVerdict:
        report = self._prewarm()
        for path in ApplyPath:
            for prefer in Encoding:
                self._refits(path, prefer)
        self._nothing_changed()
        self._repair()
        self._proof()
        return LoaderVerdict(report, tuple(self._failures))

    def _changed(self, old: Weights, share: float, generator: np.random.Generator) -> dict[str, torch.Tensor]:
        new: dict[str, torch.Tensor] = {}
        for name, spec in self._catalog.items():
            words = logical_words(old[name]).copy()
            places = np.flatnonzero(generator.random(words.size) < share)
            if not places.size and words.size:
                places = generator.integers(0, words.size, 1)
            words[places] = random_words(spec.dtype, places.size, generator)
            new[name] = tensor_from_words(words, spec)
        return new

    def _loaded(self, weights: Weights) -> torch.nn.Module:
        model = self._build()
        with torch.no_grad():
            self._load(model, [(name, weights[name].clone()) for name in self._catalog])
        return model

    def _receiver(self, path: ApplyPath = ApplyPath.COMPILED) -> tuple[torch.nn.Module, RankReceiver, PrewarmReport]:
        model = self._loaded(self._versions[0])
        receiver = RankReceiver(
            model, lambda pairs: self._load(model, pairs), settings=ReceiverSettings(path=path, verify_writes=True)
        )
        return model, receiver, receiver.prewarm(self._catalog)

    def _expect(self, what: str, model: torch.nn.Module, version: int) -> None:
        wrong = differing(raw_state(model), self._fresh[version])
        if wrong:
            self._failures.append(f"{what}: {len(wrong)} tensors differ from a dense reload, first {', '.join(wrong[:3])}")

    def _prewarm(self) -> PrewarmReport:
        model, receiver, report = self._receiver()
        self._expect("prewarm", model, 0)
        if receiver.prewarm(self._catalog) is not report:
            self._failures.append("prewarm: a second one was not remembered, so the model's layout changes by itself")
        return report

    def _refits(self, path: ApplyPath, prefer: Encoding) -> None:
        model, receiver, report = self._receiver(path)
        places = {name: tensor.data_ptr() for name, tensor in model.named_parameters(remove_duplicate=False)}
        plan = plan_for([report], self._catalog, prefer=prefer)
        for version in (1, 2):
            self._attempt(receiver, plan, version - 1, version)
            self._expect(f"refit {version} by {prefer.name} on the {path.value} path", model, version)
        moved = [n for n, tensor in model.named_parameters(remove_duplicate=False) if places.get(n) != tensor.data_ptr()]
        if moved:
            self._failures.append(f"refits on the {path.value} path moved the storage of {', '.join(moved[:3])}")

    def _attempt(
        self,
        receiver: RankReceiver,
        plan: RefitPlan,
        old: int,
        new: int,
        mode: EncodingMode = EncodingMode.MIXED,
        ordinal: int = 1,
    ) -> None:
        receiver.prepare(plan)
        attempt = f"v{new:06d}-a{ordinal}-suite"
        payload = delta_payload(plan, self._versions[old], self._versions[new], mode=mode, attempt=attempt)
        if payload is not None:
            receiver.apply(payload)
        receiver.synchronize()

    def _nothing_changed(self) -> None:
        model, receiver, report = self._receiver()
        plan = plan_for([report], self._catalog)
        for _ in range(2):
            self._attempt(receiver, plan, 0, 0)
        self._expect("two refits without a change", model, 0)

    def _repair(self) -> None:
        """A failed attempt that applied every second item, then the overwrite retry."""
        model, receiver, report = self._receiver()
        plan = plan_for([report], self._catalog)
        receiver.prepare(plan)
        payload = delta_payload(plan, self._versions[0], self._versions[1], attempt="v000001-a1-suite")
        if payload is not None:
            receiver.apply(replace(payload, items=payload.items[::2]))
        self._attempt(receiver, plan, 0, 1, EncodingMode.OVERWRITE, ordinal=2)
        self._expect("overwrite retry after half an attempt", model, 1)

    def _proof(self) -> None:
        """After a dense attempt every tensor that this rank holds whole is proven."""
        model, receiver, report = self._receiver()
        plan = replace(plan_for([report], self._catalog), dense=frozenset(self._catalog))
        self._attempt(receiver, plan, 0, 1)
        self._expect("dense attempt", model, 1)
        merged = merge_digests([receiver.digests()], self._catalog)
        wrong = [name for name, digest in merged.items() if digest not in (None, _digest(self._versions[1][name]))]
        if wrong:
            self._failures.append(f"digests of {', '.join(wrong[:3])} are not those of the loaded tensors")


def _digest(tensor: torch.Tensor) -> TensorDigest:
    words = logical_words(tensor)
    view = StridedView(0, (words.size,), (1,))
    return kernels.digest(words, [Piece(view, view)])
