"""The suite that every engine's loader passes. Subclass, override the hooks, and pytest runs it.

::

    class TestMyEngine(ReceiverTests):
        def build(self):
            return MyModel(config)

        def load(self, model, weights):
            return model.load_weights(weights)

        def checkpoint(self):
            return safetensors.torch.load_file("sample.safetensors")

The contract that it checks is written down in ``docs/loader-contract.md``. Each test takes a few loads of the sample: keep it
small, a layer of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words, spec_of, tensor_from_words
from deltarefit.canonical import Catalog, TensorDigest, TensorSpec
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.payload import Payload
from deltarefit.pieces import Piece, whole
from deltarefit.placement.digits import random_words
from deltarefit.plan import RefitPlan
from deltarefit.receiver import ApplyPath, PrewarmReport, RankReceiver, ReceiverSettings
from deltarefit.records import CodedItem, Encoding
from deltarefit.testing.oracle import delta_payload, differing, plan_for, raw_state

__all__ = ["ReceiverTests", "Subject"]

Weights = Mapping[str, torch.Tensor]

_CHANGED_SHARE = 0.1
_PATTERN_ROUNDS = 4
"""Refits that walk through a dtype's bit patterns; a sample of 64 Ki elements sees all 16-bit ones in the first."""


@dataclass(slots=True, eq=False)
class Subject:
    """One loaded model and its receiver, ready for an attempt."""

    model: torch.nn.Module
    receiver: RankReceiver
    report: PrewarmReport
    plan: RefitPlan
    num_attempts: int = 0

    def payload(self, old: Weights, new: Weights, mode: EncodingMode = EncodingMode.MIXED) -> Payload | None:
        """What an owner would send for these changes in the next attempt, as one payload."""
        self.num_attempts += 1
        attempt = f"v000001-a{self.num_attempts}-suite"
        return delta_payload(self.plan, old, new, mode=mode, attempt=attempt)

    def refit(self, old: Weights, new: Weights, mode: EncodingMode = EncodingMode.MIXED) -> int:
        """One attempt from first to last; returns the storage elements written."""
        self.receiver.prepare(self.plan)
        payload = self.payload(old, new, mode)
        written = self.receiver.apply(payload) if payload is not None else 0
        self.receiver.synchronize()
        return written

    def apply_in_buckets(self, payload: Payload, num_items: int) -> None:
        """Apply one attempt's items in payloads of so many items."""
        for start in range(0, len(payload.items), num_items):
            self.receiver.apply(replace(payload, items=payload.items[start : start + num_items]))
        self.receiver.synchronize()


class ReceiverTests:
    """What a receiver promises of any module whose loader keeps the contract. All comparisons are of raw bytes."""

    may_lack: tuple[str, ...] = ()
    """Patterns of parameters that the checkpoint lacks, and that is right so."""

    def build(self) -> torch.nn.Module:
        """Override: a fresh module whose weights nobody has loaded, the same each time."""
        raise NotImplementedError

    def load(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Override if the loader is not ``model.load_weights``."""
        return model.load_weights(weights)  # type: ignore[operator]

    def checkpoint(self) -> Weights:
        """Override: a sample checkpoint, canonical names and tensors."""
        raise NotImplementedError

    def receiver(self, model: torch.nn.Module, settings: ReceiverSettings) -> RankReceiver:
        """Override if the engine has a receiver of its own."""
        return RankReceiver(model, lambda pairs: self.load(model, pairs), settings=settings)

    # --- what the tests are made of ---------------------------------------------------------------------------------

    def loaded(self, weights: Weights) -> torch.nn.Module:
        """The oracle: a fresh module after a dense load."""
        model = self.build()
        with torch.no_grad():
            self.load(model, [(name, tensor.clone()) for name, tensor in sorted(weights.items())])
        return model

    def subject(
        self, path: ApplyPath = ApplyPath.COMPILED, prefer: Encoding = Encoding.DIFFERENCE, weights: Weights | None = None
    ) -> Subject:
        """A receiver of a module that holds the sample checkpoint."""
        model = self.loaded(self.checkpoint() if weights is None else weights)
        settings = ReceiverSettings(path=path, may_lack=self.may_lack, verify_writes=True)
        receiver = self.receiver(model, settings)
        report = receiver.prewarm(self.catalog())
        return Subject(model, receiver, report, plan_for([report], self.catalog(), prefer=prefer))

    def catalog(self) -> Catalog:
        """Of the sample checkpoint."""
        return Catalog(spec_of(name, tensor) for name, tensor in self.checkpoint().items())

    def changed(self, weights: Weights, seed: int, share: float = _CHANGED_SHARE) -> dict[str, torch.Tensor]:
        """Weights of which a share of elements, and at least one each, holds random bits: NaN payloads, -0.0 and the like too.

        Tensors that the engine keeps in one place under several names stay equal where they were equal.
        """
        generator = np.random.default_rng(seed)
        new: dict[str, torch.Tensor] = {}
        by_bits: dict[bytes, torch.Tensor] = {}
        for name, tensor in sorted(weights.items()):
            spec = spec_of(name, tensor)
            words = logical_words(tensor).copy()
            before = f"{spec.dtype}{spec.shape}".encode() + words.tobytes()
            places = np.flatnonzero(generator.random(words.size) < share)
            if not places.size and words.size:
                places = generator.integers(0, words.size, 1)
            words[places] = random_words(spec.dtype, places.size, generator)
            if words.size and before.endswith(words.tobytes()):
                words[places[0]] ^= 1
            new[name] = by_bits.setdefault(before, tensor_from_words(words, spec)).clone()
        return new

    def require_reload(self, model: torch.nn.Module, weights: Weights) -> None:
        """Fail unless parameters and buffers have the bits of a dense reload."""
        wrong = differing(raw_state(model), raw_state(self.loaded(weights)))
        assert not wrong, f"{len(wrong)} tensors differ from a dense reload: {wrong[:5]}"

    # --- prewarm ----------------------------------------------------------------------------------------------------

    def test_prewarm_writes_nothing(self) -> None:
        model = self.loaded(self.checkpoint())
        before, places = raw_state(model), _places(model)
        receiver = self.receiver(model, ReceiverSettings(may_lack=self.may_lack))
        report = receiver.prewarm(self.catalog())
        assert differing(raw_state(model), before) == []
        assert _places(model) == places
        assert set(report.routes) == set(self.checkpoint()), "every canonical name has a route"

    def test_a_second_prewarm_is_remembered_until_the_engine_changes(self) -> None:
        layout = ["as loaded"]
        model = self.loaded(self.checkpoint())
        settings = ReceiverSettings(may_lack=self.may_lack, layout_tag=lambda: layout[0])
        receiver = self.receiver(model, settings)
        report = receiver.prewarm(self.catalog())
        plan = plan_for([report], self.catalog())
        assert receiver.prewarm(self.catalog()) is report, "nothing changed, so the loader need not run again"
        layout[0] = "another"
        with pytest.raises(RejectedError, match="run prewarm again"):
            receiver.prepare(plan)
        again = receiver.prewarm(self.catalog())
        assert again is not report
        assert again.routes == report.routes
        assert again.fingerprint != report.fingerprint
        receiver.prepare(plan)

    def test_reports_travel_as_messages(self) -> None:
        report = self.subject().report
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=PrewarmReport) == report

    # --- refits -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("encoding", list(Encoding), ids=lambda encoding: encoding.name)
    @pytest.mark.parametrize("path", list(ApplyPath), ids=lambda path: path.value)
    def test_refits_equal_dense_reloads(self, path: ApplyPath, encoding: Encoding) -> None:
        subject = self.subject(path, encoding)
        old = self.checkpoint()
        for seed in (1, 2):
            new = self.changed(old, seed)
            subject.refit(old, new)
            self.require_reload(subject.model, new)
            old = new

    @pytest.mark.parametrize("encoding", list(Encoding), ids=lambda encoding: encoding.name)
    def test_every_bit_pattern_arrives(self, encoding: Encoding) -> None:
        subject = self.subject(prefer=encoding)
        old = self.checkpoint()
        for number in range(_PATTERN_ROUNDS):
            new = _walk_through_patterns(old, number)
            subject.refit(old, new)
            self.require_reload(subject.model, new)
            old = new

    def test_the_compiled_path_and_the_scratch_path_agree(self) -> None:
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 3)
        states = []
        for path in ApplyPath:
            subject = self.subject(path)
            subject.refit(old, new)
            states.append(raw_state(subject.model))
        assert differing(*states) == []

    @pytest.mark.parametrize("num_items", [1, 2, 7, 10**9], ids=["one", "two", "seven", "all"])
    def test_bits_do_not_depend_on_how_tensors_are_grouped(self, num_items: int) -> None:
        subject = self.subject()
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 4)
        subject.receiver.prepare(subject.plan)
        subject.apply_in_buckets(_require(subject.payload(old, new)), num_items)
        self.require_reload(subject.model, new)

    def test_bits_do_not_depend_on_the_order_of_tensors(self) -> None:
        subject = self.subject()
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 5)
        subject.receiver.prepare(subject.plan)
        payload = _require(subject.payload(old, new))
        subject.receiver.apply(replace(payload, items=payload.items[::-1]))
        subject.receiver.synchronize()
        self.require_reload(subject.model, new)

    def test_a_refit_without_changes_changes_nothing(self) -> None:
        subject = self.subject()
        before = raw_state(subject.model)
        for _ in range(2):
            subject.refit(self.checkpoint(), self.checkpoint())
            assert differing(raw_state(subject.model), before) == []

    def test_loading_all_elements_again_changes_nothing(self) -> None:
        """Loaders that compute (``-exp`` and the like) must not compute on what they computed before."""
        subject = self.subject()
        before = raw_state(subject.model)
        subject.plan = replace(subject.plan, dense=frozenset(self.catalog()))
        for _ in range(2):
            subject.refit(self.checkpoint(), self.checkpoint(), EncodingMode.OVERWRITE)
            assert differing(raw_state(subject.model), before) == []

    # --- failed attempts --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shift", range(3))
    @pytest.mark.parametrize("path", list(ApplyPath), ids=lambda path: path.value)
    def test_an_overwrite_retry_mends_whatever_failed_attempts_left(self, path: ApplyPath, shift: int) -> None:
        """Of any three tensors the failed attempts applied one twice, one once and one never, each in its turn."""
        subject = self.subject(path)
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 6)
        for applied in ({0, 1}, {0}):
            subject.receiver.prepare(subject.plan)
            payload = _require(subject.payload(old, new))
            chosen = tuple(item for n, item in enumerate(payload.items) if (n + shift) % 3 in applied)
            subject.receiver.apply(replace(payload, items=chosen))
        subject.refit(old, new, EncodingMode.OVERWRITE)
        self.require_reload(subject.model, new)

    def test_unknown_names_are_refused_before_the_first_byte(self) -> None:
        subject = self.subject()
        before = raw_state(subject.model)
        subject.receiver.prepare(subject.plan)
        payload = _require(subject.payload(self.checkpoint(), self.changed(self.checkpoint(), 8)))
        for wrong in _misfits(payload.items[-1]):
            with pytest.raises(PayloadInvalidError):
                subject.receiver.apply(replace(payload, items=(*payload.items[:-1], wrong)))
            assert differing(raw_state(subject.model), before) == []

    def test_a_name_that_the_engine_does_not_know_is_refused_or_held_by_nobody(self) -> None:
        model = self.loaded(self.checkpoint())
        before = raw_state(model)
        stranger = "a.name.that.no.engine.knows"
        specs = [*self.catalog().values(), TensorSpec(stranger, "BF16", (3, 5))]
        receiver = self.receiver(model, ReceiverSettings(may_lack=self.may_lack))
        refusal = ""
        try:
            assert receiver.prewarm(Catalog(specs)).routes[stranger].kind == "skipped"
        except RejectedError as error:
            refusal = str(error)
        assert not refusal or stranger in refusal
        assert differing(raw_state(model), before) == []

    # --- what must stay ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("path", list(ApplyPath), ids=lambda path: path.value)
    def test_storage_stays_where_captured_graphs_point(self, path: ApplyPath) -> None:
        subject = self.subject(path)
        places = _places(subject.model)
        views = {name: tensor.detach() for name, tensor in subject.model.named_parameters()}
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 9)
        subject.refit(old, new)
        subject.refit(new, old, EncodingMode.OVERWRITE)
        subject.refit(old, new)
        assert _places(subject.model) == places
        now = raw_state(subject.model)
        stale = [name for name, view in views.items() if logical_words(view).tobytes() != now[name]]
        assert not stale, f"views taken before the refit show old bits of {stale[:3]}"

    def test_what_no_canonical_tensor_reaches_keeps_its_bits(self) -> None:
        subject = self.subject()
        residue = subject.receiver.residue()
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 10)
        for path in ApplyPath:
            one = self.subject(path)
            buffers = {name: b.clone() for name, b in one.model.named_buffers() if name in one.report.unreached}
            one.refit(old, new)
            after = dict(one.model.named_buffers())
            assert [n for n, b in buffers.items() if not _same_bits(b, after[n])] == []
            assert one.receiver.drift() == ()
        assert subject.receiver.residue() == residue

    def test_skipped_tensors_write_nothing(self) -> None:
        subject = self.subject()
        skipped = {name for name, route in subject.report.routes.items() if route.kind == "skipped"}
        before = raw_state(subject.model)
        new = self.changed(self.checkpoint(), 11)
        only_skipped = {name: new[name] if name in skipped else tensor for name, tensor in self.checkpoint().items()}
        written = subject.refit(self.checkpoint(), only_skipped)
        assert subject.plan.dense or not written, "tensors that are sent whole each time are written each time, no others"
        assert differing(raw_state(subject.model), before) == []

    # --- proof ------------------------------------------------------------------------------------------------------

    def test_digests_are_the_sources_and_one_flipped_bit_shows(self) -> None:
        subject = self.subject()
        old, new = self.checkpoint(), self.changed(self.checkpoint(), 12)
        subject.plan = replace(subject.plan, dense=frozenset(self.catalog()))  # so that computed tensors are proven too
        subject.refit(old, new)
        self.require_reload(subject.model, new)
        proven = subject.receiver.digests()
        for name, found in proven.items():
            if found.num_elements == new[name].numel():
                assert found.digest == _digest(new[name]), f"{name} does not have the digest of what was loaded"
        unnoticed = []
        for name, parameter in _storages(subject.model).items():
            if not parameter.is_contiguous() or not parameter.numel():
                continue
            flat = parameter.detach().view(-1).view(torch.uint8)
            for place in sorted({0, flat.numel() // 3, flat.numel() - 1}):
                flat[place] ^= 4
                if subject.receiver.digests() == proven and not subject.receiver.drift():
                    unnoticed.append(f"{name} byte {place}")
                flat[place] ^= 4
        assert unnoticed == []
        assert subject.receiver.digests() == proven


def _walk_through_patterns(weights: Weights, number: int) -> dict[str, torch.Tensor]:
    """Weights whose elements count through all bit patterns of their dtypes, going on from tensor to tensor."""
    reached: dict[str, int] = {}
    new: dict[str, torch.Tensor] = {}
    by_bits: dict[bytes, torch.Tensor] = {}
    for name, tensor in sorted(weights.items()):
        spec = spec_of(name, tensor)
        width = spec.element_nbytes
        start = reached.get(spec.dtype, number * 40_503)
        reached[spec.dtype] = start + spec.num_elements
        counts = np.arange(start, start + spec.num_elements, dtype=np.uint64)
        if width > 2:
            counts *= np.uint64(0x9E3779B97F4A7C15 >> (64 - 8 * width) | 1)  # spreads few elements over many patterns
        words = (counts & np.uint64(1 if spec.dtype == "BOOL" else 2 ** (8 * width) - 1)).astype(spec.word_dtype)
        before = f"{spec.dtype}{spec.shape}".encode() + logical_words(tensor).tobytes()
        new[name] = by_bits.setdefault(before, tensor_from_words(words, spec)).clone()
    return new


def _misfits(item: CodedItem) -> Sequence[CodedItem]:
    """The item under an unknown name, with another dtype, and with another shape."""
    spec = item.spec
    other = {"BF16": "F16"}.get(spec.dtype, "BF16")
    return [
        replace(item, spec=TensorSpec("a.name.that.no.plan.lists", spec.dtype, spec.shape)),
        replace(item, spec=TensorSpec(spec.name, other, spec.shape)),
        replace(item, spec=TensorSpec(spec.name, spec.dtype, (*spec.shape, 2))),
    ]


def _require(payload: Payload | None) -> Payload:
    assert payload is not None, "the sample checkpoint has no elements"
    return payload


def _storages(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A parameter or buffer of each storage, by its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))
    return dict(found.values())


def _places(model: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in named}


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return logical_words(first).tobytes() == logical_words(second).tobytes()


def _digest(tensor: torch.Tensor) -> TensorDigest:
    view = whole(tensor.shape)
    return kernels.digest(logical_words(tensor), [Piece(view, view)]) if tensor.numel() else TensorDigest()
