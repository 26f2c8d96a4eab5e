"""Canonical tensors as a loader gets them: contiguous host tensors that can be recognised again by their address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from deltarefit.bits import tensor_from_words
from deltarefit.canonical import TensorSpec, Words

__all__ = ["Inputs", "LoadWeights"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's loader: takes canonical names and tensors and places them in its parameters and buffers."""

_ARENA_NBYTES = 64 * 2**20
_ALIGNMENT = 64


class Inputs:
    """The tensors of one loader call. They live until the call is over, so an address means one tensor only.

    Without content a tensor is all zero and occupies no memory until somebody writes to it: the kernel hands out pages of
    zeros lazily, so a model of any size can be surveyed.
    """

    def __init__(self, specs: Iterable[TensorSpec], content: Callable[[TensorSpec], Words] | None = None) -> None:
        self._specs = tuple(specs)
        self._content = content
        self._arena = np.zeros(0, np.uint8)
        self._used = 0
        self._owner: dict[int, tuple[TensorSpec, torch.Tensor]] = {}
        self.current: str | None = None
        """The name that the loader asked for last."""
        self.is_exhausted = False
        """Whether the loader has asked for every tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs:
            tensor = self._tensor(spec)
            self.current = spec.name
            yield spec.name, tensor
        self.is_exhausted = True

    def find(self, tensor: torch.Tensor) -> TensorSpec | None:
        """The canonical tensor whose memory a tensor views; None if it views none of these."""
        found = self._owner.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found[0]

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        words = self._zeros(spec) if self._content is None else self._content(spec)
        tensor = tensor_from_words(words, spec)
        if spec.num_elements:
            self._owner[tensor.untyped_storage().data_ptr()] = (spec, tensor)
        return tensor

    def _zeros(self, spec: TensorSpec) -> Words:
        if spec.nbytes > _ARENA_NBYTES // 8:
            return np.zeros(spec.num_elements, spec.word_dtype)
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + spec.nbytes > self._arena.size:
            self._arena, start = np.zeros(_ARENA_NBYTES, np.uint8), 0
        self._used = start + max(1, spec.nbytes)
        words: Words = self._arena[start : start + spec.nbytes].view(spec.word_dtype)
        return words
