"""Stored-bit views of torch tensors: the one shared room that knows torch.

Comparison and arithmetic on weights happen on unsigned words, never on floats: -0.0, NaN payloads and subnormals are just
bit patterns here (paper 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from deltarefit.canonical import WORDS, TensorSpec, Words, word_dtype
from deltarefit.errors import RejectedError
from deltarefit.pieces import StridedView

__all__ = [
    "DTYPES",
    "dtype_name",
    "logical_words",
    "spec_of",
    "storage_id",
    "storage_view",
    "storage_words",
    "tensor_from_words",
]

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32",
        "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
    }.items()
    if hasattr(torch, attribute)
}  # fmt: skip
"""safetensors dtype name to torch dtype, as far as the installed torch has it."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype.

    Raises:
        RejectedError: no fixed-width name is known for it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise RejectedError(f"torch dtype {dtype}: expected one of {', '.join(map(str, _NAMES))}") from None


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The canonical spec of a tensor that already is in canonical shape and dtype."""
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def storage_id(tensor: torch.Tensor) -> int:
    """Address of the first byte of the tensor's storage; tensors that alias share it. 0 for an empty storage."""
    return tensor.untyped_storage().data_ptr()


def storage_view(tensor: torch.Tensor) -> StridedView:
    """Where the tensor's elements lie in its storage, in elements."""
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def storage_words(tensor: torch.Tensor) -> Words:
    """All words of the tensor's storage, flat, sharing memory: writing to them writes to the tensor.

    Raises:
        RejectedError: the tensor is not in host memory.
    """
    if tensor.device.type != "cpu":
        raise RejectedError(f"storage words of a tensor on {tensor.device}: expected host memory; copy it to the host first")
    width = tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()
    return raw[: raw.size // width * width].view(WORDS[width])


def logical_words(tensor: torch.Tensor) -> Words:
    """The tensor's words in row-major order of its logical shape; a copy unless it is contiguous in host memory."""
    plain = tensor.detach().cpu().contiguous()
    words = storage_words(plain)
    start = plain.storage_offset()
    return words[start : start + plain.numel()]


def tensor_from_words(words: Words, spec: TensorSpec) -> torch.Tensor:
    """A tensor of the spec's shape and dtype over the same memory as ``words`` (a copy if that memory is read-only)."""
    if words.dtype != word_dtype(spec.dtype) or words.size != spec.num_elements:
        raise RejectedError(f"words for {spec}: got {words.size} of {words.dtype}")
    flat = np.ascontiguousarray(words).reshape(-1)
    if not flat.flags.writeable:
        flat = flat.copy()
    return torch.from_numpy(flat.view(np.uint8)).view(DTYPES[spec.dtype]).reshape(spec.shape)
