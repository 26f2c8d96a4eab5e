"""Nothing is read or written outside what was handed in: guard pages, and (slow) the compiler's sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import COMPILED

HERE = Path(__file__).parent
KERNELS = Path(__file__).parents[2] / "src" / "deltarefit" / "kernels"

GUARDED = r"""
import ctypes, mmap, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from kernel_cases import COMPILED, changed_words, random_words, shards
from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.kernels.coding import code_locations, decode_gaps
from deltarefit.kernels.library import address, library
from deltarefit.pieces import Piece, whole
from deltarefit.records import CodedItem, Encoding, LocationForm

libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
kept = []

def fenced(words, at_end):
    '''The words in memory whose neighbouring page cannot be touched.'''
    room = -(-max(1, words.nbytes) // PAGE) * PAGE
    pages = mmap.mmap(-1, room + 2 * PAGE)
    raw = np.frombuffer(pages, np.uint8)
    start = raw.__array_interface__['data'][0]
    for fence in (start, start + PAGE + room):
        assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), 0) == 0
    first = PAGE + (room - words.nbytes if at_end else 0)
    inside = raw[first : first + words.nbytes].view(words.dtype)
    inside[:] = words
    kept.append(pages)
    return inside

if len(sys.argv) > 2:  # show that the fence works
    fenced(np.zeros(5, np.uint16), True).base  # noqa: B018
    inside = fenced(np.zeros(5, np.uint16), True)
    ctypes.memset(inside.__array_interface__['data'][0], 0, inside.nbytes + 1)

rng = np.random.default_rng(0)
for width in (1, 2, 4, 8):
    for shard in shards(width):
        if shard.spec.num_elements > 20_000:
            continue
        old = random_words(rng, shard.storage_elements, width)
        new = changed_words(rng, old, 0.1)
        for isa in COMPILED:
            for at_end in (False, True):
                storage, target = fenced(new, at_end), fenced(old, at_end)
                baseline = fenced(kernels.gather(target, shard.pieces, isa=isa), at_end)
                for everything in (False, True):
                    result = kernels.scan(
                        shard.spec, storage, baseline, shard.pieces, Encoding.DIFFERENCE, everything=everything, isa=isa
                    )
                job = kernels.ScanJob(shard.spec, storage, baseline, kernels.PieceTable(shard.pieces), Encoding.DIFFERENCE)
                (alone,) = kernels.scan_many([job], isa=isa)
                if result.item is not None:
                    item = result.item
                    planes = [fenced(p, at_end) for p in (*item.location_planes, *item.value_planes)]
                    fenced_item = type(item)(
                        item.spec, item.encoding, item.location_form, item.start, item.count,
                        tuple(planes[: len(item.location_planes)]), tuple(planes[len(item.location_planes) :]),
                    )
                    kernels.apply_item(target, shard.pieces, fenced_item, isa=isa)
                assert kernels.digest(storage, shard.pieces, isa=isa) == kernels.digest(target, shard.pieces, isa=isa)
                kernels.commit_many([(baseline, storage, kernels.PieceTable(shard.pieces), '')], isa=isa)
gaps = rng.geometric(0.03, 5_000) - 1
gaps[0] = 0
(plane,) = code_locations(gaps, LocationForm.GAPS)
for isa in COMPILED:
    for at_end in (False, True):
        nbytes = library().deltarefit_shortened_nbytes(address(fenced(plane, at_end)), plane.size, isa)
        short = fenced(np.zeros(nbytes, np.uint8), at_end)
        short[: plane.size] = plane
        library().deltarefit_shorten_gaps(address(short), plane.size, nbytes, isa)
        assert np.array_equal(decode_gaps([short], LocationForm.SHORT_GAPS), gaps)
        count = gaps.size
        spec = TensorSpec('short', 'U8', (int(gaps.sum()) + count,))
        pieces = (Piece(whole(spec.shape), whole(spec.shape)),)
        item = CodedItem(
            spec, Encoding.OVERWRITE, LocationForm.SHORT_GAPS, 0, count, (short,), (fenced(np.ones(count, np.uint8), at_end),)
        )
        target = fenced(np.zeros(spec.num_elements, np.uint8), at_end)
        assert kernels.apply_item(target, pieces, item, isa=isa) == count
print('kept', len(kept))
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **environment})


@pytest.mark.process
@pytest.mark.skipif(not COMPILED, reason="the kernels were not compiled")
def test_no_access_beyond_either_end_of_any_buffer():
    done = run(GUARDED, str(HERE))
    assert done.returncode == 0, done.stderr
    assert "kept" in done.stdout


@pytest.mark.process
@pytest.mark.skipif(not COMPILED, reason="the kernels were not compiled")
def test_the_fence_stops_an_access_one_byte_beyond():
    assert run(GUARDED, str(HERE), "break it").returncode < 0


def sanitizer_library(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout.strip()
    return found if Path(found).is_absolute() else ""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None or not COMPILED, reason="needs g++")
def test_whole_room_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    preload = " ".join(sanitizer_library(name) for name in ("libasan.so", "libubsan.so"))
    if len(preload.split()) < 2:
        pytest.skip("g++ has no sanitizer libraries")
    copy = tmp_path / "src" / "deltarefit"
    shutil.copytree(KERNELS.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-w"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    source, target = copy / "kernels" / "kernels.cpp", copy / "kernels" / "_kernels.so"
    subprocess.run(["g++", *flags, *checks, str(source), "-o", str(target)], check=True, timeout=300)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not process", str(HERE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
        env={
            **os.environ,
            "LD_PRELOAD": preload,
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
            "PYTHONPATH": str(tmp_path / "src"),
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
