"""Checkpoints and deltas on disk as a source: read in parts, proven before they are believed, and sent to engines of a run."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import deltarefit
from deltarefit.bits import logical_words, spec_of, tensor_from_words
from deltarefit.canonical import Catalog
from deltarefit.cli.program import program
from deltarefit.errors import BaseMismatchError, PayloadInvalidError, RejectedError
from deltarefit.integrations.checkpoints import CheckpointSource
from deltarefit.integrations.checkpoints import source as source_module
from deltarefit.offline import PatchedCheckpoint, diff_checkpoints, is_delta
from deltarefit.source import LocalCollective, open_source
from deltarefit.testing.checkpoints import write_checkpoint
from deltarefit.testing.loaders import random_weights
from deltarefit.testing.oracle import raw_state

pytestmark = pytest.mark.torch

SHAPES = {
    "embed.weight": ("bfloat16", (40, 24)),
    "mlp.qweight": ("int32", (16, 12)),
    "mlp.scales": ("float8_e4m3fn", (7, 3)),
    "scale": ("float32", ()),
    "nothing": ("bfloat16", (0, 4)),
}


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    catalog = Catalog(spec_of(name, torch.zeros(shape, dtype=getattr(torch, dtype))) for name, (dtype, shape) in SHAPES.items())
    return random_weights(catalog, seed, finite=False)


def changed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """About every tenth element with other bits."""
    generator = np.random.default_rng(seed)
    result = {}
    for name, tensor in weights.items():
        words = logical_words(tensor).copy()
        others = logical_words(weights_of(seed)[name])
        mask = generator.random(words.size) < 0.1
        words[mask] = others[mask]
        result[name] = tensor_from_words(words, spec_of(name, tensor))
    return result


def write(directory: Path, weights: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(directory, weights, like=directory)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Path:
    """``v0`` to ``v2``, and deltas ``0-1`` and ``1-2``."""
    work = tmp_path_factory.mktemp("checkpoints")
    weights = weights_of(0)
    for number in range(3):
        weights = changed(weights, number) if number else weights
        write(work / f"v{number}", weights)
        if number:
            diff_checkpoints(work / f"v{number - 1}", work / f"v{number}", work / f"{number - 1}-{number}.delta")
    return work


@pytest.fixture
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(source_module, "_PART_NBYTES", 256)


def words_of(path: Path) -> dict[str, np.ndarray]:
    from deltarefit.testing.checkpoints import load_tensors

    return {name: logical_words(tensor) for name, tensor in load_tensors(path).items()}


def held(source: CheckpointSource) -> dict[str, np.ndarray]:
    """Every tensor, put together from its parts."""
    found = {spec.name: np.zeros(spec.num_elements, spec.word_dtype) for spec in source.catalog().values()}
    for task in source.tasks():
        for piece in task.pieces:
            first = piece.canonical.offset
            found[task.spec.name][first : first + piece.num_elements] = task.words()
    return found


def test_a_source_is_what_it_was_moved_to(versions: Path, small_parts) -> None:
    with CheckpointSource(versions / "v0") as source:
        assert len(source.tasks()) > len(source.catalog())
        for move, number in (
            (lambda: None, 0),
            (lambda: source.move_by(versions / "0-1.delta"), 1),
            (lambda: source.move_by(versions / "1-2.delta"), 2),
            (lambda: source.move_to(versions / "v1"), 1),
            (lambda: source.move_by(versions / "1-2.delta"), 2),
        ):
            move()
            source.barrier()
            expected = words_of(versions / f"v{number}")
            assert {name: words.tobytes() for name, words in held(source).items()} == {
                name: words.tobytes() for name, words in expected.items()
            }


def test_every_element_has_one_owner(versions: Path, small_parts) -> None:
    with CheckpointSource(versions / "v0") as source:
        opened = open_source(source, LocalCollective())
        assert sum(task.num_elements for task in opened.tasks) == sum(spec.num_elements for spec in opened.catalog.values())


def test_parts_of_a_patched_checkpoint_are_read_wherever_they_begin(versions: Path) -> None:
    patched = PatchedCheckpoint(versions / "v0", [versions / "0-1.delta", versions / "1-2.delta"])
    expected = words_of(versions / "v2")["embed.weight"]
    for first, count in ((0, 1), (0, expected.size), (13, 101), (expected.size - 1, 1)):
        out = np.empty(count, expected.dtype)
        patched.read_words("embed.weight", first, out)
        assert np.array_equal(out, expected[first : first + count])
    patched.close()


def test_large_tensors_are_patched_slice_by_slice(tmp_path: Path) -> None:
    """Above 4 MiB a delta has several payload items a tensor, above 16 MiB several payloads."""
    old = torch.from_numpy(np.random.default_rng(1).integers(0, 2**15, 10 * 2**20, dtype=np.int16))
    new = old.clone()
    new[::1000] += 1
    for name, tensor in (("old", old), ("new", new)):
        write(tmp_path / name, {"w": tensor})
    diff_checkpoints(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    patched = PatchedCheckpoint(tmp_path / "old", [tmp_path / "delta"])
    out = np.empty(5 * 2**20, np.uint16)
    patched.read_words("w", 2**20 + 7, out)
    assert np.array_equal(out, new.numpy().view(np.uint16)[2**20 + 7 :][: out.size])
    patched.close()


def test_memory_follows_the_parts_and_not_the_checkpoint(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(source_module, "_PART_NBYTES", 4 * 2**20)
    weights = {"w": torch.zeros(64 * 2**20, dtype=torch.uint8)}
    write(tmp_path / "old", weights)
    weights["w"][:: 2**20] = 1
    write(tmp_path / "new", weights)
    diff_checkpoints(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    with CheckpointSource(tmp_path / "old") as source:
        source.move_by(tmp_path / "delta")
        tracemalloc.start()
        try:
            changed_words = sum(int(task.words().sum()) for task in source.tasks())
            peak_nbytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert changed_words == 64
    assert peak_nbytes < 24 * 2**20


def test_a_delta_is_told_from_a_checkpoint(versions: Path, tmp_path: Path) -> None:
    assert is_delta(versions / "0-1.delta")
    (tmp_path / "empty").touch()
    for path in (versions / "v0", versions / "v0" / "model.safetensors", tmp_path / "empty"):
        assert not is_delta(path)


def test_what_does_not_fit_is_refused_and_the_source_stays_what_it_was(versions: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.delta"
    cut.write_bytes((versions / "0-1.delta").read_bytes()[:-20])
    altered = bytearray((versions / "0-1.delta").read_bytes())
    altered[120] ^= 1
    (tmp_path / "altered.delta").write_bytes(altered)
    write(tmp_path / "other", {**weights_of(0), "more": torch.zeros(2)})
    with CheckpointSource(versions / "v0") as source:
        with pytest.raises(BaseMismatchError, match="is not the base"):
            source.move_by(versions / "1-2.delta")
        for path in (cut, tmp_path / "altered.delta"):
            with pytest.raises(PayloadInvalidError):
                source.move_by(path)
        with pytest.raises(RejectedError, match=r"other tensors than the checkpoint before it: more; expected the same"):
            source.move_to(tmp_path / "other")
        with pytest.raises(RejectedError):
            source.move_to(tmp_path / "nowhere")
        source.barrier()
        assert held(source)["embed.weight"].tobytes() == words_of(versions / "v0")["embed.weight"].tobytes()


def test_a_checkpoint_that_changes_under_the_source_is_refused(versions: Path, tmp_path: Path) -> None:
    write(tmp_path / "v", weights_of(0))
    with CheckpointSource(tmp_path / "v") as source:
        source.barrier()
        write(tmp_path / "v", weights_of(1))
        with pytest.raises(RejectedError, match="was changed while it was being read"):
            source.barrier()


class Engine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in SHAPES}
        for name, (dtype, shape) in SHAPES.items():
            zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
            self.register_parameter(self.names[name], torch.nn.Parameter(zeros, requires_grad=False))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, self.names[name]).data.copy_(tensor)


def loaded(path: Path) -> Engine:
    from deltarefit.testing.checkpoints import load_tensors

    engine = Engine()
    engine.load_weights(load_tensors(path).items())
    return engine


def published(versions: Path, run: str, base: str, *following: str) -> dict:
    arguments = ["publish", "--run", run, "--from", str(versions / base), "--json", "--wait", "60"]
    result = CliRunner().invoke(program, [*arguments, *(str(versions / name) for name in following)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_delta_and_then_a_checkpoint_reach_an_engine(versions: Path, tmp_path: Path) -> None:
    run, engine = (tmp_path / "run").as_uri(), loaded(versions / "v0")
    with deltarefit.Receiver.attach(engine, run=run, name="rollout"):
        shown = published(versions, run, "v0", "0-1.delta", "v2")
    assert raw_state(engine) == raw_state(loaded(versions / "v2"))
    assert [refit["policy_version"] for refit in shown["refits"]] == [1, 2]
    assert all(0 < refit["changed_elements"] < refit["total_elements"] // 3 for refit in shown["refits"])
    assert all((refit["receivers"], refit["audited"]) == (["rollout"], True) for refit in shown["refits"])


def test_the_next_delta_goes_on_from_what_was_committed(versions: Path, tmp_path: Path) -> None:
    """Each step a program of its own, as when a trainer elsewhere drops a delta now and then."""
    run, engine = (tmp_path / "run").as_uri(), loaded(versions / "v0")
    with deltarefit.Receiver.attach(engine, run=run):
        published(versions, run, "v0", "0-1.delta")
        (second,) = published(versions, run, "v1", "1-2.delta")["refits"]
    assert raw_state(engine) == raw_state(loaded(versions / "v2"))
    assert (second["policy_version"], second["attempts"]) == (2, 1)
    assert 0 < second["changed_elements"] < second["total_elements"] // 3


def test_an_engine_that_holds_something_else_is_named_and_left_alone(versions: Path, tmp_path: Path) -> None:
    run, engine = (tmp_path / "run").as_uri(), loaded(versions / "v1")
    with deltarefit.Receiver.attach(engine, run=run, name="rollout"):
        result = CliRunner().invoke(
            program, ["publish", "--run", run, "--from", str(versions / "v0"), "--wait", "5", str(versions / "v2")]
        )
    assert result.exit_code == 1
    assert "receiver rollout holds other weights than the trainer: " in result.stderr
    assert raw_state(engine) == raw_state(loaded(versions / "v1"))


def test_the_command_says_what_it_did(versions: Path, tmp_path: Path) -> None:
    run, engine = (tmp_path / "run").as_uri(), loaded(versions / "v0")
    with deltarefit.Receiver.attach(engine, run=run, name="rollout"):
        result = CliRunner().invoke(
            program, ["publish", "--run", run, "--from", str(versions / "v0"), str(versions / "0-1.delta")]
        )
    assert result.exit_code == 0, result.output
    assert "policy version 1 is" in result.stdout
    assert "to rollout in" in result.stdout
    assert "check base" in result.stderr


def test_the_runs_key_comes_from_its_file_and_a_long_wait_is_taken(versions: Path, tmp_path: Path) -> None:
    run, engine, key_file = (tmp_path / "run").as_uri(), loaded(versions / "v0"), tmp_path / "key"
    key_file.write_bytes(b"the text of a key\n")
    arguments = ["publish", "--run", run, "--from", str(versions / "v0"), "--wait", "7200", "--key-file", str(key_file)]
    with deltarefit.Receiver.attach(engine, run=run, name="rollout", key=b"the text of a key"):
        result = CliRunner().invoke(program, [*arguments, str(versions / "0-1.delta")])
    assert result.exit_code == 0, result.output
    assert raw_state(engine) == raw_state(loaded(versions / "v1"))
