"""diff, apply, fold and verify on real files: equal bytes, file by file."""

import json
import os
import shutil

import numpy as np
import pytest
from checkpoints import bf16, files_of, nudged, read_back, tensor, write_file, write_sharded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltarefit import offline
from deltarefit.canonical import TensorSpec
from deltarefit.errors import BaseMismatchError, PayloadInvalidError, RejectedError
from deltarefit.offline import grid
from deltarefit.offline.container import Delta
from deltarefit.offline.diff import detached
from deltarefit.offline.files import Disk
from deltarefit.records import CodedItem, Encoding, LocationForm

DTYPES = {"BOOL": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F4": 0.5, "C128": 16}


@pytest.fixture
def pair(tmp_path):
    """Two sharded checkpoints that differ in every way that the tool knows."""
    rng = np.random.default_rng(3)
    old = {
        "model.a": bf16((40, 7), rng),
        "model.same": bf16((9, 5), rng),
        "model.gone": bf16((33,), rng),
        "model.longer": bf16((10, 10), rng),
        "model.shorter": bf16((15, 10), rng),
        "model.reshaped": bf16((6, 20), rng),
        "model.retyped": bf16((8,), rng),
        "scalar": tensor("F32", (), [np.float32(1.5)]),
        "empty": ("F32", (0, 3), b""),
        "packed": tensor("F4", (64,), rng.integers(0, 256, 32, dtype=np.uint8)),
        "step": tensor("I64", (1,), np.array([7])),
    }
    new = {name: nudged(value, rng, 0.1) if name.startswith("model.") else value for name, value in old.items()}
    del new["model.gone"]
    new["model.same"] = old["model.same"]
    new["model.longer"] = ("BF16", (15, 10), new["model.longer"][2] + rng.bytes(100))
    new["model.shorter"] = ("BF16", (3, 10), new["model.shorter"][2][:60])
    new["model.reshaped"] = ("BF16", (20, 6), new["model.reshaped"][2])
    new["model.retyped"] = ("F16", (8,), new["model.retyped"][2])
    new["model.added"] = bf16((77,), rng)
    new["packed"] = nudged(old["packed"], rng, 0.3, width=1)
    new["step"] = tensor("I64", (1,), np.array([8]))
    names = sorted(new)
    old_path = write_sharded(
        tmp_path / "old",
        [{name: old[name] for name in list(old)[:5]}, {name: old[name] for name in list(old)[5:]}],
        companions={"config.json": b"{}", "tokenizer.json": b"t" * 500, "dropped.txt": b"x"},
    )
    new_path = write_sharded(
        tmp_path / "new",
        [{name: new[name]} for name in names[::-1]],
        companions={"config.json": b'{"a": 1}', "tokenizer.json": b"t" * 500, "extra.py": b"pass", "none.txt": b""},
        metadata={"format": "pt", "step": "8"},
    )
    return old_path, new_path


@pytest.mark.parametrize("encoding", list(Encoding))
def test_result_is_new_file_by_file(pair, tmp_path, small_slices, encoding):
    old, new = pair
    report = offline.diff_checkpoints(old, new, tmp_path / "d", encoding=encoding)
    assert report.kinds == {"same": 3, "changed": 3, "reshaped": 3, "retyped": 1, "added": 1, "removed": 1}
    applied = offline.apply_deltas(old, [tmp_path / "d"], tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(new)
    assert (applied.base, applied.target) == (report.base, report.target)
    assert offline.verify_deltas(old, [tmp_path / "d"], new).ok
    assert offline.inspect_delta(tmp_path / "d").summary == report


def test_memory_and_threads_do_not_change_the_delta(pair, tmp_path, small_slices):
    old, new = pair
    for number, threads in enumerate((1, 3)):
        offline.diff_checkpoints(old, new, tmp_path / f"d{number}", settings=offline.Settings(num_threads=threads))
    assert (tmp_path / "d0").read_bytes() == (tmp_path / "d1").read_bytes()


def test_base_may_be_arranged_otherwise(pair, tmp_path):
    old, new = pair
    offline.diff_checkpoints(old, new, tmp_path / "d", tensors_only=True)
    tensors = {name: value for path in old.glob("*.safetensors") for name, value in read_back(path).items()}
    tensors["packed"] = (tensors["packed"][0], (64,), tensors["packed"][2])
    other = write_file(tmp_path / "one.safetensors", dict(sorted(tensors.items())))
    offline.apply_deltas(other, [tmp_path / "d"], tmp_path / "out")
    kept = {name: data for name, data in files_of(new).items() if name.startswith("model")}
    assert files_of(tmp_path / "out") == kept
    assert offline.verify_deltas(other, [tmp_path / "d"], new).ok


def test_single_file(tmp_path):
    rng = np.random.default_rng(0)
    old = {"a": bf16((50,), rng), "b": bf16((3,), rng)}
    write_file(tmp_path / "old.safetensors", old)
    write_file(tmp_path / "new.safetensors", {"b": old["b"], "a": nudged(old["a"], rng, 0.5)}, {"k": "v"})
    offline.diff_checkpoints(tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "d")
    offline.apply_deltas(tmp_path / "old.safetensors", [tmp_path / "d"], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "new.safetensors").read_bytes()
    assert offline.verify_deltas(tmp_path / "old.safetensors", [tmp_path / "d"], tmp_path / "new.safetensors").ok


def test_nothing_changed(pair, tmp_path):
    old, _ = pair
    report = offline.diff_checkpoints(old, old, tmp_path / "d")
    assert (report.num_sent, report.base) == (0, report.target)
    offline.apply_deltas(old, [tmp_path / "d"], tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(old)


def test_result_loads_in_safetensors_and_equals_what_was_saved(pair, tmp_path):
    old, new = pair
    offline.diff_checkpoints(old, new, tmp_path / "d")
    offline.apply_deltas(old, [tmp_path / "d"], tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert read_back(tmp_path / "out" / file)[name] == read_back(new / file)[name]


def chain_of(tmp_path, versions):
    paths = [write_sharded(tmp_path / f"v{n}", shards, companions=files) for n, (shards, files) in enumerate(versions)]
    deltas = []
    for n in range(len(paths) - 1):
        deltas.append(tmp_path / f"d{n}")
        offline.diff_checkpoints(paths[n], paths[n + 1], deltas[-1])
    return paths, deltas


def four_versions():
    rng = np.random.default_rng(5)
    a, b = bf16((60,), rng), bf16((30,), rng)
    versions = []
    for number in range(4):
        companions = {"config.json": b"{}" if number < 2 else b"{2}", "tokenizer.json": b"t"}
        versions.append(([{"a": a}, {"b": b}], companions))
        a, b = nudged(a, rng, 0.2), nudged(b, rng, 0.0 if number == 1 else 0.2)
    return versions


def test_chain_and_fold_give_the_last_version(tmp_path, small_slices):
    paths, deltas = chain_of(tmp_path, four_versions())
    offline.apply_deltas(paths[0], deltas, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(paths[-1])
    offline.fold_deltas(deltas, tmp_path / "folded")
    offline.apply_deltas(paths[0], [tmp_path / "folded"], tmp_path / "out2")
    assert files_of(tmp_path / "out2") == files_of(paths[-1])
    assert offline.verify_deltas(paths[0], [tmp_path / "folded"], paths[-1]).ok
    offline.fold_deltas(deltas[1:], tmp_path / "later")
    offline.fold_deltas([deltas[0], tmp_path / "later"], tmp_path / "again")
    offline.apply_deltas(paths[0], [tmp_path / "again"], tmp_path / "out3")
    assert files_of(tmp_path / "out3") == files_of(paths[-1])


def test_fold_of_changes_and_their_opposite_sends_nothing(tmp_path):
    rng = np.random.default_rng(5)
    a = bf16((600,), rng)
    changed = nudged(a, rng, 0.2)
    _, deltas = chain_of(tmp_path, [([{"a": a}], {}), ([{"a": changed}], {}), ([{"a": a}], {})])
    report = offline.fold_deltas(deltas, tmp_path / "folded")
    assert report.num_sent == 0
    assert report.base == report.target


class NoDisk(Disk):
    """Any step fails: nothing may be written before everything was checked."""

    def __getattribute__(self, name):
        raise AssertionError(f"{name} before everything was checked")


def assert_refused(tmp_path, error, text, base, deltas):
    before = {path: files_of(path) for path in tmp_path.iterdir() if path.is_dir()}
    with pytest.raises(error, match=text):
        offline.apply_deltas(base, deltas, tmp_path / "out", disk=NoDisk())
    with pytest.raises(error, match=text):
        offline.apply_in_place(base, deltas, disk=NoDisk())
    assert {path: files_of(path) for path in tmp_path.iterdir() if path.is_dir()} == before


def test_wrong_base_names_the_first_differing_tensor(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    words = np.frombuffer(read_back(paths[0] / "model-00002-of-00002.safetensors")["b"][2], "<u2").copy()
    words[29] ^= 1
    shutil.copytree(paths[0], tmp_path / "other")
    write_file(tmp_path / "other" / "model-00002-of-00002.safetensors", {"b": tensor("BF16", (30,), words)}, {"format": "pt"})
    assert_refused(tmp_path, BaseMismatchError, r"tensor b BF16\[30\]: expected digest", tmp_path / "other", deltas)


def test_wrong_shape_names_the_first_differing_tensor(tmp_path):
    _, deltas = chain_of(tmp_path, four_versions())
    rng = np.random.default_rng(0)
    other = write_sharded(tmp_path / "other", [{"a": bf16((61,), rng), "b": bf16((30,), rng)}])
    assert_refused(tmp_path, BaseMismatchError, r"tensor a: expected BF16\[60\], got BF16\[61\]", other, deltas)


def test_result_as_base_is_recognised(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    assert_refused(tmp_path, BaseMismatchError, "already is what the delta gives", paths[1], deltas[:1])


def test_altered_payload_is_found_before_anything_is_written(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    for at in (100, -100):
        data = bytearray(deltas[1].read_bytes())
        data[at] ^= 1
        (tmp_path / "altered").write_bytes(data)
        chain = [deltas[0], tmp_path / "altered"]
        assert_refused(tmp_path, PayloadInvalidError, "was altered", paths[0], chain)


def test_gap_in_the_chain_names_the_missing_link(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    missing = offline.inspect_delta(deltas[1]).summary.target
    text = f"d2 needs {missing}, but .*d0 before it gives .*tensor a.*the delta that gives it is missing"
    assert_refused(tmp_path, RejectedError, text, paths[0], [deltas[0], deltas[2]])


def test_chain_in_wrong_order_says_what_fits(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    assert_refused(tmp_path, RejectedError, "d1 gives it: put it right before", paths[0], [deltas[0], deltas[2], deltas[1]])


def test_missing_companion_is_refused(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    (paths[0] / "tokenizer.json").write_bytes(b"u")
    assert_refused(
        tmp_path, BaseMismatchError, "tokenizer.json of 1 bytes is needed from the base and is different", paths[0], deltas
    )
    (paths[0] / "tokenizer.json").unlink()
    assert_refused(tmp_path, BaseMismatchError, "is needed from the base and is not there", paths[0], deltas)


def test_output_is_not_overwritten(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(RejectedError, match="exists"):
        offline.apply_deltas(paths[0], deltas, tmp_path / "out")
    with pytest.raises(RejectedError, match="exists"):
        offline.diff_checkpoints(paths[0], paths[1], deltas[0])
    offline.diff_checkpoints(paths[0], paths[2], deltas[0], replace=True)
    (tmp_path / "empty").mkdir()
    offline.apply_deltas(paths[0], deltas[:1], tmp_path / "empty")
    assert files_of(tmp_path / "empty") == files_of(paths[2])
    with pytest.raises(RejectedError, match="there is no directory"):
        offline.fold_deltas(deltas[:1], tmp_path / "nowhere" / "d")


def test_an_output_that_is_an_input_is_refused_even_with_force(tmp_path):
    """Replacing it would destroy what the result was made from, and is needed to use it."""
    paths, deltas = chain_of(tmp_path, four_versions())
    single = write_file(tmp_path / "single.safetensors", {"a": tensor("F32", (2,), np.float32([1, 2]))})
    other = write_file(tmp_path / "other.safetensors", {"a": tensor("F32", (2,), np.float32([1, 3]))})
    offline.diff_checkpoints(single, other, tmp_path / "d.delta")
    (tmp_path / "link").symlink_to(other)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for output in (next(paths[0].glob("*.safetensors")), paths[1] / "config.json", paths[1] / "new.delta"):
        with pytest.raises(RejectedError, match=r"is read here|would belong to the checkpoint"):
            offline.diff_checkpoints(paths[0], paths[1], output, replace=True)
    for output in (single, other, tmp_path / "link"):
        with pytest.raises(RejectedError, match="is read here"):
            offline.diff_checkpoints(single, other, output, replace=True)
    for output in (single, tmp_path / "d.delta"):
        with pytest.raises(RejectedError, match="is read here"):
            offline.apply_deltas(single, [tmp_path / "d.delta"], output, replace=True)
    with pytest.raises(RejectedError, match="is read here"):
        offline.fold_deltas(deltas, deltas[1], replace=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_output_that_is_no_file_is_refused_even_with_force(tmp_path):
    """A rename would put a file in the place of a device, for every program of the machine."""
    paths, deltas = chain_of(tmp_path, four_versions())
    os.mkfifo(tmp_path / "pipe")
    for write in (
        lambda: offline.diff_checkpoints(paths[0], paths[1], tmp_path / "pipe", replace=True),
        lambda: offline.fold_deltas(deltas, tmp_path / "pipe", replace=True),
    ):
        with pytest.raises(RejectedError, match="is a device, a pipe or a socket"):
            write()
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_is_followed_to_the_directory_that_a_checkpoint_is_written_to(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "scratch")
    offline.apply_deltas(paths[0], deltas[:1], tmp_path / "out")
    assert files_of(tmp_path / "scratch") == files_of(paths[1])
    (tmp_path / "nowhere").symlink_to(tmp_path / "no" / "such")
    with pytest.raises(RejectedError, match="there is no directory"):
        offline.apply_deltas(paths[0], deltas[:1], tmp_path / "nowhere")
    (tmp_path / "delta").symlink_to(tmp_path / "no" / "such")
    with pytest.raises(RejectedError, match="exists; choose another output"):
        offline.fold_deltas(deltas, tmp_path / "delta")


def test_verify_says_what_differs(tmp_path):
    paths, deltas = chain_of(tmp_path, four_versions())
    for new, text in (
        (paths[2], "config.json: the delta gives other bytes"),
        (paths[0], "tensor a: element"),
    ):
        report = offline.verify_deltas(paths[0], deltas[:1], new)
        assert not report.ok
        assert text in report.problem
    header = write_sharded(tmp_path / "other", four_versions()[1][0], companions=four_versions()[1][1], metadata={"x": "y"})
    assert "another header" in offline.verify_deltas(paths[0], deltas[:1], header).problem


def test_a_delta_of_unequal_words_is_caught_by_the_target_digest(tmp_path, monkeypatch):
    """What the kernels rebuild is proved, not believed."""
    paths, deltas = chain_of(tmp_path, four_versions())
    monkeypatch.setattr("deltarefit.offline.chain.apply_item", lambda *_: 0)
    with pytest.raises(PayloadInvalidError, match="it gives tensor a"):
        offline.apply_deltas(paths[0], deltas, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_companion_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("deltarefit.offline.checkpoint.MAX_COMPANION_NBYTES", 150)
    a = {"a": bf16((6,), np.random.default_rng(0))}
    write_sharded(tmp_path / "x", [a], companions={"big.txt": b"x" * 151})
    with pytest.raises(RejectedError, match="--tensors-only"):
        offline.diff_checkpoints(tmp_path / "x", tmp_path / "x", tmp_path / "d")
    offline.diff_checkpoints(tmp_path / "x", tmp_path / "x", tmp_path / "d", tensors_only=True)


@st.composite
def histories(draw):
    """Two to four versions of a few tensors: added, removed, grown, cut, retyped or changed at some words."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    versions = []
    for number in range(draw(st.integers(2, 4))):
        state = {}
        for name in draw(st.lists(st.sampled_from("abcd"), unique=True, min_size=1)):
            dtype = draw(st.sampled_from(list(DTYPES))) if draw(st.integers(0, 3)) == 0 or name in "cd" else "BF16"
            count = 2 * draw(st.integers(0, 60))
            before = versions[-1].get(name) if number else None
            data = bytearray(rng.bytes(int(count * DTYPES[dtype])))
            if before is not None:
                kept = min(len(before[2]), len(data))
                data[:kept] = before[2][:kept]
                for at in draw(st.lists(st.integers(0, max(0, kept - 1)), max_size=5)) if kept else ():
                    data[at] = rng.integers(256)
            state[name] = (dtype, (count,), bytes(data))
        versions.append(state)
    return versions


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories(), st.lists(st.sampled_from(list(Encoding)), min_size=3, max_size=3))
def test_any_history_folds_to_the_same_bits(tmp_path_factory, versions, encodings):
    root = tmp_path_factory.mktemp("history")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "SLICE_NBYTES", 64)
        patch.setattr(grid, "UNIT_NBYTES", 192)
        paths = [write_file(root / f"v{n}", version) for n, version in enumerate(versions)]
        deltas = [root / f"d{n}" for n in range(len(paths) - 1)]
        for n, delta in enumerate(deltas):
            offline.diff_checkpoints(paths[n], paths[n + 1], delta, encoding=encodings[n])
        offline.apply_deltas(paths[0], deltas, root / "chained")
        assert (root / "chained").read_bytes() == paths[-1].read_bytes()
        try:
            offline.fold_deltas(deltas, root / "folded")
        except RejectedError:
            assert {Encoding.DIFFERENCE, Encoding.XOR} <= set(encodings)
        else:
            offline.apply_deltas(paths[0], [root / "folded"], root / "out")
            assert (root / "out").read_bytes() == paths[-1].read_bytes()
    shutil.rmtree(root)


def test_units_that_do_not_line_up_are_still_found(tmp_path, small_slices):
    """Names that sort before others shift the ordinals of all slices after them."""
    rng = np.random.default_rng(0)
    x, z = bf16((500,), rng), bf16((40,), rng)
    versions = [
        ([{"x": x}], {}),
        ([{"m": z, "x": nudged(x, rng, 0.1)}], {}),
        ([{"a": bf16((111,), rng), "m": z, "x": nudged(x, rng, 0.2)}], {}),
    ]
    paths, deltas = chain_of(tmp_path, versions)
    offline.fold_deltas(deltas, tmp_path / "folded")
    for number, chain in enumerate((deltas, [tmp_path / "folded"])):
        offline.apply_deltas(paths[0], chain, tmp_path / f"out{number}")
        assert files_of(tmp_path / f"out{number}") == files_of(paths[-1])
    with Delta(deltas[1]) as delta:
        assert len(delta.manifest.payloads) > 3


def test_chain_may_cross_a_delta_of_tensors_only(tmp_path):
    """A delta that knows no companions neither gives nor loses them."""
    paths, deltas = chain_of(tmp_path, four_versions())
    offline.diff_checkpoints(paths[0], paths[1], deltas[0], tensors_only=True, replace=True)
    offline.apply_deltas(paths[0], deltas[:2], tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(paths[2])
    offline.fold_deltas(deltas[:2], tmp_path / "folded")
    offline.apply_deltas(paths[0], [tmp_path / "folded"], tmp_path / "out2")
    assert files_of(tmp_path / "out2") == files_of(paths[2])


def test_companion_that_the_chain_lost_is_refused(tmp_path):
    """Each delta is right by itself; together they need a file that the first one does not give."""
    versions = four_versions()
    _, deltas = chain_of(tmp_path, versions[:3])
    del versions[1][1]["tokenizer.json"]
    shards, companions = versions[1]
    other = write_sharded(tmp_path / "other", shards, companions=companions)
    offline.diff_checkpoints(tmp_path / "v0", other, tmp_path / "lost")
    with pytest.raises(RejectedError, match=r"has tokenizer\.json, which the delta before does not give"):
        offline.apply_deltas(tmp_path / "v0", [tmp_path / "lost", deltas[1]], tmp_path / "out")


def test_empty_chain_is_refused(tmp_path):
    with pytest.raises(RejectedError, match="no delta given"):
        offline.apply_deltas(tmp_path, [], tmp_path / "out")


@pytest.mark.parametrize("values", [{"memory_nbytes": 2**20}, {"num_threads": -1}, {"num_threads": 2000}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(RejectedError, match="expected"):
        offline.Settings(**values)


def test_planes_that_share_scratch_memory_are_copied():
    buffer = np.arange(5, dtype=np.uint8)
    spec = TensorSpec("0", "U8", (5,))
    shared = CodedItem(spec, Encoding.OVERWRITE, LocationForm.RUN, 0, 5, (), (buffer[:],))
    assert not np.shares_memory(detached(shared, buffer).value_planes[0], buffer)
    own = CodedItem(spec, Encoding.OVERWRITE, LocationForm.RUN, 0, 5, (), (buffer.copy(),))
    assert detached(own, buffer) is own


def test_dense_single_byte_slices_do_not_alias(tmp_path, small_slices):
    rng = np.random.default_rng(0)
    old = write_file(tmp_path / "old", {"a": tensor("I8", (500,), rng.integers(0, 256, 500, dtype=np.uint8))})
    new = write_file(tmp_path / "new", {"a": tensor("I8", (500,), rng.integers(0, 256, 500, dtype=np.uint8))})
    for encoding in Encoding:
        offline.diff_checkpoints(old, new, tmp_path / "d", encoding=encoding, replace=True)
        assert offline.verify_deltas(old, [tmp_path / "d"], new).ok
