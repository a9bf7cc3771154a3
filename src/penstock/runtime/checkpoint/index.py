"""`index.json`: which shard holds which tensor, and what each must look like.

    {"format": "penstock-checkpoint", "version": 2, "crc32": ..., "index": {
        "step": 100, "meta": {...},
        "shards": {"rank-00000.safetensors": <bytes>, ...},
        "tensors": {"model/layers.0.weight": {"shard": ..., "shape": [...], "dtype": "F32", "crc32": ...}, ...}}}

The checksum is of the inner value's compact JSON, so a changed byte anywhere in it is found. Version 1 had no extra
state of modules, no buffers beside those of a state dict and no state of the caller's.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.formats.native import without_repeats
from penstock.runtime.checkpoint.shard import DTYPES, num_bytes_of
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError

__all__ = ["INDEX", "JSON", "STEP", "IndexEntry", "Index", "compact", "read_regular", "shard_name"]

JSON = Any

FORMAT = "penstock-checkpoint"
VERSION = 2
INDEX = "index.json"
SHARD = re.compile(r"rank-\d{5,}\.safetensors", re.ASCII)
STEP = re.compile(r"step-(\d{8,18})(\.old)?", re.ASCII)
"""The name of a checkpoint's folder."""
MOST = 2**63 - 1
MOST_DIMENSIONS = 64
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
