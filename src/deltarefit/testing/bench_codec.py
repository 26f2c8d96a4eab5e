"""Bytes on the wire: our payloads beside the paper's layout and beside the entropy floor. Sizes only, nothing is timed.

Three tables. ``table2`` is the paper's Table 2, reproduced byte for byte (values alone, without locations or metadata).
``layouts`` compares whole payloads on synthetic changes of given rates. ``training`` does the same on what a few AdamW steps
really change in a small transformer. torch is needed for the first and the last and is imported only there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec, Words
from deltarefit.ids import OwnerId, PolicyVersion, attempt_id
from deltarefit.kernels import code_records, scan
from deltarefit.payload import encode
from deltarefit.payload.frames import pack_plane
from deltarefit.pieces import Piece, whole
from deltarefit.records import CodedItem, DeltaRecords, Encoding

__all__ = [
    "REFERENCE_ZSTD",
    "TABLE2_NBYTES",
    "WeightChange",
    "bound_nbytes",
    "changed_words",
    "floor_nbytes",
    "paper_nbytes",
    "payload_nbytes",
    "rounded_to_bfloat16",
    "run",
]

REFERENCE_ZSTD = "1.5.7"
"""The library whose bytes the paper's Table 2 was checked against."""
TABLE2_NBYTES = {1e-4: (738_020, 333_504), 1e-3: (7_024_411, 3_225_495), 1e-2: (25_703_465, 14_927_773)}
"""Noise to bytes of overwrites and of masks: paper 8.2, Table 2."""

_RELATIVE_CHANGE = 1e-2


@dataclass(frozen=True, slots=True, eq=False)
class WeightChange:
    """One tensor before and after a step, as stored words."""

    spec: TensorSpec
    old: Words
    """Shape [num_elements]."""
    new: Words
    """Same shape."""


def run(
    *,
    table2: bool = True,
    layouts: bool = True,
    training: bool = True,
    num_words: int = 20_000_000,
    num_items: int = 32,
    item_elements: int = 1_500_000,
    change_rates: Sequence[float] = (0.006, 0.01, 0.03, 0.05),
    training_steps: int = 5,
    warm_up_steps: int = 40,
    seed: int = 17,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure, and return plain values ready for JSON.

    Args:
        table2, layouts, training: which tables to make; the others come out empty.
        num_words: words of Table 2; its bytes are the paper's only at 20 million.
        num_items, item_elements, change_rates: bf16 tensors of ``layouts``; their rates of changed elements.
        training_steps, warm_up_steps: measured steps at learning rate 1e-6, after steps at 1e-3.
        seed: of the synthetic tensors and of the training run. Table 2 has the paper's seeds.
        progress: is told what is about to be done.

    Returns:
        ``table2``: rows of noise_std, changed, overwrite_nbytes, xor_nbytes, difference_nbytes.
        ``layouts``: rows of change_rate, changed, paper_nbytes, nbytes, floor_nbytes; of whole payloads under the other
        encodings, xor_nbytes and overwrite_nbytes; and ratios: to_paper, to_floor, floor_to_paper, which no order-0 code
        undercuts; bound_nbytes and bound_to_paper, which no code at all does.
        ``training``: the same, with step.
        ``zstd_version``, ``notes``: what to know when numbers differ.
    """
    notes = []
    if (version := ".".join(map(str, zstandard.ZSTD_VERSION))) != REFERENCE_ZSTD:
        notes.append(f"zstd {version} instead of {REFERENCE_ZSTD}: Table 2 need not match to the byte")
    if table2 and num_words != 20_000_000:
        notes.append(f"Table 2 on {num_words} words instead of 20,000,000: not the paper's bytes")
    result: dict[str, Any] = {"zstd_version": version, "notes": notes, "table2": [], "layouts": [], "training": []}
    if table2:
        result["table2"] = list(_table2_rows(num_words, progress))
    if layouts:
        for rate in change_rates:
            progress(f"payload of {num_items} tensors, {rate:.1%} changed")
            changes = list(_synthetic(num_items, item_elements, rate, seed))
            row = _compared(changes)
            bound = bound_nbytes(changes)
            bounds = {"bound_nbytes": round(bound), "bound_to_paper": round(bound / row["paper_nbytes"], 4)}
            result["layouts"].append({"change_rate": rate, **row, **bounds})
    if training:
        progress("training a small transformer")
        for step, changes in _training_changes(warm_up_steps, training_steps, seed):
            progress(f"payload of training step {step}")
            row = _compared(changes)
            total = sum(change.spec.num_elements for change in changes)
            result["training"].append({"step": step, "change_rate": row["changed"] / total, **row})
    return result


def payload_nbytes(changes: Sequence[WeightChange], encoding: Encoding = Encoding.DIFFERENCE) -> int:
    """Bytes of one payload with all changes: locations, values, metadata and digest."""
    items = [item for change in changes if (item := _item(change, encoding)) is not None]
    if not items:
        return 0
    data = encode(
        items,
        attempt=attempt_id(1, 1, "bench"),
        owner=OwnerId(0),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest="00" * 16,
    )
    return len(data)


def paper_nbytes(changes: Sequence[WeightChange]) -> int:
    """The paper's layout (5, D): per tensor, gaps in the smallest fixed width that holds the largest and masks as words, each
    under zstd level 1. Names, shapes and headers are not counted, in the paper's favour.
    """
    writer = zstandard.ZstdCompressor(level=1)
    total = 0
    for change in changes:
        positions = np.flatnonzero(change.old != change.new)
        if positions.size:
            gaps = np.diff(positions, prepend=-1) - 1
            width = next(width for width in (1, 2, 4, 8) if gaps.max() < 2 ** (8 * width))
            masks = change.old[positions] ^ change.new[positions]
            total += len(writer.compress(gaps.astype(f"<u{width}").data)) + len(writer.compress(masks.data))
    return total


def floor_nbytes(changes: Sequence[WeightChange]) -> float:
    """What an ideal order-0 coder needs for independent positions and for the differences, all tensors taken together."""
    num_elements = sum(change.spec.num_elements for change in changes)
    differences = [change.new[change.old != change.new] - change.old[change.old != change.new] for change in changes]
    changed = sum(part.size for part in differences)
    position_bits = _position_bits(changed, num_elements)
    counts = np.unique(np.concatenate(differences), return_counts=True)[1]
    value_bits = float((counts * np.log2(changed / counts)).sum()) if changed else 0.0
    return float(position_bits + value_bits) / 8


def bound_nbytes(changes: Sequence[WeightChange]) -> float:
    """Shannon's bound for the synthetic changes of bfloat16 words: what no lossless code undercuts on average, not even one
    whose two ends both know the old weights and how the changes were drawn.

    Positions are independent of the weights. A difference depends on the old mantissa alone: neighbouring words lie closer
    together, relative to the value, the larger that is.
    """
    num_elements = sum(change.spec.num_elements for change in changes)
    mantissas = np.concatenate([change.old[change.old != change.new] & 127 for change in changes])
    bits = np.array([_bits_of_difference(mantissa) for mantissa in range(128)])
    return (_position_bits(mantissas.size, num_elements) + float(bits[mantissas].sum())) / 8


def _bits_of_difference(mantissa: int) -> float:
    """Entropy in bits of the steps from a word of this mantissa to that of ``_synthetic``, given that it moves."""
    reach = 40  # steps either way that have any chance worth counting
    steps = np.arange(-reach - 1, reach + 2)
    exponents, mantissas = np.divmod(mantissa + steps, 128)
    values = (1 + mantissas / 128) * np.exp2(exponents)  # of the words around it
    borders = (values[1:] + values[:-1]) / 2
    z = (borders / (1 + mantissa / 128) - 1) / _RELATIVE_CHANGE
    below = np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in z])
    chances = np.delete(np.diff(below), reach)  # staying is drawn again
    chances = chances[chances > 0] / chances.sum()
    return float(-(chances * np.log2(chances)).sum())


def _position_bits(changed: int, num_elements: int) -> float:
    if changed in (0, num_elements):
        return 0.0
    rate = changed / num_elements
    return float(-num_elements * (rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate)))


def _item(change: WeightChange, encoding: Encoding) -> CodedItem | None:
    view = whole(change.spec.shape)
    return scan(change.spec, change.new, change.old, (Piece(view, view).normalised(),), encoding).item


def _compared(changes: Sequence[WeightChange]) -> dict[str, Any]:
    paper, floor, nbytes = paper_nbytes(changes), floor_nbytes(changes), payload_nbytes(changes)
    return {
        "changed": sum(int(np.count_nonzero(change.old != change.new)) for change in changes),
        "paper_nbytes": paper,
        "nbytes": nbytes,
        "floor_nbytes": round(floor),
        "xor_nbytes": payload_nbytes(changes, Encoding.XOR),
        "overwrite_nbytes": payload_nbytes(changes, Encoding.OVERWRITE),
        "to_paper": round(nbytes / paper, 4) if paper else None,
        "to_floor": round(nbytes / floor, 4) if floor else None,
        "floor_to_paper": round(floor / paper, 4) if paper else None,
    }


# Table 2


def _table2_rows(num_words: int, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The paper's calls: bf16 normals of seed 42, fp32 noise of seed 44, scaled and added as two fp32 operations (8.2, C)."""
    import torch

    def normals(seed: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(num_words, dtype=dtype, generator=torch.Generator().manual_seed(seed))

    progress("Table 2: drawing normals")
    weights, noise = normals(42, torch.bfloat16), normals(44, torch.float32)
    old = weights.view(torch.int16).numpy().view("<u2")
    writer = zstandard.ZstdCompressor(level=1)
    for noise_std in TABLE2_NBYTES:
        progress(f"Table 2: noise {noise_std:g}")
        shifted = (weights.float() + noise_std * noise).bfloat16()
        new = shifted.view(torch.int16).numpy().view("<u2")
        is_changed = new != old
        before, after = old[is_changed], new[is_changed]
        yield {
            "noise_std": noise_std,
            "changed": int(after.size),
            "overwrite_nbytes": len(writer.compress(after.data)),
            "xor_nbytes": len(writer.compress((after ^ before).data)),
            "difference_nbytes": _difference_nbytes(before, after),
        }


def _difference_nbytes(before: Words, after: Words) -> int:
    """Our value planes alone. The words count as one run, so that there are no locations."""
    if not after.size:
        return 0
    spec = TensorSpec("words", "BF16", (after.size,))
    coded = code_records(DeltaRecords(spec, np.arange(after.size), after, before), Encoding.DIFFERENCE)
    return sum(len(pack_plane(plane)) for plane in coded.value_planes)


# Synthetic changes


def _synthetic(num_items: int, item_elements: int, rate: float, seed: int) -> Iterator[WeightChange]:
    """Standard normals in bf16; elements drawn at this rate are multiplied by 1 + 0.01 z, and drawn again until they differ."""
    for number in range(num_items):
        rng = np.random.default_rng((seed, number))
        old = rounded_to_bfloat16(rng.standard_normal(item_elements, np.float32))
        new = changed_words(old, rate, rng)
        yield WeightChange(TensorSpec(f"model.layers.{number}.mlp.up_proj.weight", "BF16", (item_elements,)), old, new)


def changed_words(old: Words, rate: float, rng: np.random.Generator) -> Words:
    """bfloat16 words of which those drawn at this rate are multiplied by 1 + 0.01 z, and drawn again until they differ."""
    new = old.copy()
    pending = np.flatnonzero(rng.random(old.size, np.float32) < rate)
    while pending.size:
        factors = 1 + np.float32(_RELATIVE_CHANGE) * rng.standard_normal(pending.size, np.float32)
        new[pending] = rounded_to_bfloat16((old[pending].astype(np.uint32) << 16).view(np.float32) * factors)
        # Zeros stay zero however often they are multiplied.
        pending = pending[(new[pending] == old[pending]) & (old[pending] << 1 != 0)]
    return new


def rounded_to_bfloat16(values: NDArray[np.float32]) -> Words:
    """Rounded to nearest, ties to even. Finite values only."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype("<u2")


# Real training changes


def _training_changes(warm_up_steps: int, steps: int, seed: int) -> Iterator[tuple[int, list[WeightChange]]]:
    """bf16 weights before and after each AdamW step at learning rate 1e-6 (paper 2.2, E: constant, no warm-up, no decay).

    fp32 master weights and moments, bf16 copies of the weights: what mixed-precision trainers keep. The model first learns at
    1e-3 for a few steps, so that its moments and weights are not those of the first step.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _small_transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        batches = _text_batches(seed)
        for batch in itertools.islice(batches, warm_up_steps):
            _train_step(model, optimizer, batch)
        for group in optimizer.param_groups:
            group["lr"] = 1e-6
        old = _bfloat16_words(model)
        for step, batch in enumerate(itertools.islice(batches, steps), start=1):
            _train_step(model, optimizer, batch)
            new = _bfloat16_words(model)
            specs = {name: TensorSpec(name, "BF16", tuple(parameter.shape)) for name, parameter in model.named_parameters()}
            yield step, [WeightChange(specs[name], old[name], new[name]) for name in specs]
            old = new


def _small_transformer() -> Any:
    """About 1.7 million parameters: bytes in, bytes out, two layers, weights of standard deviation 0.02."""
    import torch

    class SmallTransformer(torch.nn.Module):
        def __init__(self, width: int = 256, layers: int = 2) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(256, width)
            self.layers = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            )
            self.norm = torch.nn.LayerNorm(width)
            self.head = torch.nn.Linear(width, 256, bias=False)
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: Any) -> Any:
            causal = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden, src_mask=causal, is_causal=True)
            return self.head(self.norm(hidden))

    return SmallTransformer()


def _text_batches(seed: int, batch: int = 4, context: int = 64) -> Iterator[Any]:
    """Windows of bytes, [batch, context + 1], from text that is at hand everywhere: the source of argparse."""
    import argparse
    import inspect

    import torch

    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, text.numel() - context - 1, batch)
        yield torch.stack([text[start : start + context + 1] for start in starts.tolist()])


def _train_step(model: Any, optimizer: Any, batch: Any) -> None:
    import torch

    logits = model(batch[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def _bfloat16_words(model: Any) -> dict[str, Words]:
    import torch

    return {
        name: parameter.detach().bfloat16().view(torch.int16).numpy().reshape(-1).view("<u2")
        for name, parameter in model.named_parameters()
    }
