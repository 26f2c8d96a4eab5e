"""Fakes of a vLLM engine for the driver's tests, and the tiny checkpoints that real engines load."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltarefit.integrations.exchange import RankEndpoint, RankOperations
from deltarefit.receiver import PrewarmReport, RankDigest


class FakeReceiver:
    """One rank's receiver that only remembers what it was asked; ``failing`` maps an operation to the error it raises."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failing: dict[str, Exception] = {}

    def _ask(self, operation: str) -> None:
        self.asked.append(operation)
        if operation in self.failing:
            raise self.failing[operation]

    def prewarm(self, catalog) -> PrewarmReport:
        self._ask("prewarm")
        return PrewarmReport(routes={}, fingerprint=catalog.digest, unreached={})

    def prepare(self, plan) -> None:
        self._ask(f"prepare {plan.digest}")

    def apply(self, payload) -> int:
        self._ask("apply")
        return sum(item.count for item in payload.items)

    def synchronize(self) -> None:
        self._ask("synchronize")

    def digests(self) -> dict[str, RankDigest]:
        self._ask("digests")
        return {"w": RankDigest("all", 4, 2**64 - 1, 7)}


class FakeLLM:
    """The weight-transfer face of vLLM's ``LLM``, with as many ranks as asked for, as strict about sessions as the real one."""

    def __init__(self, num_ranks: int = 2, refusal: Exception | None = None) -> None:
        self.receivers = [FakeReceiver() for _ in range(num_ranks)]
        self.calls: list[str] = []
        self.weight_version = "default"
        self.is_updating = False
        self.can_reset = True
        self.silent_ranks: set[int] = set()
        self.llm_engine = self
        self._refusal = refusal
        self.endpoints = [RankEndpoint(rank, num_ranks, self._maker(rank)) for rank in range(num_ranks)]

    def _maker(self, rank: int):
        def make(key: bytes | None) -> RankOperations:
            if self._refusal is not None:
                raise self._refusal
            return RankOperations(None, self.receivers[rank], check=lambda model: None, key=key)

        return make

    def init_weight_transfer_engine(self, request: dict) -> None:
        self.calls.append("init")
        for endpoint in self.endpoints:
            endpoint.meet(**request["init_info"])

    def start_weight_update(self) -> None:
        if self.is_updating:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.calls.append("start")
        self.is_updating = True

    def update_weights(self, request: dict) -> None:
        if not self.is_updating:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        info = request["update_info"]
        self.calls.append(info["operation"])
        try:
            for rank, endpoint in enumerate(self.endpoints):
                if rank not in self.silent_ranks:
                    endpoint.receive(**info)
        except BaseException:
            self.is_updating = False
            raise

    def finish_weight_update(self) -> None:
        if not self.is_updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.calls.append("finish")
        self.is_updating = False

    def update_weight_version(self, new_version: str) -> None:
        self.calls.append("version")
        self.weight_version = new_version

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append("reset")
        return self.can_reset

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset encoder")


@pytest.fixture
def fake_llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(scope="session")
def versions(tmp_path_factory) -> Path:
    """A directory with three policies ``v0``, ``v1``, ``v2`` of a tiny Qwen3-MoE; each changes 3 % of the one before.

    ``delta_net_v0`` and ``delta_net_v1`` beside them are a Qwen3-Next; ``draft_v0`` and ``draft_v1`` are a smaller model that
    guesses for them.
    """
    from deltarefit.testing.checkpoints import load_tensors, perturbed, write_checkpoint, write_tiny_checkpoint

    work = tmp_path_factory.mktemp("versions")
    tensors = load_tensors(write_tiny_checkpoint(work / "v0", "qwen3_moe"))
    for number in (1, 2):
        tensors = perturbed(tensors, 0.03, seed=number)
        write_checkpoint(work / f"v{number}", tensors, like=work / "v0")
    delta_net = load_tensors(write_tiny_checkpoint(work / "delta_net_v0", "qwen3_next"))
    write_checkpoint(work / "delta_net_v1", perturbed(delta_net, 0.03, seed=1), like=work / "delta_net_v0")
    draft = load_tensors(write_tiny_checkpoint(work / "draft_v0", "qwen3", seed=5))
    write_checkpoint(work / "draft_v1", perturbed(draft, 0.03, seed=6), like=work / "draft_v0")
    return work
