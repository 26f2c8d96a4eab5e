"""Everything that is checked before a chain is applied: nothing is written before all of it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltarefit.errors import BaseMismatchError, PayloadInvalidError
from deltarefit.offline.chain import Chain, check_base
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.container import Delta, digest_of
from deltarefit.offline.digests import states_of
from deltarefit.offline.manifest import FileRow, TensorState
from deltarefit.offline.pool import Meter, Workers
from deltarefit.offline.safetensors import Header, StoredTensor

__all__ = ["Prepared", "TargetFile", "check_bodies", "prepare", "target_files"]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One tensor file of the target."""

    row: FileRow
    header: Header


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chain and a base that fit, and what the target consists of."""

    chain: Chain
    base: Checkpoint
    files: tuple[TargetFile, ...]
    companions: Mapping[str, FileRow]
    """Every companion of the target, by name."""

    def companion(self, name: str) -> bytes:
        """A companion's bytes, from the delta that carries it or from the base, compared with its digest.

        Raises:
            BaseMismatchError: the base has to have it and has another one, or none.
            PayloadInvalidError: the delta was altered.
        """
        row = self.companions[name]
        carrier = self.chain.carrier(row)
        return _from_base(row, self.base) if carrier is None else carrier[0].content(carrier[1])

    def places(self) -> dict[str, tuple[int, StoredTensor]]:
        """Where each target tensor goes: the file's number and its place there."""
        return {tensor.name: (number, tensor) for number, file in enumerate(self.files) for tensor in file.header.tensors}

    @property
    def target_nbytes(self) -> int:
        return sum(file.header.data_nbytes for file in self.files)


def prepare(chain: Chain, base: Checkpoint, workers: Workers, meter: Meter) -> Prepared:
    """Check every byte of the deltas and every tensor of the base.

    Raises:
        PayloadInvalidError: a delta was altered or contradicts itself.
        BaseMismatchError: the base is another checkpoint; the text names the first differing tensor.
    """
    files = target_files(chain.last)
    _check_layout(chain, base)
    check_bodies(chain.deltas, workers, meter)
    meter.start("check base", base.nbytes)
    check_base(chain, states_of(base, workers, meter), str(base.path))
    prepared = Prepared(chain, base, files, {row.name: row for row in chain.last.manifest.files if not row.holds_tensors})
    for name in prepared.companions:
        prepared.companion(name)
    return prepared


def target_files(delta: Delta) -> tuple[TargetFile, ...]:
    """The target's tensor files, their headers compared with the manifest.

    Raises:
        PayloadInvalidError: headers and manifest disagree.
    """
    files = tuple(TargetFile(row, delta.header(row)) for row in delta.manifest.files if row.holds_tensors)
    held: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in file.header.tensors:
            if tensor.name in held:
                raise PayloadInvalidError(f"{delta.path}: tensor {tensor.name} is in two files; nothing was applied")
            held[tensor.name] = tensor
    states = delta.manifest.target_states()
    for name in sorted(held.keys() | states.keys()):
        stored, state = held.get(name), states.get(name)
        if stored is None or state is None or (stored.dtype, stored.shape) != (state.dtype, state.shape):
            raise PayloadInvalidError(f"{delta.path}: tensor {name} is {stored} in a header, {state} in the manifest")
    return files


def _check_layout(chain: Chain, base: Checkpoint) -> None:
    """Names, dtypes and shapes first: the most common mistake is found without reading the tensors."""
    states = {}
    for name, (_, tensor) in base.tensors.items():
        known = chain.base_states.get(name)
        states[name] = TensorState(tensor.dtype, tensor.shape, tensor.nbytes, known.digest if known else "0" * 32)
    if {name: (s.dtype, s.shape) for name, s in states.items()} != {
        name: (s.dtype, s.shape) for name, s in chain.base_states.items()
    }:
        check_base(chain, states, str(base.path))


def check_bodies(deltas: Sequence[Delta], workers: Workers, meter: Meter) -> None:
    """Compare every payload and blob with its digest.

    Raises:
        PayloadInvalidError: one was altered.
    """
    meter.start("check deltas", sum(delta.nbytes for delta in deltas))
    for delta in deltas:
        sections = delta.manifest.sections()
        meter.advance(delta.nbytes - sum(nbytes for nbytes, _ in sections))
        for nbytes in workers.map(lambda number, delta=delta: len(delta.section(number)), range(len(sections))):  # type: ignore[misc]
            meter.advance(nbytes)


def _from_base(row: FileRow, base: Checkpoint) -> bytes:
    companion = base.companions.get(row.name)
    content = companion.read() if companion is not None and companion.nbytes == row.nbytes else None
    if content is None or digest_of(content) != row.digest:
        found = "not there" if companion is None else "different"
        raise BaseMismatchError(
            f"{base.path}: {row.name} of {row.nbytes} bytes is needed from the base and is {found}; nothing was written. "
            "Give the directory that the delta was made from, or make the delta with --tensors-only"
        )
    return content
