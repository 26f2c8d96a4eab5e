"""A checkpoint on disk: one safetensors file, or a directory of them with everything else that belongs to the model.

Which files of a directory belong (``docs/offline.md`` tells users the same):

* its tensors: the files named by ``model.safetensors.index.json``, or ``model.safetensors``, or the only index or the only
  safetensors file there is. Two candidates are refused, not guessed between;
* its companions: every other visible regular file directly in it (configuration, tokenizer, code, the index itself), except
  weights in other formats, safetensors files that the index does not name and other indexes. Sub-directories do not belong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from deltarefit.canonical import WORDS, Words
from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.offline.files import check_file_name, read_into
from deltarefit.offline.safetensors import Header, StoredTensor, read_header

__all__ = ["INDEX_SUFFIX", "JOURNAL", "MAX_COMPANION_NBYTES", "Checkpoint", "Companion", "TensorFile", "journal_path"]

MAX_COMPANION_NBYTES = 256 * 2**20
"""Companions are read whole, one at a time. An index of two million tensors still fits."""
JOURNAL = ".deltarefit-journal"
"""Where an in-place apply keeps what it needs to finish after a crash."""
INDEX_SUFFIX = ".safetensors.index.json"
_FOREIGN = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".pkl",
    ".tflite", ".distcp",
)  # fmt: skip
"""Weights and trainer states in files that are not part of the safetensors checkpoint."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One open safetensors file."""

    name: str
    path: Path
    fd: int
    header: Header
    stamp: tuple[int, int, int]
    """Inode, bytes and modification time when it was opened."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that belongs to the checkpoint but holds no tensors."""

    name: str
    path: Path
    nbytes: int

    def read(self) -> bytes:
        """Its bytes.

        Raises:
            RejectedError: more than ``MAX_COMPANION_NBYTES``.
        """
        if self.nbytes > MAX_COMPANION_NBYTES:
            raise RejectedError(
                f"{self.path}: {self.nbytes} bytes; files beside the tensors may have {MAX_COMPANION_NBYTES}. "
                "Move it out of the directory, or compare the tensors only (--tensors-only)"
            )
        return self.path.read_bytes()


def journal_path(path: Path) -> Path:
    """Where the journal of a checkpoint is: inside a directory, beside a file."""
    return path / JOURNAL if path.is_dir() else path.with_name(f".{path.name}{JOURNAL}")


class Checkpoint:
    """An open checkpoint: headers validated, tensors readable in parts. Use as a context manager.

    Args:
        path: a safetensors file, a directory, or an index file, which stands for its directory.
        tensors_only: leave out every companion but the index.
        allow_unfinished: open it although an in-place apply has to be finished; for the code that finishes it.

    Raises:
        RejectedError: no checkpoint is there, it is ambiguous, or a file breaks the format.
        OperatorRequiredError: an in-place apply was interrupted here and must be finished first.
    """

    def __init__(self, path: Path, *, tensors_only: bool = False, allow_unfinished: bool = False) -> None:
        self.path = path.parent if path.name.endswith(INDEX_SUFFIX) else path
        self.is_directory = self.path.is_dir()
        if not allow_unfinished:
            _refuse_unfinished(self.path)
        index = path.name if path is not self.path else None
        names, index = _tensor_files(self.path, index) if self.is_directory else ([self.path.name], None)
        self.files: tuple[TensorFile, ...] = ()
        self.companions: Mapping[str, Companion] = {}
        try:
            for name in names:
                self.files += (_open_file(self.path / name if self.is_directory else self.path, name),)
            self.tensors = _unique_tensors(self.files)
            if self.is_directory:
                self.companions = _companions(self.path, set(names), index, tensors_only=tensors_only)
            if index is not None:
                _check_index(self.path / index, self.files)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            os.close(file.fd)
        self.files = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.header.data_nbytes for file in self.files)

    def tensor(self, name: str) -> StoredTensor:
        return self.tensors[name][1]

    def read_words(self, name: str, first_word: int, out: Words) -> None:
        """Fill ``out`` with the words ``first_word ..`` of a tensor, which has at least so many."""
        file_number, tensor = self.tensors[name]
        file = self.files[file_number]
        byte_offset = file.header.data_offset + tensor.begin + first_word * tensor.word_nbytes
        read_into(file.fd, out, byte_offset, str(file.path))

    def empty_words(self, name: str, count: int) -> Words:
        """An uninitialised array of the tensor's words."""
        return np.empty(count, WORDS[self.tensor(name).word_nbytes])

    def paths(self) -> tuple[Path, ...]:
        """Of all files that belong to it."""
        return (*(file.path for file in self.files), *(companion.path for companion in self.companions.values()))

    def check_unchanged(self) -> None:
        """Refuse if a file was replaced or written since it was opened.

        Raises:
            RejectedError: it was.
        """
        for file in self.files:
            if _stamp(os.fstat(file.fd)) != file.stamp or _stamp(file.path.stat()) != file.stamp:
                raise RejectedError(f"{file.path}: was changed while it was being read; nothing was written. Run again")


def _refuse_unfinished(path: Path) -> None:
    journals = [journal_path(path), path.parent / JOURNAL]
    if path.is_dir():
        journals = [path / JOURNAL, *path.glob(f".*{JOURNAL}")]
    for journal in journals:
        if journal.exists():
            where = journal.parent if journal.name == JOURNAL else journal.with_name(journal.name[1 : -len(JOURNAL)])
            raise OperatorRequiredError(
                f"{path}: an in-place apply was interrupted and has to be finished first: "
                f"run 'deltarefit apply --in-place --resume {where}'"
            )


def _tensor_files(directory: Path, index: str | None) -> tuple[list[str], str | None]:
    """Names of the files that hold the tensors, and of the index that says so, if there is one."""
    visible = sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))
    indexes = [name for name in visible if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in visible if name.endswith(".safetensors")]
    if index is None:
        index = _preferred(directory, "index", indexes, f"model{INDEX_SUFFIX}")
        if (
            index is not None
            and "model.safetensors" in singles
            and "model.safetensors" not in _weight_map(directory / index).values()
        ):
            raise RejectedError(
                f"{directory}: holds {index} and model.safetensors beside it; name one of the two files instead"
            )
    if index is not None:
        names = sorted(set(_weight_map(directory / index).values()))
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise RejectedError(f"{directory / index}: names {missing[0]}, which is not there ({len(missing)} missing)")
        return names, index
    single = _preferred(directory, "safetensors file", singles, "model.safetensors")
    if single is None:
        raise RejectedError(f"{directory}: no safetensors file in it; expected a Hugging Face checkpoint")
    return [single], None


def _preferred(directory: Path, kind: str, names: list[str], standard: str) -> str | None:
    if standard in names or not names:
        return standard if names else None
    if len(names) > 1:
        raise RejectedError(
            f"{directory}: more than one {kind}: {', '.join(names[:5])}; name one of them instead of the directory"
        )
    return names[0]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_COMPANION_NBYTES:
        raise RejectedError(f"{path}: {path.stat().st_size} bytes; expected an index of at most {MAX_COMPANION_NBYTES}")
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RejectedError(f"{path}: not a safetensors index: {error}") from error
    if not index.weight_map:
        raise RejectedError(f"{path}: weight_map is empty; expected tensor names and their files")
    for name in set(index.weight_map.values()):
        check_file_name(name, str(path))
    return index.weight_map


def _check_index(path: Path, files: tuple[TensorFile, ...]) -> None:
    held = {file.name: {tensor.name for tensor in file.header.tensors} for file in files}
    for tensor, name in _weight_map(path).items():
        if tensor not in held[name]:
            raise RejectedError(f"{path}: says that tensor {tensor} is in {name}, which does not hold it")


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _open_file(path: Path, name: str) -> TensorFile:
    if not path.is_file():
        raise RejectedError(f"{path}: not a regular file; expected a safetensors file or a directory with one")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return TensorFile(name, path, fd, read_header(fd, str(path)), _stamp(os.fstat(fd)))
    except BaseException:
        os.close(fd)
        raise


def _unique_tensors(files: tuple[TensorFile, ...]) -> dict[str, tuple[int, StoredTensor]]:
    tensors: dict[str, tuple[int, StoredTensor]] = {}
    for file_number, file in enumerate(files):
        for tensor in file.header.tensors:
            if tensor.name in tensors:
                other = files[tensors[tensor.name][0]].name
                raise RejectedError(f"{file.path}: tensor {tensor.name} is also in {other}; expected it once in a checkpoint")
            tensors[tensor.name] = (file_number, tensor)
    return tensors


def _companions(directory: Path, tensor_files: set[str], index: str | None, *, tensors_only: bool) -> dict[str, Companion]:
    found: dict[str, Companion] = {}
    for entry in sorted(directory.iterdir()):
        name = entry.name
        foreign = name.endswith(_FOREIGN) or tensors_only
        if name.startswith(".") or name in tensor_files or (foreign and name != index) or not entry.is_file():
            continue
        found[name] = Companion(check_file_name(name, str(directory)), entry, entry.stat().st_size)
    return found
