"""Rows of the conformance table, and the page that is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from deltarefit.errors import RejectedError

__all__ = [
    "HEADINGS",
    "PAGE",
    "TABLE",
    "LeftOut",
    "Measured",
    "Row",
    "check_complete",
    "columns_of",
    "page_of",
    "read_table",
    "write_rows",
    "write_table",
]

TABLE, PAGE = "conformance.json", "conformance.md"
_MAX_TABLE_NBYTES = 2**24


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine, model and quantisation."""

    engine: str
    """With its version."""
    model: str
    quantisation: str
    """``none`` is bfloat16."""
    kernels: str = ""
    """Which of the engine's kernels were selected, if that is not a matter of course."""
    exact_bytes_fraction: float
    """Of the checkpoint's bytes: changed bits go straight to their places."""
    rerun: float
    """Of the checkpoint's bytes: changes alone are sent, and the engine's own code computes what it derives from them."""
    dense: float
    """Of the checkpoint's bytes: every element is sent at each refit."""
    skipped: float = 0.0
    """Of the checkpoint's bytes: the engine keeps none of it."""
    refused: str = ""
    """Why the model cannot be refitted in place; empty if it can."""
    bit_equal: bool
    """After two refits, and a failed attempt between them, every storage has the bytes of a fresh load."""

    @property
    def is_sound(self) -> bool:
        """Exact, or refused with a reason before a byte was written."""
        return self.bit_equal != bool(self.refused)


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Models that could not be measured on this machine."""

    engine: str
    kernels: str
    models: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        which = f"{self.kernels} kernels, " if self.kernels else ""
        return f"{self.engine}, {which}{', '.join(self.models)}: left out here: {self.reason}"


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run of an engine's cases gave."""

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Every row is; what was left out is not judged."""
        return all(row.is_sound for row in self.rows)


def read_table(path: Path) -> tuple[Row, ...]:
    """The rows in a file.

    Raises:
        RejectedError: it holds no such table, or one from a machine that had to leave some out: a page would lose those rows.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_TABLE_NBYTES + 1)
    try:
        if len(data) > _MAX_TABLE_NBYTES:
            raise RejectedError(f"{path}: expected at most {_MAX_TABLE_NBYTES} bytes")
        measured = msgspec.json.decode(data, type=Measured)
    except msgspec.DecodeError as error:
        raise RejectedError(f"{path}: no conformance table: {error}; make it with 'make conformance'") from error
    check_complete(path, measured)
    return measured.rows


def check_complete(path: Path, measured: Measured) -> None:
    """Refuse a table to which rows are missing.

    Raises:
        RejectedError: the text names the groups, and why they could not be measured.
    """
    if measured.left_out:
        listed = "\n  ".join(map(str, measured.left_out))
        raise RejectedError(
            f"{path}: expected all rows of the engine, but some could not be measured:\n  {listed}\nThe documented table would "
            "lose them: run 'make conformance' on a machine that can build them"
        )


def write_rows(path: Path, measured: Measured) -> None:
    """Write a table without a page."""
    data = msgspec.json.format(msgspec.json.encode(measured), indent=1)
    path.write_bytes(data + b"\n")


def write_table(directory: Path, rows: Sequence[Row]) -> None:
    """Write the table and its page into a directory."""
    write_rows(directory / TABLE, Measured(tuple(rows)))
    (directory / PAGE).write_text(page_of(rows))


def columns_of(row: Row) -> list[str]:
    """What a table shows of a row."""
    what = row.quantisation + (f", {row.kernels}" if row.kernels else "")
    if row.refused:
        return [row.engine, row.model, what, "-", "-", "-", "-", f"refused: {row.refused}"]
    shares = [_share(share) for share in (row.exact_bytes_fraction, row.rerun, row.dense, row.skipped)]
    return [row.engine, row.model, what, *shares, "bit-equal" if row.bit_equal else "NOT EQUAL"]


HEADINGS = ("engine", "model", "quantisation", "exact", "rerun", "dense", "skipped", "result")


def _share(share: float) -> str:
    """Never rounded to all or to nothing."""
    if share in {0.0, 1.0}:
        return "all" if share else "-"
    return f"{min(max(share, 0.0001), 0.9999):.2%}"


def page_of(rows: Sequence[Row]) -> str:
    """The page of the documentation."""
    lines = [_HEAD, "| " + " | ".join(HEADINGS) + " |", "|---|---|---|---:|---:|---:|---:|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in columns_of(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


_HEAD = """\
# What is exact, and what is not

Made by `make conformance` from [conformance.json](conformance.json); do not edit. `deltarefit doctor --engine vllm` (or
`sglang`, `torch`) makes the rows of an engine that is installed where it runs.

Each row is a tiny model of the engine's own classes, built, loaded and finished by the engine's own code on a CPU, without a
serving engine around it. It is refitted from one checkpoint to a second; an attempt at a third is broken off half-way and
repeated with overwrites. After each refit what hangs on the model is compared, byte by byte, with a fresh load. Shares are
of the checkpoint's bytes:

* **exact**: changed bits go straight to every place that holds them, wherever the engine packed or moved them.
* **rerun**: changes alone are sent, and the engine's own code computes anew what it derives from them.
* **dense**: every element is sent at each refit.
* **skipped**: the engine keeps nothing of it, such as zero points of symmetric codes.
* **refused**: at start-up, with the tensor and the reason, before a byte is written.

Kernels: *AMX* and *CUDA* say that kernels for CPUs with AMX tiles, or classes made for CUDA whose post-load step is plain
torch, were selected so that their layouts are produced; nothing here computes a forward pass with them, and no GPU was
involved. Layouts that exist only on a GPU (Marlin, DeepGEMM, TRT-LLM, FlashInfer) are unproved. So are SGLang's
quantised models: its post-load work on them needs kernels that are not published for CPUs.
"""
