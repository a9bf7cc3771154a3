"""One safetensors file, written tensor by tensor, with a checksum of each.

    <u64 header length> <JSON header, padded with spaces> <the tensors' bytes, without gaps>

It is written here and not by `safetensors.torch.save_file`, because that wants every tensor contiguous, unshared
and in memory at once, and gives no checksum. Here a tied, strided or CUDA tensor is copied when its turn comes.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError

__all__ = [
    "DTYPES",
    "TensorSpec",
    "as_bytes",
    "by_alignment",
    "check_tensor",
    "checksum",
    "dtype_code",
    "num_bytes_of",
    "write_file",
]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """What the header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def num_bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(shape) * dtype.itemsize


def dtype_code(name: str, dtype: torch.dtype) -> str:
    """safetensors' code of a dtype. Raises `CheckpointError` for one it has no code for."""
    if dtype not in CODES:
        raise CheckpointError(f"{name} has dtype {dtype}, which safetensors cannot hold: store it in another")
    return CODES[dtype]


def check_tensor(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of a tensor that can be written. Raises `CheckpointError` for one that cannot."""
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise CheckpointError(f"tensor name {name!r}: a name is a non-empty text other than '__metadata__'")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{name} is a {type(tensor).__name__}: only tensors are stored, put the rest into meta")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise CheckpointError(f"{name} is {tensor.layout} on {tensor.device}: only dense tensors with data can be")
    return TensorSpec(name, tuple(tensor.shape), dtype_code(name, tensor.dtype))


def write_file(
    path: Path, specs: Sequence[TensorSpec], get: Callable[[TensorSpec], Tensor]
) -> tuple[int, dict[str, int]]:
    """Writes and fsyncs a safetensors file; `get` is asked for each tensor once, in the order of `specs`.

    Returns the file's size and each tensor's CRC-32. Raises `OSError` as the disk does, and leaves no file then.
    """
    header: dict[str, object] = {}
    end = 0
    for spec in specs:
        begin, end = end, end + num_bytes_of(spec.shape, DTYPES[spec.dtype])
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "strict")
    text += b" " * (-len(text) % 8)
    sums: dict[str, int] = {}
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in specs:
                data = as_bytes(get(spec))
                sums[spec.name] = zlib.crc32(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return 8 + len(text) + end, sums


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's elements in order."""
    return zlib.crc32(as_bytes(tensor))


def by_alignment(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Widest elements first, then by name, so that every tensor begins at a multiple of its element's size."""
    return sorted(specs, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name))


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride and count as contiguous
    return flat.view(torch.uint8).numpy().data
