"""In-place apply: whatever step it dies at, the checkpoint ends as the old one or the new one."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoints import bf16, files_of, nudged, read_back, tensor, write_file, write_sharded

from deltarefit import offline
from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.offline.checkpoint import JOURNAL, Checkpoint
from deltarefit.offline.files import Disk, locked
from deltarefit.runtime.clock import SystemClock


class Died(BaseException):
    """Stands for the end of the process: nothing after it reaches the disk."""


class DyingDisk(Disk):
    """Dies at the n-th step; a write that is interrupted there has half of its bytes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.is_dead = False

    def _step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            self.is_dead = True
        if self.is_dead:
            raise Died

    def write(self, fd, data, byte_offset):
        if self.steps == 0 and not self.is_dead and len(data):
            super().write(fd, bytes(data)[: len(data) // 2], byte_offset)
        self._step()
        super().write(fd, data, byte_offset)

    def make_directory(self, path):
        self._step()
        super().make_directory(path)

    def create(self, path):
        self._step()
        return super().create(path)

    def truncate(self, fd, nbytes):
        self._step()
        super().truncate(fd, nbytes)

    def sync(self, fd):
        self._step()
        super().sync(fd)

    def sync_directory(self, path):
        self._step()
        super().sync_directory(path)

    def rename(self, source, target):
        self._step()
        super().rename(source, target)

    def remove(self, path):
        """Removing a directory takes many steps: first half of its files go."""
        if self.steps == 0 and not self.is_dead and path.is_dir():
            for inside in sorted(path.rglob("*"))[::2]:
                if inside.is_file():
                    inside.unlink()
        self._step()
        super().remove(path)


def make_pair(root: Path, kind: str) -> tuple[Path, Path, Path]:
    """Old, new and delta; the kinds differ in what an in-place apply has to do."""
    rng = np.random.default_rng(0)
    old = {"a": bf16((40,), rng), "b": bf16((90,), rng), "c": bf16((20,), rng)}
    new = {name: nudged(value, rng, 0.3) for name, value in old.items()}
    companions = {"config.json": b"{}", "keep.txt": b"k"}
    if kind == "file":
        write_file(root / "old", old)
        write_file(root / "new", new)
    elif kind == "grown file":
        write_file(root / "old", old)
        write_file(root / "new", {**new, "d": bf16((3,), rng)})
    else:
        write_sharded(root / "old", [{"a": old["a"], "b": old["b"]}, {"c": old["c"]}], companions=companions)
    if kind == "patched":
        write_sharded(root / "new", [{"a": new["a"], "b": new["b"]}, {"c": new["c"]}], companions=companions)
    if kind == "mixed":
        companions = {"config.json": b"{1}", "extra.txt": b"e"}
        shards = [{"a": new["a"], "b": new["b"]}, {"c": new["c"], "d": bf16((9,), rng)}]
        write_sharded(root / "new", shards, companions=companions)
    if kind == "resharded":
        write_sharded(root / "new", [{"c": new["c"]}, {"a": new["a"]}, {"b": new["b"]}], companions=companions)
    offline.diff_checkpoints(root / "old", root / "new", root / "delta")
    return root / "old", root / "new", root / "delta"


def content(path: Path):
    return files_of(path) if path.is_dir() else path.read_bytes()


KINDS = ["file", "grown file", "patched", "mixed", "resharded"]


@pytest.mark.parametrize("kind", KINDS)
def test_result_is_the_new_checkpoint(tmp_path, small_slices, kind):
    old, new, delta = make_pair(tmp_path, kind)
    report = offline.apply_in_place(old, [delta])
    assert content(old) == content(new)
    assert report.target == offline.inspect_delta(delta).summary.target
    assert offline.resume_in_place(old) is None
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "delta"}


@pytest.mark.parametrize("kind", KINDS)
def test_death_at_any_step_ends_in_old_or_new(tmp_path, small_slices, kind):
    """Every step of the work, and for each of them every death of the recovery that could follow is covered by repetition."""
    old, new, delta = make_pair(tmp_path, kind)
    before, after = content(old), content(new)
    outcomes = set()
    step = 0
    while True:
        work = tmp_path / "work"
        shutil.copytree(old, work) if old.is_dir() else shutil.copy(old, work)
        try:
            offline.apply_in_place(work, [delta], settings=offline.Settings(num_threads=1), disk=DyingDisk(step))
            break
        except Died:
            pass
        outcomes.add(recovered(work, before, after, step))
        shutil.rmtree(work) if work.is_dir() else work.unlink()
        step += 1
    assert outcomes == {"old", "new"}
    assert step > 10


def recovered(work: Path, before, after, step: int) -> str:
    """Recover, dying once more on the way; what the checkpoint is then. Until then no command may take it for a checkpoint."""
    unfinished = any(work.parent.rglob(f"*{JOURNAL}"))
    if unfinished:
        with pytest.raises(OperatorRequiredError, match="--resume"):
            Checkpoint(work)
    with contextlib.suppress(Died):
        offline.resume_in_place(work, disk=DyingDisk(step % 7))
    report = offline.resume_in_place(work)
    found = content(work)
    assert found in (before, after), f"step {step}"
    assert found == (after if unfinished else before) or (report is None and found == after), f"step {step}"
    assert not list(work.parent.rglob(".*")), f"step {step}"
    return "new" if found == after else "old"


def test_links_are_replaced_and_never_written_through(tmp_path, small_slices):
    """A Hugging Face cache keeps one blob for many snapshots."""
    old, new, delta = make_pair(tmp_path, "patched")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    linked, hard = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (old / linked).rename(blobs / linked)
    (old / linked).symlink_to(blobs / linked)
    os.link(old / hard, blobs / hard)
    before = files_of(blobs)
    offline.apply_in_place(old, [delta])
    assert content(old) == content(new)
    assert files_of(blobs) == before
    assert not (old / linked).is_symlink()


def test_unchanged_tensors_are_not_written(tmp_path):
    rng = np.random.default_rng(0)
    a, b = bf16((40,), rng), bf16((40,), rng)
    write_sharded(tmp_path / "old", [{"a": a}, {"b": b}])
    write_sharded(tmp_path / "new", [{"a": a}, {"b": nudged(b, rng, 0.5)}])
    offline.diff_checkpoints(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    shards = sorted((tmp_path / "old").glob("*.safetensors"))
    stamps = [path.stat() for path in shards]
    offline.apply_in_place(tmp_path / "old", [tmp_path / "delta"])
    after = [path.stat() for path in shards]
    assert [stat.st_ino for stat in after] == [stat.st_ino for stat in stamps]
    assert [new.st_mtime_ns != old.st_mtime_ns for old, new in zip(stamps, after, strict=True)] == [False, True]


def test_altered_journal_is_not_carried_out(tmp_path, small_slices):
    old, _, delta = make_pair(tmp_path, "patched")
    for step in itertools.count():
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        shutil.copytree(old, tmp_path / "work")
        with contextlib.suppress(Died):
            offline.apply_in_place(tmp_path / "work", [delta], disk=DyingDisk(step))
        if (tmp_path / "work" / JOURNAL).exists():
            break
    before = content(tmp_path / "work")
    redo = tmp_path / "work" / JOURNAL / "redo.delta"
    data = bytearray(redo.read_bytes())
    data[100] ^= 1
    redo.write_bytes(data)
    with pytest.raises(OperatorRequiredError, match="restore it from a copy"):
        offline.resume_in_place(tmp_path / "work")
    state = tmp_path / "work" / JOURNAL / "journal.json"
    document = msgspec.json.decode(state.read_bytes())
    for changed, text in (
        ({**document, "format_version": 1}, "this build reads 2; resume with that build"),
        ({**document, "removed": ["../new"]}, "plain visible name"),
        ({**document, "surprise": 1}, "surprise"),
    ):
        state.write_bytes(msgspec.json.encode(changed))
        with pytest.raises(OperatorRequiredError, match=text):
            offline.resume_in_place(tmp_path / "work")
    redo.unlink()
    state.write_text("{}")
    with pytest.raises(OperatorRequiredError, match="not the state of an in-place apply"):
        offline.resume_in_place(tmp_path / "work")
    kept = {name: data for name, data in content(tmp_path / "work").items() if JOURNAL not in name}
    assert kept == {name: data for name, data in before.items() if JOURNAL not in name}


def test_two_writers_are_refused(tmp_path):
    old, _, delta = make_pair(tmp_path, "patched")
    with locked(old), pytest.raises(RejectedError, match="another process is writing it"):
        offline.apply_in_place(old, [delta])


def test_wrong_kind_of_base_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    write_file(tmp_path / "old", {"a": bf16((4,), rng)})
    (tmp_path / "dir").mkdir()
    shutil.copy(tmp_path / "old", tmp_path / "dir" / "model.safetensors")
    offline.diff_checkpoints(tmp_path / "old", tmp_path / "old", tmp_path / "delta")
    with pytest.raises(RejectedError, match="gives a file, this is none"):
        offline.apply_in_place(tmp_path / "dir", [tmp_path / "delta"])


def test_index_is_no_base_for_in_place(tmp_path):
    old, _, delta = make_pair(tmp_path, "patched")
    with pytest.raises(RejectedError, match="not its index"):
        offline.apply_in_place(old / "model.safetensors.index.json", [delta])


CHILD = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from deltarefit import offline
    from deltarefit.offline import grid
    from deltarefit.offline.files import Disk

    class SlowDisk(Disk):
        '''Gives the parent time to kill between any two steps.'''
        def write(self, fd, data, byte_offset):
            super().write(fd, data, byte_offset)
            time.sleep(0.0005)
        def sync(self, fd):
            super().sync(fd)
            time.sleep(0.002)
        def rename(self, source, target):
            time.sleep(0.002)
            super().rename(source, target)
            time.sleep(0.002)

    grid.SLICE_NBYTES, grid.UNIT_NBYTES = 512, 1024
    print("ready", flush=True)
    sys.stdin.readline()
    offline.apply_in_place(Path(sys.argv[1]), [Path(sys.argv[2])], disk=SlowDisk())
    print("done", flush=True)
    """
)


@pytest.mark.process
def test_killed_at_random_moments_ends_in_old_or_new(tmp_path, monkeypatch):
    """Real processes, real SIGKILL: the kernel releases the lock and what was written stays."""
    monkeypatch.setattr("deltarefit.offline.grid.SLICE_NBYTES", 512)
    monkeypatch.setattr("deltarefit.offline.grid.UNIT_NBYTES", 1024)
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    words = rng.integers(0, 2**16, 20_000, dtype=np.uint16)
    old = write_sharded(tmp_path / "old", [{"a": tensor("BF16", (20_000,), words)}, {"b": tensor("BF16", (20_000,), words)}])
    changed = nudged(tensor("BF16", (20_000,), words), rng, 0.05)
    new = write_sharded(tmp_path / "new", [{"a": changed}, {"b": changed}], companions={"config.json": b"{}"})
    offline.diff_checkpoints(old, new, tmp_path / "delta")
    before, after = content(old), content(new)
    ends = []
    clock, whole_s = SystemClock(), 10.0
    for attempt in range(7):
        work = tmp_path / f"work{attempt}"
        shutil.copytree(old, work)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(work), str(tmp_path / "delta")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("go\n")
            child.stdin.flush()
            start_s = clock.monotonic_s()
            try:
                child.wait(timeout=whole_s if attempt == 0 else float(rng.uniform(0.0, 0.8 * whole_s)))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
            child.wait()
        if attempt == 0:
            whole_s = clock.monotonic_s() - start_s
        offline.resume_in_place(work)
        assert content(work) in (before, after)
        ends.append((child.returncode, content(work) == after))
    assert any(code == -signal.SIGKILL for code, _ in ends), ends


def test_what_it_writes_can_be_read_by_safetensors(tmp_path, small_slices):
    old, new, delta = make_pair(tmp_path, "grown file")
    offline.apply_in_place(old, [delta])
    assert read_back(old) == read_back(new)
