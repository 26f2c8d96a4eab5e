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
        """Made before any hook is set, so that making them is not dispatched."""
        self._content = content
        self._arena = np.zeros(0, np.uint8)
        self._used = 0
        self._tensors = {spec.name: self._tensor(spec) for spec in specs}
        self._owner = {
            tensor.untyped_storage().data_ptr(): spec for spec, tensor in self._tensors.values() if spec.num_elements
        }
        self.current: str | None = None
        """The name that the loader asked for last."""
        self.is_exhausted = False
        """Whether the loader has asked for every tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (_, tensor) in self._tensors.items():
            self.current = name
            yield name, tensor
        self.is_exhausted = True

    def find(self, tensor: torch.Tensor) -> TensorSpec | None:
        """The canonical tensor whose memory a tensor views; None if it views none of these."""
        return self._owner.get(tensor.untyped_storage().data_ptr())

    def _tensor(self, spec: TensorSpec) -> tuple[TensorSpec, torch.Tensor]:
        words = self._zeros(spec) if self._content is None else self._content(spec)
        return spec, tensor_from_words(words, spec)

    def _zeros(self, spec: TensorSpec) -> Words:
        if spec.nbytes > _ARENA_NBYTES // 8:
            return np.zeros(spec.num_elements, spec.word_dtype)
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + spec.nbytes > self._arena.size:
            self._arena, start = np.zeros(_ARENA_NBYTES, np.uint8), 0
        self._used = start + max(1, spec.nbytes)
        words: Words = self._arena[start : start + spec.nbytes].view(spec.word_dtype)
        return words
