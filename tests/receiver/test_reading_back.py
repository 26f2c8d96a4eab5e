"""Canonical words read back from storage that many tensors share: the right ones, and no more of the storage than they span."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltarefit.canonical import TensorSpec
from deltarefit.pieces import Piece, StridedView, contiguous
from deltarefit.placement.granules import granules_of_bytes
from deltarefit.receiver.bit_writers import BitTarget
from deltarefit.receiver.writers import TorchTarget

pytestmark = pytest.mark.torch

COUNT = 64


@pytest.fixture
def read_nbytes(monkeypatch) -> list[int]:
    """Bytes that were brought to the host, call by call."""
    found: list[int] = []
    original = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.numel() * tensor.element_size())
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    return found


def storage(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8))


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
@pytest.mark.parametrize("flip", [0, 1])
def test_granules_of_one_tensor_among_many(read_nbytes, bits: int, flip: int) -> None:
    """Every second granule, from an odd byte on, in two pieces."""
    flat, spec = storage(2**16), TensorSpec("w", "BF16", (COUNT,))
    count = COUNT * 16 // bits
    first = 8 * 12_346 // bits + (bits < 8)
    pieces = tuple(
        Piece(StridedView(at, (count // 2,), (1,)), StridedView(first + 2 * at, (count // 2,), (2,))) for at in (0, count // 2)
    )
    words = np.zeros(COUNT, np.uint16)
    BitTarget("w", spec, flat, pieces, bits, flip).copy_to(words)
    stored = granules_of_bytes(flat.numpy(), bits)[first : first + 2 * count : 2]
    assert np.array_equal(granules_of_bytes(words.view(np.uint8), bits), stored ^ stored.dtype.type(flip))
    assert sum(read_nbytes) <= 2 * count * bits // 8 + 1


def test_a_tensor_that_this_rank_holds_nothing_of_reads_nothing(read_nbytes) -> None:
    words = np.full(COUNT, 7, np.uint16)
    BitTarget("w", TensorSpec("w", "BF16", (COUNT,)), storage(2**16), (), 4, 0).copy_to(words)
    assert (set(words.tolist()), read_nbytes) == ({7}, [])


def test_words_of_one_tensor_on_a_device(read_nbytes) -> None:
    flat = storage(2**16).view(torch.int16)
    piece = contiguous(0, COUNT)
    piece = Piece(piece.canonical, StridedView(12_345, piece.storage.shape, piece.storage.stride))
    words = np.zeros(COUNT, np.uint16)
    TorchTarget("w", flat, (piece,)).copy_to(words)
    assert np.array_equal(words, flat.numpy()[12_345 : 12_345 + COUNT].view(np.uint16))
    assert sum(read_nbytes) == 2 * COUNT
