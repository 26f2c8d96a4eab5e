"""Shards in numpy arrays, sharded layouts of them, and a receiver that applies buckets."""

import math

import numpy as np

from deltarefit import kernels
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.pieces import Piece, StridedView, whole
from deltarefit.plan import RefitPlan
from deltarefit.records import Encoding
from deltarefit.source import ConversionTask


def spec(name="w", shape=(4, 6), dtype="BF16"):
    return TensorSpec(name, dtype, tuple(shape))


def random_words(tensor, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2 ** (8 * tensor.element_nbytes), tensor.num_elements, dtype=np.uint64).astype(tensor.word_dtype)


def whole_task(tensor, words, replicas=(0,), key=None):
    """A task for a tensor that lies contiguously in ``words``."""
    view = whole(tensor.shape)
    return ConversionTask(key or tensor.name, tensor, (Piece(view, view),), lambda: words, tuple(replicas))


def box_piece(tensor, starts, lengths, storage_offset=0):
    """A box of a tensor, stored contiguously from ``storage_offset``."""
    offset = sum(start * stride for start, stride in zip(starts, tensor.strides, strict=True))
    return Piece(
        StridedView(offset, tuple(lengths), tensor.strides),
        StridedView(storage_offset, tuple(lengths), whole(lengths).stride),
    )


def row_shards(tensor, count, replicas_of=lambda shard: (shard,)):
    """One task per row shard by the ceil rule of torch.chunk: uneven, and empty at the end where rows run out."""
    rows = tensor.shape[0]
    each = math.ceil(rows / count)
    tasks = []
    for shard in range(count):
        start, stop = min(rows, shard * each), min(rows, (shard + 1) * each)
        lengths = (stop - start, *tensor.shape[1:])
        piece = box_piece(tensor, (start, *(0 for _ in tensor.shape[1:])), lengths)
        words = np.zeros(math.prod(lengths), tensor.word_dtype)
        pieces = (piece,) if piece.num_elements else ()
        tasks.append(ConversionTask(f"{tensor.name}@{shard}", tensor, pieces, lambda w=words: w, tuple(replicas_of(shard))))
    return tasks


def plan_for(*specs, encoding=Encoding.DIFFERENCE, dense=()):
    catalog = Catalog(specs)
    return RefitPlan(catalog, dict.fromkeys(catalog, encoding), 1, frozenset(dense))


def apply_buckets(buckets, holdings):
    """Apply items to contiguous canonical words by name, as a receiver does."""
    for bucket in buckets:
        for item in bucket.items:
            view = whole(item.spec.shape)
            kernels.apply_item(holdings[item.spec.name], [Piece(view, view)], item)


def plain(buckets):
    """Buckets as values that compare."""
    return [
        (
            bucket.input_nbytes,
            [
                (item.spec.name, item.encoding, kernels.decode_positions(item).tolist(), kernels.decode_values(item).tolist())
                for item in bucket.items
            ],
        )
        for bucket in buckets
    ]
