"""Loading: what happens without the library, with a stale one, and when two threads call at once."""

import ctypes
import logging
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from kernel_cases import COMPILED, contiguous, random_words

from deltarefit import kernels
from deltarefit.errors import RejectedError
from deltarefit.kernels import Isa, library
from deltarefit.records import Encoding

CROSS_COMPILER = "aarch64-linux-gnu-g++"


@pytest.fixture
def forgotten():
    """Loads anew inside the test and again after it."""
    library._library.cache_clear()
    library.best_isa.cache_clear()
    yield
    library._library.cache_clear()
    library.best_isa.cache_clear()


def round_trip():
    shard = contiguous(2, 5000)
    old = random_words(np.random.default_rng(0), 5000, 2)
    new = old.copy()
    new[::9] += np.uint16(1)
    result = kernels.scan(shard.spec, new, kernels.gather(old, shard.pieces), shard.pieces, Encoding.DIFFERENCE)
    before = kernels.digest(old, shard.pieces)
    kernels.apply_item(old, shard.pieces, result.item)
    assert np.array_equal(old, new)
    assert before + result.digest_change == kernels.digest(new, shard.pieces)


@pytest.mark.usefixtures("forgotten")
def test_without_the_library_everything_works_and_it_is_said_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(library, "_PATH", tmp_path / "_kernels.so")
    with caplog.at_level(logging.WARNING):
        round_trip()
        round_trip()
        assert kernels.available_isas() == (Isa.NUMPY,)
    said = [record for record in caplog.records if "compiled kernels are not usable" in record.message]
    assert len(said) == 1
    assert "hatch_build.py" in said[0].message
    with pytest.raises(RejectedError, match="AVX512: expected one of NUMPY"):
        kernels.gather(np.zeros(1, np.uint16), (), isa=Isa.AVX512)


@pytest.mark.skipif(not COMPILED, reason="the kernels were not compiled")
@pytest.mark.usefixtures("forgotten")
def test_a_library_of_other_sources_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(library, "_ABI", 10_000)
    with caplog.at_level(logging.WARNING):
        assert library.best_isa() is Isa.NUMPY
    assert "built from other sources" in caplog.text


def test_a_file_that_is_no_library(tmp_path, caplog):
    (tmp_path / "_kernels.so").write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING):
        assert library._load(tmp_path / "_kernels.so") is None
    assert "not usable" in caplog.text


@pytest.mark.skipif(not COMPILED, reason="the kernels were not compiled")
def test_the_interpreter_lock_is_free_while_a_kernel_runs():
    """CDLL gives the lock up around each call; PyDLL would not."""
    assert isinstance(library.library(), ctypes.CDLL)
    assert not isinstance(library.library(), ctypes.PyDLL)


@pytest.mark.parametrize("isa", [Isa.NUMPY, *COMPILED])
def test_two_threads_at_once_give_the_same(isa):
    shard = contiguous(2, 200_000)
    rng = np.random.default_rng(4)
    old = random_words(rng, 200_000, 2)
    new = old.copy()
    new[rng.random(200_000) < 0.03] ^= np.uint16(5)
    expected = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.DIFFERENCE, isa=Isa.NUMPY)
    start = threading.Barrier(2)
    failures: list[BaseException] = []

    def work():
        try:
            start.wait(10)
            for _ in range(4):
                got = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.DIFFERENCE, isa=isa)
                assert got.digest_change == expected.digest_change
                mine = (*got.item.location_planes, *got.item.value_planes)
                theirs = (*expected.item.location_planes, *expected.item.value_planes)
                assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
                storage = old.copy()
                kernels.apply_item(storage, shard.pieces, got.item, isa=isa)
                assert np.array_equal(storage, new)
                assert kernels.digest(storage, shard.pieces, isa=isa) == kernels.digest(new, shard.pieces, isa=Isa.NUMPY)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"{CROSS_COMPILER} is not installed")
def test_the_kernels_compile_for_a_processor_without_these_instruction_sets(tmp_path):
    source = Path(library.__file__).with_name("kernels.cpp")
    options = ("-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")
    built = tmp_path / "kernels.so"
    subprocess.run([CROSS_COMPILER, *options, str(source), "-o", str(built)], check=True, timeout=300)
    assert b"deltarefit_scan" in built.read_bytes()
