"""What a checkpoint holds, and reading it: any tensors, whole, whichever processes wrote them.

The manifest says which file holds which part of each tensor, and has a checksum of every part:

    {"format": "penstock-checkpoint", "version": 4, "crc32": ..., "manifest": {
        "step": 100, "meta": {...},
        "files": {"__0_0.distcp": <bytes>, ".metadata": <bytes>, ...},
        "tensors": {"model/layers.0.weight": {"dtype": "float32", "shape": [8, 4], "chunks": [
            {"file": "__0_0.distcp", "offset": <of the elements>, "begin": [0, 0], "shape": [4, 4],
             "crc32": <of the elements>}, ...]}, ...}}}

A whole tensor has one chunk. A tensor of which processes hold shards has a chunk for each shard. The checksum beside
the manifest is of its compact JSON, so a changed byte anywhere in it is found.

The reader unpickles neither `.metadata` nor what is around the elements of a tensor in the other files. It reads the
elements from the places that the manifest gives, and compares their checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError, DamagedCheckpointError, listed
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.pytree import DTYPES

JSON = Any

FORMAT = "penstock-checkpoint"
VERSION = 4
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,18})(\.old)?", re.ASCII)
"""The name of a checkpoint's folder."""
Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where its elements lie on the disk, where it begins in the tensor, and its shape."""

    file: str
    offset: int
    begin: Sequence[int]
    shape: Sequence[int]
    crc32: int


@dataclass(frozen=True)
class TensorEntry:
    """What a tensor is, and its chunks. `dtype` is its name in torch."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def kind(self) -> Kind:
        return self.shape, DTYPES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """The content of a `manifest.json`. `files` has the size of each file."""

    step: int
    meta: JSON
    files: dict[str, int]
    tensors: dict[str, TensorEntry]

    def save(self, path: Path) -> None:
        """Writes and syncs the file. Raises `OSError` as the disk does."""
        inner = _compact(asdict(self))
        head = f'"format":"{FORMAT}","version":{VERSION},"crc32":{zlib.crc32(inner)}'
        with open(path, "wb") as file:
            file.write(b'{%s,\n"manifest":%s}\n' % (head.encode(), inner))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path, content: bytes) -> Manifest:
        """Reads the content of a manifest.

        A manifest with the right checksum is one that `save` wrote, so nothing in it is checked.

        Raises:
            DamagedCheckpointError: the checksum does not match.
            CheckpointError: the checkpoint is whole, and in a format that this release does not read.
        """
        try:
            value = json.loads(content)
            inner = value["manifest"]
            is_whole = (value["format"], value["crc32"]) == (FORMAT, zlib.crc32(_compact(inner)))
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise DamagedCheckpointError(f"{path} is damaged: its checksum does not match")
        if (version := value["version"]) != VERSION:
            raise CheckpointError(
                f"{path.parent} has format version {version}, and this release of penstock reads {VERSION}: load it "
                "with the release that wrote it"
            )
        tensors = {
            name: TensorEntry(each["dtype"], tuple(each["shape"]), tuple(Chunk(**chunk) for chunk in each["chunks"]))
            for name, each in inner["tensors"].items()
        }
        return cls(inner["step"], inner["meta"], inner["files"], tensors)


def _compact(value: JSON) -> bytes:
    """The JSON that checksums are taken of. Loading and writing it again gives the same bytes."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


class TensorSource(Protocol):
    """Where state is loaded from: a checkpoint, or another pipeline. `path` is its name in errors."""

    meta: JSON

    @property
    def path(self) -> Path | str: ...

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, each with memory of its own."""


class Reader:
    """A checkpoint's manifest, and its tensors on demand. Only files that are needed are opened.

    Attributes:
        digest: the same for the same manifest, which has every tensor's checksum.

    Raises `CheckpointError` when the folder is no checkpoint, is of another format, or its manifest is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / MANIFEST
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self.path} is not a checkpoint: it has no {MANIFEST} that can be read ({error.strerror or error})"
            ) from None
        manifest = Manifest.read(file, content)
        self.step, self.meta, self._files = manifest.step, manifest.meta, manifest.files
        if (step := STEP.fullmatch(self.path.name)) is not None and int(step[1]) != self.step:
            raise DamagedCheckpointError(f"{file} is of step {self.step}, and its folder of another")
        self.digest = hashlib.sha256(content).hexdigest()
        self._tensors = manifest.tensors

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._tensors)

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Calls everything of a parameter that was stored under another of its names by the name that it has here.

        Args:
            aliases: by other name, the name that a parameter or a buffer has here.
        """
        there = self._tensors
        known = {
            other: name
            for other, name in aliases.items()
            if f"model/{other}" in there and f"model/{name}" not in there
        }
        self._tensors = {renamed(name, known): entry for name, entry in there.items()}
        rename_members(self.meta.get("optimizer"), known)

    def kinds(self, prefix: str) -> dict[str, Kind]:
        """Shape and type of the tensors whose names begin with a prefix."""
        return {name: entry.kind for name, entry in self._tensors.items() if name.startswith(prefix)}

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, on the CPU, each with memory of its own.

        Raises `CheckpointError` for an unknown name, a missing or truncated file, and bytes that have changed.
        """
        return dict(self.iterate(names))

    def iterate(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Like `load`, one at a time, in the order in which they lie on the disk."""
        wanted = list(names)
        if unknown := [name for name in wanted if name not in self._tensors]:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {unknown[0]!r}")
        entries = [(name, self._tensors[name]) for name in wanted]
        for name, entry in sorted(entries, key=lambda item: [(c.file, c.offset) for c in item[1].chunks]):
            yield name, self._tensor(name, entry)

    def require_complete(self) -> None:
        """Raises `CheckpointError` for a file that is not there, or of another size."""
        for file in self._files:
            self._require_size(file)

    def verify(self) -> None:
        """Reads everything, a tensor at a time. Raises `CheckpointError` for what is not as it was written."""
        self.require_complete()
        for _ in self.iterate(self._tensors):
            pass

    def _tensor(self, name: str, entry: TensorEntry) -> Tensor:
        shape, dtype = entry.kind
        if len(entry.chunks) == 1:
            return self._part(name, entry.chunks[0], dtype)
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        for chunk in entry.chunks:
            place = whole
            for dim, (begin, size) in enumerate(zip(chunk.begin, chunk.shape, strict=True)):
                place = place.narrow(dim, begin, size)
            place.copy_(self._part(name, chunk, dtype))
        return whole

    def _part(self, name: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        self._require_size(chunk.file)
        part = torch.empty(chunk.shape, dtype=dtype, device="cpu")
        memory = bytes_of(part)
        path = self.path / chunk.file
        with open(path, "rb") as file:
            file.seek(chunk.offset)
            num_read = file.readinto(memory) if memory else 0
        if num_read != part.nbytes or zlib.crc32(memory) != chunk.crc32:
            raise DamagedCheckpointError(f"{name} in {path} is not what was written: its checksum differs")
        return part

    def _require_size(self, file: str) -> None:
        path, size = self.path / file, self._files[file]
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DamagedCheckpointError(f"{path} is missing ({error.strerror or error}): copy it there") from None
        if found != size:
            raise DamagedCheckpointError(
                f"{path} has {found} bytes, the manifest says {size}: it is truncated or was replaced"
            )


def renamed(name: str, aliases: Mapping[str, str]) -> str:
    """A name in a checkpoint, with the name that its parameter has here."""
    return "/".join(aliases.get(part, part) for part in name.split("/"))


def rename_members(optimizer: JSON, aliases: Mapping[str, str]) -> None:
    """The same for the parameters of each group in the meta of an optimizer, if there is one."""
    for group in () if optimizer is None else optimizer["groups"]:
        group["members"] = [aliases.get(name, name) for name in group["members"]]


def match(reader: Reader, expected: Mapping[str, Kind], prefix: str) -> None:
    """Compares a checkpoint's names, shapes and types with those expected, where they begin with `prefix`.

    Raises `CheckpointError` that lists the first few missing, unexpected and different names.
    """
    wanted = {name: kind for name, kind in expected.items() if name.startswith(prefix)}
    held = reader.kinds(prefix)
    both = wanted.keys() & held.keys()
    differences = {
        "missing": sorted(wanted.keys() - both),
        "unexpected": sorted(held.keys() - both),
        "of another shape or type": [
            f"{name} {held[name]} here, {wanted[name]} wanted" for name in sorted(both) if held[name] != wanted[name]
        ],
    }
    if any(differences.values()):
        words = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in differences.items() if names)
        raise CheckpointError(
            f"checkpoint {reader.path} is of another model ({len(held)} tensors, {len(wanted)} wanted): build the "
            f"model it was written with, or choose another checkpoint\n{words}"
        )
