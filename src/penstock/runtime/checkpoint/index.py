"""`index.json`: which shard holds which tensor, and what each must look like.

    {"format": "penstock-checkpoint", "version": 1, "crc32": ..., "index": {
        "step": 100, "meta": {...},
        "shards": {"rank-00000.safetensors": <bytes>, ...},
        "tensors": {"model/layers.0.weight": {"shard": ..., "shape": [...], "dtype": "F32", "crc32": ...}, ...}}}

The checksum is of the inner value's compact JSON, so a changed byte anywhere in it is found.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.shard import DTYPES

__all__ = ["INDEX", "JSON", "Entry", "Index", "compact", "shard_name"]

JSON = Any

FORMAT = "penstock-checkpoint"
VERSION = 1
INDEX = "index.json"
SHARD = re.compile(r"rank-\d{5,}\.safetensors")


class NewerVersion(CheckpointError):
    """The checkpoint is of a later format: whole, but not for this release."""


class Entry(NamedTuple):
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
    tensors: dict[str, Entry]

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
    def load(cls, path: Path) -> Index:
        """Reads and checks an index file. Raises `CheckpointError`, `NewerVersion` for a later format."""
        try:
            value = json.loads(path.read_bytes().decode("utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {INDEX}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: not JSON ({error}). Use an older checkpoint") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise CheckpointError(f"{path} is not the index of a checkpoint: its format is {found!r}, not {FORMAT!r}")
        version = value.get("version")
        if isinstance(version, int) and version > VERSION:
            raise NewerVersion(
                f"{path.parent} has format version {version}; this release reads up to {VERSION}: upgrade penstock"
            )
        inner = value.get("index")
        if version != VERSION or _sum(compact(inner)) != value.get("crc32"):
            raise CheckpointError(f"{path} is damaged: its checksum does not match. Use an older checkpoint")
        try:
            return cls._parse(inner)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is malformed: {type(error).__name__} {error}. Write it anew") from error

    @classmethod
    def _parse(cls, inner: JSON) -> Index:
        shards = {str(name): int(size) for name, size in inner["shards"].items()}
        tensors = {}
        for name, entry in inner["tensors"].items():
            tensors[name] = Entry(
                str(entry["shard"]), tuple(map(int, entry["shape"])), str(entry["dtype"]), int(entry["crc32"])
            )
            if entry["shard"] not in shards:
                raise ValueError(f"{name} lies in {entry['shard']!r}, which is not listed")
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
        for name in shards:
            if not SHARD.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a shard")
        return cls(int(inner["step"]), inner["meta"], shards, tensors)


def shard_name(rank: int) -> str:
    """The file a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def compact(value: JSON) -> str:
    """The JSON text that checksums are taken of; loading and writing it again gives the same text."""
    return json.dumps(value, separators=(",", ":"))


def _sum(text: str) -> int:
    return zlib.crc32(text.encode("ascii"))
