"""Which elements of a model's parameters and buffers no canonical tensor reaches, and which parameters the checkpoint lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from deltarefit.bits import storage_view
from deltarefit.pieces import StridedView
from deltarefit.placement.overlap import Claim
from deltarefit.placement.storages import StorageMap, state_tensors
from deltarefit.receiver.report import matches

__all__ = ["TensorPlace", "lacking", "tensor_places", "unreached_elements"]

TensorPlace = tuple[str, StridedView, int]
"""Where a tensor lies: the storage's key, its view there, and bytes an element."""


def tensor_places(model: torch.nn.Module, storages: StorageMap) -> dict[str, TensorPlace]:
    """Of every parameter and buffer that has elements, by name."""
    return {
        name: (found[0].key, storage_view(tensor), tensor.element_size())
        for name, tensor in state_tensors(model).items()
        if tensor.numel() and (found := storages.find(tensor)) is not None
    }


def lacking(
    model: torch.nn.Module, places: Mapping[str, TensorPlace], unreached: Mapping[str, int], may_lack: Iterable[str]
) -> dict[str, str]:
    """Parameters of which no canonical tensor fills any element, with the reason. What matches ``may_lack`` is left out."""
    patterns = tuple(may_lack)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: "no canonical tensor reaches this parameter: the checkpoint lacks it"
        for name, count in unreached.items()
        if name in parameters and count == places[name][1].num_elements and not matches(name, patterns)
    }


def unreached_elements(places: Mapping[str, TensorPlace], claims: Iterable[Claim]) -> dict[str, int]:
    """Elements of each parameter or buffer that no claim covers, where there are any."""
    bounds: dict[str, list[tuple[int, int, int]]] = {}
    for claim in {(c.storage, c.view, c.width): c for c in claims}.values():
        if claim.view.num_elements:
            bounds.setdefault(claim.storage, []).append(
                (claim.first_byte, claim.end_byte, claim.view.num_elements * claim.width)
            )
    arrays = {key: np.array(rows, dtype=np.int64) for key, rows in bounds.items()}
    unreached: dict[str, int] = {}
    for name, (key, view, width) in places.items():
        if not view.num_elements:
            continue
        low, high = view.first * width, (view.last + 1) * width
        rows = arrays.get(key)
        covered = 0
        if rows is not None:
            inside = (rows[:, 0] >= low) & (rows[:, 1] <= high)
            covered = int(rows[inside, 2].sum()) // width
            if not covered and bool(((rows[:, 0] < high) & (rows[:, 1] > low)).any()):
                continue  # a wider write covers it
        if covered < view.num_elements:
            unreached[name] = view.num_elements - covered
    return unreached
