"""Which files of a directory are the checkpoint, and what is refused."""

import json
import os

import numpy as np
import pytest
from checkpoints import bf16, tensor, write_file, write_sharded

from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.offline.checkpoint import Checkpoint

RNG = np.random.default_rng(1)


def names_of(path, **kwargs):
    with Checkpoint(path, **kwargs) as checkpoint:
        return [file.name for file in checkpoint.files], sorted(checkpoint.companions)


def test_single_file_has_no_companions(tmp_path):
    path = write_file(tmp_path / "x.safetensors", {"a": bf16((3,), RNG)})
    (tmp_path / "config.json").write_text("{}")
    assert names_of(path) == (["x.safetensors"], [])


def test_sharded_directory(tmp_path):
    companions = {
        "config.json": b"{}",
        "tokenizer.model": b"x",
        "modeling_x.py": b"pass",
        "training_args.bin": b"x",
        "consolidated.safetensors": b"not even safetensors",
        "pytorch_model.bin.index.json": b"{}",
        ".gitattributes": b"x",
    }
    path = write_sharded(tmp_path / "m", [{"a": bf16((3,), RNG)}, {"b": bf16((3,), RNG)}], companions=companions)
    (path / "original").mkdir()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    assert names_of(path) == (files, ["config.json", "model.safetensors.index.json", "modeling_x.py", "tokenizer.model"])
    assert names_of(path, tensors_only=True) == (files, [index])
    assert names_of(path / index) == names_of(path)


def test_links_are_followed(tmp_path):
    blob = write_file(tmp_path / "0123abcd", {"a": bf16((3,), RNG)})
    directory = tmp_path / "snapshot"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(blob)
    assert names_of(directory) == (["model.safetensors"], [])


def test_standard_name_is_preferred(tmp_path):
    write_file(tmp_path / "model.safetensors", {"a": bf16((3,), RNG)})
    write_file(tmp_path / "adapter.safetensors", {"b": bf16((3,), RNG)})
    assert names_of(tmp_path)[0] == ["model.safetensors"]


def test_words_are_read_in_parts(tmp_path):
    words = np.arange(100, dtype=np.uint16)
    path = write_file(
        tmp_path / "x.safetensors", {"pad": tensor("U8", (3,), np.zeros(3, np.uint8)), "a": tensor("BF16", (100,), words)}
    )
    with Checkpoint(path) as checkpoint:
        out = np.empty(7, "<u2")
        checkpoint.read_words("a", 90, out)
    assert out.tolist() == list(range(90, 97))


def without_files(path):
    path.mkdir()


def two_singles(path):
    path.mkdir()
    write_file(path / "a.safetensors", {"a": bf16((3,), RNG)})
    write_file(path / "b.safetensors", {"b": bf16((3,), RNG)})


def index_beside_single(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}])
    write_file(path / "model.safetensors", {"a": bf16((3,), RNG)})


def two_indexes(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}])
    (path / "model.safetensors.index.json").rename(path / "x.safetensors.index.json")
    (path / "y.safetensors.index.json").write_bytes((path / "x.safetensors.index.json").read_bytes())


def missing_shard(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}, {"b": bf16((3,), RNG)}])
    (path / "model-00002-of-00002.safetensors").unlink()


def wrong_shard(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}, {"b": bf16((3,), RNG)}])
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["a"] = index["weight_map"]["b"]
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def twice(path):
    write_sharded(path, [{"a": bf16((3,), RNG), "c": bf16((1,), RNG)}, {"b": bf16((3,), RNG), "a": bf16((3,), RNG)}])


def escaping_index(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}])
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')


def broken_index(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}])
    (path / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def empty_index(path):
    write_sharded(path, [{"a": bf16((3,), RNG)}])
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def fifo(path):
    path.mkdir()
    os.mkfifo(path / "model.safetensors")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (without_files, "no safetensors file"),
        (two_singles, "more than one safetensors file"),
        (index_beside_single, "beside it"),
        (two_indexes, "more than one index"),
        (missing_shard, "which is not there"),
        (wrong_shard, "does not hold it"),
        (twice, "is also in"),
        (escaping_index, "plain visible name"),
        (broken_index, "not a safetensors index"),
        (empty_index, "weight_map is empty"),
        (fifo, "not a regular file"),
    ],
)
def test_refuses(tmp_path, make, text):
    make(tmp_path / "m")
    with pytest.raises(RejectedError, match=text):
        Checkpoint(tmp_path / "m")


@pytest.mark.parametrize("journal", ["m/.deltarefit-journal", "m/.model.safetensors.deltarefit-journal"])
def test_refuses_what_must_be_finished_first(tmp_path, journal):
    (tmp_path / "m").mkdir()
    write_file(tmp_path / "m" / "model.safetensors", {"a": bf16((3,), RNG)})
    (tmp_path / journal).mkdir()
    for path in (tmp_path / "m", tmp_path / "m" / "model.safetensors"):
        with pytest.raises(OperatorRequiredError, match="apply --in-place --resume"):
            Checkpoint(path)


def test_notices_a_change_while_reading(tmp_path):
    path = write_file(tmp_path / "x.safetensors", {"a": bf16((3,), RNG)})
    with Checkpoint(path) as checkpoint:
        checkpoint.check_unchanged()
        os.utime(path, ns=(1, 1))
        with pytest.raises(RejectedError, match="was changed"):
            checkpoint.check_unchanged()


def test_notices_a_cut_while_reading(tmp_path):
    path = write_file(tmp_path / "x.safetensors", {"a": bf16((3000,), RNG)})
    with Checkpoint(path) as checkpoint:
        os.truncate(path, 1000)
        with pytest.raises(RejectedError, match="was cut while being read"):
            checkpoint.read_words("a", 0, checkpoint.empty_words("a", 3000))
