"""The shipped suite on a bare SGLang model, with SGLang's own loader, without an engine. ``test_receiver_suite.py`` runs it.

A program of its own, because SGLang keeps one configuration a process:
``ARCHITECTURE=qwen3_moe python -m pytest -o filterwarnings=ignore tests/sglang/receiver_sglang_cases.py``.
"""

from __future__ import annotations

import os

import pytest

from deltarefit.integrations.sglang import note_constants
from deltarefit.integrations.sglang.receiver import SglangReceiver
from deltarefit.testing.bare_sglang import BareSglang, write_sglang_checkpoint
from deltarefit.testing.checkpoints import load_tensors
from deltarefit.testing.receiver_suite import ReceiverTests

ARCHITECTURE = os.environ["ARCHITECTURE"]


class TestBareModel(ReceiverTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def written(cls, tmp_path_factory):
        work = tmp_path_factory.mktemp("model")
        directory = write_sglang_checkpoint(work / ARCHITECTURE, ARCHITECTURE)
        cls.bare, cls.sample = BareSglang(directory, work / "rendezvous"), load_tensors(directory)
        yield
        del cls.bare, cls.sample

    def build(self):
        model = self.bare.build()
        note_constants(model)
        return model

    def load(self, model, weights):
        with self.bare.loading():
            return model.load_weights(weights)

    def receiver(self, model, settings):
        return SglangReceiver(model, lambda pairs: self.load(model, pairs), settings=settings)

    def checkpoint(self):
        return self.sample
