"""The files of a checkpoint: shards, and the index that says which shard holds which tensor.

A shard is a safetensors file, written tensor by tensor, with a checksum of each:

    <u64 header length> <JSON header, padded with spaces> <the tensors' bytes, without gaps>

It is written here and not by `safetensors.torch.save_file`, because that wants every tensor contiguous, unshared
and in memory at once, and gives no checksum. Here a tied, strided or CUDA tensor is copied when its turn comes.
safetensors has no code for complex128. A shard has such a tensor as F64 with a last dimension of 2, its two parts,
and the header's metadata lists its name under "complex128". The index has its own shape, and C128.

The index, `index.json`, says also what each tensor must look like:

    {"format": "penstock-checkpoint", "version": 2, "crc32": ..., "index": {
        "step": 100, "meta": {...},
        "shards": {"rank-00000.safetensors": <bytes>, ...},
        "tensors": {"model/layers.0.weight": {"shard": ..., "shape": [...], "dtype": "F32", "crc32": ...}, ...}}}

The checksum is of the inner value's compact JSON, so a changed byte anywhere in it is found. Version 1 had no extra
state of modules, no buffers beside those of a state dict and no state of the caller's.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.formats.native import without_repeats
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError
from penstock.runtime.tensors.digest import bytes_of

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
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The codes of safetensors, and C128."""
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
    """The code of a dtype. Raises `CheckpointError` for one that has none."""
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
    Raises `CheckpointError` for more names than can be read again.
    """
    header: dict[str, object] = {}
    if pairs := [spec.name for spec in specs if spec.dtype == "C128"]:
        header["__metadata__"] = {"complex128": json.dumps(pairs)}
    end = 0
    for spec in specs:
        begin, end = end, end + num_bytes_of(spec.shape, DTYPES[spec.dtype])
        dtype, shape = ("F64", [*spec.shape, 2]) if spec.dtype == "C128" else (spec.dtype, list(spec.shape))
        header[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "strict")
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER:
        raise CheckpointError(
            f"{path.name} would have {len(specs)} tensors, whose names and shapes take {len(text)} bytes; "
            f"safetensors reads up to {MOST_HEADER}: put many small tensors together"
        )
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
    return bytes_of(flat.view(torch.uint8))


JSON = Any

FORMAT = "penstock-checkpoint"
VERSION = 2
INDEX = "index.json"
SHARD = re.compile(r"rank-\d{5,}\.safetensors", re.ASCII)
STEP = re.compile(r"step-(\d{8,18})(\.old)?", re.ASCII)
"""The name of a checkpoint's folder."""
LARGEST_STEP = 10**18 - 1
MOST = 2**63 - 1
MOST_DIMENSIONS = 64
MOST_HEADER = 100_000_000
"""Bytes of a header that the `safetensors` package reads."""
SHOWN = 60


class NewerVersion(CheckpointError):
    """The checkpoint is of a later format: whole, but not for this release."""


class IndexEntry(NamedTuple):
    """Where one tensor lies and what it is; `dtype` is safetensors' code."""

    shard: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int


@dataclass(frozen=True)
class Index:
    """The content of one `index.json`."""

    step: int
    meta: JSON
    shards: dict[str, int]
    tensors: dict[str, IndexEntry]
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Writes and fsyncs the index file. Raises `OSError` as the disk does."""
        tensors = {
            name: {"shard": entry.shard, "shape": list(entry.shape), "dtype": entry.dtype, "crc32": entry.crc32}
            for name, entry in self.tensors.items()
        }
        inner = compact({"step": self.step, "meta": self.meta, "shards": self.shards, "tensors": tensors})
        head = f'"format":"{FORMAT}","version":{VERSION},"crc32":{_sum(inner)}'
        with open(path, "w", encoding="ascii") as file:
            file.write(f'{{{head},\n"index":{inner}}}\n')
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path, content: bytes) -> Index:
        """Reads and checks the content of an index file.

        Raises `CheckpointError`; `DamagedCheckpointError` for one that is not as it was written, `NewerVersion` for a
        later format.
        """
        try:
            value = json.loads(content.decode("utf-8"), object_pairs_hook=without_repeats)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path} is damaged: not JSON ({error})") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise DamagedCheckpointError(
                f"{path} is not the index of a checkpoint: its format is {_short(found)}, not {FORMAT!r}"
            )
        version = value.get("version")
        if type(version) is int and version > VERSION:
            raise NewerVersion(
                f"{path.parent} has format version {version}; this release reads up to {VERSION}: upgrade penstock"
            )
        inner = value.get("index")
        if type(version) is not int or version < 1:
            raise DamagedCheckpointError(f"{path} is damaged: its format version is {_short(version)}")
        try:
            whole = _sum(compact(inner)) == value.get("crc32")
        except (RecursionError, ValueError):
            whole = False
        if not whole:
            raise DamagedCheckpointError(f"{path} is damaged: its checksum does not match")
        try:
            return cls._parse(inner, version)
        except _MalformedIndex as error:
            raise DamagedCheckpointError(f"{path} is malformed: {error}") from None

    @classmethod
    def _parse(cls, inner: JSON, version: int) -> Index:
        index = _dict(inner, "its index")
        for part in ("step", "meta", "shards", "tensors"):
            if part not in index:
                raise _MalformedIndex(f"it has no {part}")
        step = _count(index["step"], "step")
        shards = {
            name: _count(size, f"the size of {name}") for name, size in _dict(index["shards"], "shards").items()
        }
        for name in shards:
            if not SHARD.fullmatch(name):
                raise _MalformedIndex(f"{_short(name)} is no name of a shard")
        tensors = {name: _entry(name, entry, shards) for name, entry in _dict(index["tensors"], "tensors").items()}
        taken = dict.fromkeys(shards, 0)
        for entry in tensors.values():
            taken[entry.shard] += num_bytes_of(entry.shape, DTYPES[entry.dtype])
        for name, size in shards.items():
            if taken[name] > size:
                raise _MalformedIndex(f"tensors of {taken[name]} bytes are to lie in {name}, which has {size}")
        return cls(step, index["meta"], shards, tensors, version)


class _MalformedIndex(Exception):
    """What an index says that cannot be."""


def _entry(name: str, value: JSON, shards: Mapping[str, int]) -> IndexEntry:
    if not name or name == "__metadata__":
        raise _MalformedIndex(f"{name!r} is no name of a tensor")
    what = _short(name)
    fields = _dict(value, what)
    for field in IndexEntry._fields:
        if field not in fields:
            raise _MalformedIndex(f"{what} has no {field}")
    shard, shape, dtype = fields["shard"], fields["shape"], fields["dtype"]
    if not isinstance(shard, str) or shard not in shards:
        raise _MalformedIndex(f"{what} lies in {_short(shard)}, which is not listed")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _MalformedIndex(f"{what} has the unknown dtype {_short(dtype)}")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise _MalformedIndex(f"{what} has the shape {_short(shape)}")
    sizes = tuple(_count(size, f"a size of {what}") for size in shape)
    crc32 = _count(fields["crc32"], f"the checksum of {what}")
    return IndexEntry(shard, sizes, dtype, crc32)


def _dict(value: JSON, what: str) -> dict[str, JSON]:
    if not isinstance(value, dict):
        raise _MalformedIndex(f"{what} is {_short(value)}, not an object")
    return value


def _count(value: JSON, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise _MalformedIndex(f"{what} is {_short(value)}, which is no count")
    return value


def _short(value: JSON) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) or len(value) < SHOWN else f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def read_regular(path: Path) -> bytes:
    """What a file holds. Raises `CheckpointError` for one that is not there, cannot be read, or is no plain file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DamagedCheckpointError(f"{path} is no plain file")
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def shard_name(rank: int) -> str:
    """The file a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def compact(value: JSON) -> str:
    """The JSON text that checksums are taken of; loading and writing it again gives the same text."""
    return json.dumps(value, separators=(",", ":"))


def _sum(text: str) -> int:
    return zlib.crc32(text.encode("ascii"))
