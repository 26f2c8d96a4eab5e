"""How much of a policy is sent directly, and in how many items, from names and shapes alone (paper D, Tables D.1 and D.2).

Weight types are told by the usual names of their tensors. They are for reading the table: what is direct is decided by pieces,
never by a name. ``classes="paper"`` applies the paper's own list of mapping classes instead, for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import msgspec

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError

__all__ = ["CoverageReport", "CoverageRow", "ParallelDegrees", "coverage_of"]

Path = Literal["direct", "cast", "residual"]
Split = Literal["tensor", "key_value", "expert", "whole"]
_PATHS: tuple[Path, ...] = ("direct", "cast", "residual")


@dataclass(frozen=True, slots=True)
class _WeightType:
    label: str
    pattern: re.Pattern[str]
    split: Split
    """Which parallel degree cuts such a tensor into shards, each of which is one item when it changes."""
    paper_reason: str
    """Why the paper's list leaves it to residual conversion; empty if it is affine there."""


_FUSED = "fused in the trainer; outside the paper's mapping classes"
_TABLE: tuple[tuple[str, str, Split, str], ...] = (
    ("embedding and output head", r"(^|\.)(embed_tokens|embeddings?|word_embeddings|wte|lm_head)\.weight$", "tensor",
     "tied embeddings and heads always take the paper's residual path"),
    ("routed experts", r"\.experts\.(\d+\.|gate_up_proj|down_proj)", "expert", ""),
    ("shared experts", r"\.shared_experts?\.", "tensor", ""),
    ("attention queries", r"\.q_proj\.|\.q_b_proj\.", "tensor", _FUSED),
    ("attention keys and values", r"\.(k|v)_proj\.|\.qkv_proj\.", "key_value", _FUSED),
    ("attention output projection", r"\.(o_proj|dense)\.", "tensor", ""),
    ("Mamba input projection and convolution", r"\.(mixer|mamba|linear_attn)\.(in_proj\w*|conv1d)\.", "tensor", _FUSED),
    ("Mamba output projection", r"\.(mixer|mamba|linear_attn)\.out_proj\.", "tensor", ""),
    ("Mamba state and norm", r"\.(mixer|mamba|linear_attn)\.(A_log|D|dt_bias|norm)", "whole", ""),
    ("latent projections of experts", r"\.fc[12]_latent_proj\.", "tensor", ""),
    ("router", r"\.(gate|router)\.|correction_bias", "whole", ""),
    ("MLP", r"\.(gate_proj|up_proj|down_proj)\.", "tensor", ""),
    ("normalisation", r"norm", "whole", ""),
)  # fmt: skip
_TYPES = tuple(_WeightType(label, re.compile(pattern), split, reason) for label, pattern, split, reason in _TABLE)
_OTHER = _WeightType("other", re.compile(""), "whole", "")


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """How many shards a training layout makes of what it splits."""

    tensor: int = 1
    expert_tensor: int = 1
    num_key_value_heads: int | None = None
    """Keys and values have no more distinct shards than heads; None if there are at least ``tensor`` of them."""

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.expert_tensor < 1 or (self.num_key_value_heads or 1) < 1:
            raise RejectedError(f"parallel degrees {self}: expected at least 1 each")

    def shards(self, split: Split) -> int:
        """Distinct shards of a tensor that is split this way."""
        match split:
            case "tensor":
                return self.tensor
            case "key_value":
                return min(self.tensor, self.num_key_value_heads or self.tensor)
            case "expert":
                return self.expert_tensor
            case "whole":
                return 1


class CoverageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One weight type on one path."""

    weight_type: str
    path: Path
    """"cast": sent directly too, but compared only after each element was rounded to the checkpoint's dtype."""
    reason: str
    """Why it is cast or residual; empty if it is direct."""
    tensors: int
    nbytes: int
    share: float
    """Of the policy's bytes."""
    items: int
    """When every tensor and shard changes."""


class CoverageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``deltarefit coverage --json`` prints."""

    tensors_total: int
    tensors_direct: int
    """Tensors that are not residual: no rank ever assembles one of these as a whole."""
    bytes_total: int
    bytes_direct: int
    items_total: int
    items_direct: int
    """Items that may carry a difference or an xor mask."""
    by_type: tuple[CoverageRow, ...]


@dataclass(slots=True)
class _Sum:
    tensors: int = 0
    nbytes: int = 0
    items: int = 0

    def add(self, spec: TensorSpec, items: int) -> None:
        self.tensors += 1
        self.nbytes += spec.nbytes
        self.items += items


def coverage_of(
    catalog: Catalog,
    degrees: ParallelDegrees = ParallelDegrees(),
    *,
    classes: Literal["pieces", "paper"] = "pieces",
    residual: Mapping[str, str] | AbstractSet[str] = frozenset(),
    cast: Mapping[str, str] | None = None,
    items: Mapping[str, int] | None = None,
) -> CoverageReport:
    """Tensors, bytes and items by weight type and path.

    Args:
        catalog: the policy.
        degrees: of the training layout.
        classes: "pieces" for what this library sends directly, "paper" for the paper's five mapping classes.
        residual: names of tensors that the source computes, with reasons if there are any.
        cast: names of tensors that the source holds in another dtype, with reasons.
        items: per tensor, counted from a live source; else derived from ``degrees``.
    """
    sums: dict[tuple[str, Path, str], _Sum] = {}
    for spec in catalog.values():
        kind = _type_of(spec.name)
        path, reason = _path(spec.name, kind, classes, residual, cast or {})
        count = 1 if path == "residual" else degrees.shards(kind.split)
        if items is not None:
            count = items.get(spec.name, 0)
        sums.setdefault((kind.label, path, reason), _Sum()).add(spec, count if spec.num_elements else 0)
    order = {kind.label: place for place, kind in enumerate((*_TYPES, _OTHER))}
    rows = tuple(
        CoverageRow(
            weight_type=label,
            path=path,
            reason=reason,
            tensors=one.tensors,
            nbytes=one.nbytes,
            share=one.nbytes / catalog.nbytes if catalog.nbytes else 0.0,
            items=one.items,
        )
        for (label, path, reason), one in sorted(
            sums.items(), key=lambda entry: (_PATHS.index(entry[0][1]), order[entry[0][0]], entry[0][2])
        )
    )
    direct = [row for row in rows if row.path != "residual"]
    return CoverageReport(
        tensors_total=sum(row.tensors for row in rows),
        tensors_direct=sum(row.tensors for row in direct),
        bytes_total=sum(row.nbytes for row in rows),
        bytes_direct=sum(row.nbytes for row in direct),
        items_total=sum(row.items for row in rows),
        items_direct=sum(row.items for row in direct),
        by_type=rows,
    )


def _path(
    name: str,
    kind: _WeightType,
    classes: Literal["pieces", "paper"],
    residual: Mapping[str, str] | AbstractSet[str],
    cast: Mapping[str, str],
) -> tuple[Path, str]:
    """Which way a tensor goes, and why."""
    if name in residual:
        return "residual", residual[name] if isinstance(residual, Mapping) else "computed by the export"
    if classes == "paper" and kind.paper_reason:
        return "residual", kind.paper_reason
    if name in cast:
        return "cast", cast[name]
    return "direct", ""


def _type_of(name: str) -> _WeightType:
    return next((kind for kind in _TYPES if kind.pattern.search(name)), _OTHER)
