"""The suite for receivers notices what it is there for: each fault, planted in a receiver or a loader, fails the test named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltarefit.errors import LoaderContractError, RefitError
from deltarefit.receiver import ApplyPath, RankReceiver, rank, ready
from deltarefit.records import Encoding
from deltarefit.testing.loaders import ToyModel, random_weights
from deltarefit.testing.receiver_suite import ReceiverTests

pytestmark = pytest.mark.torch


class Sound(ReceiverTests):
    """Not collected: its tests are called by name."""

    __test__ = False
    SPECS = {"a": ("BF16", (6, 4)), "b": ("BF16", (4, 4)), "gone": ("BF16", (3,))}  # noqa: RUF012

    def rules(self):
        return {
            "a": lambda m, w: m.fused.data[:6].copy_(w),
            "b": lambda m, w: m.fused.data[6:].copy_(w),
            "gone": lambda m, w: None,
        }

    def build(self):
        return ToyModel({"fused": ("BF16", (10, 4))}, self.rules(), buffers={"table": ("F32", (5,))})

    def checkpoint(self):
        from deltarefit.testing.loaders import ToyCase

        return random_weights(ToyCase(self.SPECS, self.build).catalog, 1)


def after(monkeypatch, name, then):
    """Have ``then(receiver, result)`` come after a method of every receiver."""
    original = getattr(RankReceiver, name)

    def method(self, *args):
        result = original(self, *args)
        changed = then(self, result)
        return result if changed is None else changed

    monkeypatch.setattr(RankReceiver, name, method)


def fused(receiver):
    return receiver._model.fused.data


def test_a_sound_loader_passes():
    suite = Sound()
    suite.test_prewarm_writes_nothing()
    suite.test_a_second_prewarm_is_remembered_until_the_engine_changes()
    suite.test_refits_equal_dense_reloads(ApplyPath.COMPILED, Encoding.XOR)
    suite.test_skipped_tensors_write_nothing()
    suite.test_digests_are_the_sources_and_one_flipped_bit_shows()


def test_a_prewarm_that_writes(monkeypatch):
    after(monkeypatch, "prewarm", lambda receiver, _: fused(receiver).view(torch.int16)[0, 0].add_(1) and None)
    with pytest.raises(AssertionError):
        Sound().test_prewarm_writes_nothing()


def test_a_prewarm_that_forgets(monkeypatch):
    after(monkeypatch, "prewarm", lambda receiver, report: setattr(receiver, "_prewarmed", None))
    with pytest.raises((AssertionError, RefitError)):
        Sound().test_a_second_prewarm_is_remembered_until_the_engine_changes()


@pytest.mark.parametrize(
    "call",
    [
        lambda suite: suite.test_refits_equal_dense_reloads(ApplyPath.COMPILED, Encoding.DIFFERENCE),
        lambda suite: suite.test_every_bit_pattern_arrives(Encoding.OVERWRITE),
        lambda suite: suite.test_the_compiled_path_and_the_scratch_path_agree(),
        lambda suite: suite.test_bits_do_not_depend_on_the_order_of_tensors(),
    ],
)
def test_an_apply_that_leaves_one_element_out(monkeypatch, call):
    original = rank.RankReceiver._apply_to_targets
    monkeypatch.setattr(
        RankReceiver,
        "_apply_to_targets",
        lambda self, item, known: 0 if item.spec.name == "b" else original(self, item, known),
    )
    with pytest.raises(AssertionError):
        call(Sound())


def test_an_apply_that_keeps_only_the_last_payload_of_an_attempt(monkeypatch):
    original = RankReceiver.apply

    def apply(self, payload):
        return original(self, payload) if payload.items[-1].spec.name != "a" or len(payload.items) > 1 else 0

    monkeypatch.setattr(RankReceiver, "apply", apply)
    suite = Sound()
    suite.test_bits_do_not_depend_on_how_tensors_are_grouped(10**9)
    with pytest.raises(AssertionError):
        suite.test_bits_do_not_depend_on_how_tensors_are_grouped(1)


def test_a_retry_that_trusts_what_is_there(monkeypatch):
    original = RankReceiver.apply

    def apply(self, payload):
        if all(item.encoding is Encoding.OVERWRITE for item in payload.items):
            payload = replace(payload, items=payload.items[:1])
        return original(self, payload)

    monkeypatch.setattr(RankReceiver, "apply", apply)
    failures = 0
    for shift in range(3):
        try:
            Sound().test_an_overwrite_retry_mends_whatever_failed_attempts_left(ApplyPath.COMPILED, shift)
        except AssertionError:
            failures += 1
    assert failures == 2


def test_a_payload_that_nobody_checks(monkeypatch):
    monkeypatch.setattr(ready, "_check", lambda *_: None)
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        Sound().test_unknown_names_are_refused_before_the_first_byte()


def test_storage_that_moves(monkeypatch):
    after(monkeypatch, "synchronize", lambda receiver, _: setattr(receiver._model.fused, "data", fused(receiver).clone()))
    with pytest.raises((AssertionError, RefitError)):
        Sound().test_storage_stays_where_captured_graphs_point(ApplyPath.COMPILED)


def test_a_refit_that_touches_a_buffer(monkeypatch):
    after(monkeypatch, "apply", lambda receiver, _: receiver._model.table.fill_(1) and None)
    with pytest.raises((AssertionError, RuntimeError)):
        Sound().test_what_no_canonical_tensor_reaches_keeps_its_bits()


def test_a_refit_that_writes_what_it_should_skip(monkeypatch):
    after(monkeypatch, "apply", lambda receiver, written: fused(receiver).view(torch.int16)[0, 0].add_(1) and written + 1)
    with pytest.raises(AssertionError):
        Sound().test_skipped_tensors_write_nothing()


def test_digests_that_never_change(monkeypatch):
    known = {}
    after(monkeypatch, "digests", lambda receiver, digests: known.setdefault(id(receiver), digests))
    with pytest.raises(AssertionError):
        Sound().test_digests_are_the_sources_and_one_flipped_bit_shows()


def test_a_loader_that_puts_a_tensor_alone_elsewhere_than_with_others():
    class Moody(Sound):
        def load(self, model, weights):
            given = list(weights)
            if len(given) == 1 and given[0][0] == "b":
                model.fused.data[:4].copy_(given[0][1])
                return None
            return model.load_weights(given)

    with pytest.raises((RefitError, AssertionError)):
        Moody().test_refits_equal_dense_reloads(ApplyPath.SCRATCH, Encoding.OVERWRITE)


def test_a_loader_that_computes_on_what_it_computed_before():
    class Compounding(Sound):
        def rules(self):
            return {**super().rules(), "a": lambda m, w: m.fused.data[:6].copy_(m.fused.data[:6] * 0.5 + w)}

    with pytest.raises((RefitError, LoaderContractError, AssertionError)):
        Compounding().test_loading_all_elements_again_changes_nothing()
