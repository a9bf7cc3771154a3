"""Reading a checkpoint: any names, from whichever shards hold them, if it is of the model that wants to read it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.runtime.checkpoint.codec import unpack
from penstock.runtime.checkpoint.format import DTYPES, INDEX, JSON, STEP, Index, IndexEntry, checksum, read_regular
from penstock.runtime.errors import CheckpointError, DamagedCheckpointError, listed

MOST_OPEN = 32
Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


class TensorSource(Protocol):
    """Where state is loaded from: a checkpoint, or another pipeline."""

    meta: JSON
    version: int

    @property
    def path(self) -> Path | str:
        """Its name in errors."""

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, each with memory of its own."""


def load_packed(source: TensorSource, base: str, names: Iterable[str], device: torch.device | None = None) -> Any:
    """The value that was packed under a base, from the tensors with these names; see `codec.unpack`.

    Raises `CheckpointError`.
    """
    tensors = source.load(names)
    try:
        return unpack(base, tensors, device)
    except ValueError as error:
        raise DamagedCheckpointError(f"checkpoint {source.path}: {error}") from None


class Reader:
    """A checkpoint's index, and its tensors on demand; only the shards that are needed are opened.

    Attributes:
        version: of the format. digest: the same for the same index, which has every tensor's checksum.

    Raises `CheckpointError` when the folder is no checkpoint, is of a newer format, or its index is damaged.
    """

    path: Path
    step: int
    meta: JSON

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        content = read_regular(self.path / INDEX)
        self._index = Index.read(self.path / INDEX, content)
        self.step, self.meta, self.version = self._index.step, self._index.meta, self._index.version
        if (step := STEP.fullmatch(self.path.name)) is not None and int(step[1]) != self.step:
            raise DamagedCheckpointError(f"{self.path / INDEX} is of step {self.step}, and its folder of another")
        self.digest = hashlib.sha256(content).hexdigest()
        self._names = sorted(self._index.tensors)
        self._stored_as: dict[str, str] = {}
        self._files: dict[str, safe_open] = {}

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return self._names

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Calls everything of a parameter that was stored under another of its names by the name that it has here.

        Args:
            aliases: by other name, the name that a parameter or a buffer has here.
        """
        there = self._index.tensors
        known = {
            other: name
            for other, name in aliases.items()
            if f"model/{other}" in there and f"model/{name}" not in there
        }
        self._stored_as = {new: name for name in there if (new := renamed(name, known)) != name}
        self._names = sorted((there.keys() - self._stored_as.values()) | self._stored_as.keys())
        if isinstance(self.meta, dict) and isinstance(optimizer := self.meta.get("optimizer"), dict):
            rename_members(optimizer, known)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. Raises `CheckpointError` for a name that is not there."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype. Raises `CheckpointError` for a name that is not there."""
        return DTYPES[self._entry(name).dtype]

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, on the CPU, each with memory of its own, in the order asked for.

        Raises `CheckpointError` for an unknown name, a missing or truncated shard, and bytes that have changed.
        """
        wanted = list(names)
        found = dict(self.iterate(self.in_order(wanted)))
        return {name: found[name] for name in wanted}

    def iterate(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Like `load`, one at a time."""
        for name in names:
            shard = self._entry(name).shard
            stored = self._stored_as.get(name, name)
            yield name, self._tensor(self._open(shard), self.path / shard, stored)

    def require_complete(self) -> None:
        """Raises `CheckpointError` for a shard that is not there, or of another size."""
        for shard, size in self._index.shards.items():
            if problem := problem_of(self.path / shard, size):
                raise DamagedCheckpointError(problem)

    def verify(self) -> None:
        """Reads everything, a tensor at a time. Raises `CheckpointError` for what is not as it was written."""
        for _ in self.iterate(self.in_order(self._names)):
            pass

    def in_order(self, names: Iterable[str]) -> list[str]:
        """The names, each once, so that `iterate` opens every shard once."""
        return sorted(set(names), key=lambda name: (self._entry(name).shard, name))

    def _entry(self, name: str) -> IndexEntry:
        try:
            return self._index.tensors[self._stored_as.get(name, name)]
        except KeyError:
            raise CheckpointError(
                f"checkpoint {self.path} has no tensor {name!r}; it has {len(self._index.tensors)} others"
            ) from None

    def _open(self, shard: str) -> safe_open:
        """A shard's file; those that were asked for last stay open, so that a header is not read for every tensor."""
        if (file := self._files.pop(shard, None)) is None:
            path = self.path / shard
            if problem := problem_of(path, self._index.shards[shard]):
                raise DamagedCheckpointError(problem)
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise DamagedCheckpointError(f"shard {path} is damaged: {error}") from error
        self._files[shard] = file
        if len(self._files) > MOST_OPEN:
            del self._files[next(iter(self._files))]
        return file

    def _tensor(self, file: safe_open, path: Path, name: str) -> Tensor:
        entry = self._entry(name)
        try:
            tensor = file.get_tensor(name).clone()
            tensor = torch.view_as_complex(tensor) if entry.dtype == "C128" else tensor
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
            raise DamagedCheckpointError(f"{name} in shard {path} is damaged: {error}") from error
        if (
            tuple(tensor.shape) != entry.shape
            or tensor.dtype != DTYPES[entry.dtype]
            or checksum(tensor) != entry.crc32
        ):
            raise DamagedCheckpointError(f"{name} in shard {path} is not what was written: its checksum differs")
        return tensor


def problem_of(path: Path, size: int) -> str | None:
    """What is wrong with a shard, as far as its size tells; None where nothing is."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"shard {path} is missing: copy it there"
    except OSError as error:
        return f"shard {path} cannot be read: {error.strerror or error}"
    if not stat.S_ISREG(found.st_mode):
        return f"shard {path} is no plain file"
    if found.st_size != size:
        return f"shard {path} has {found.st_size} bytes, the index says {size}: it is truncated or was replaced"
    return None


def renamed(name: str, aliases: Mapping[str, str]) -> str:
    """A name in a checkpoint, with the name that its parameter has here."""
    return "/".join(aliases.get(part, part) for part in name.split("/"))


def rename_members(optimizer: JSON, aliases: Mapping[str, str]) -> None:
    """The same of the parameters of each group, in the meta of an optimizer."""
    for one in (optimizer, *optimizer.get("inside", {}).values()):
        for members in one.get("members", ()):
            members[:] = [aliases.get(name, name) for name in members]


def match(reader: Reader, expected: Mapping[str, Kind], *, prefix: str = "") -> None:
    """Compares a checkpoint's names, shapes and types with those expected, where they begin with `prefix`.

    Raises `CheckpointError` that lists the first few missing, unexpected and different names.
    """
    wanted = {name: kind for name, kind in expected.items() if name.startswith(prefix)}
    held = {name: (reader.shape(name), reader.dtype(name)) for name in reader.names() if name.startswith(prefix)}

    def differing(place: int) -> list[str]:
        return [
            f"{name} {held[name][place]} here, {kind[place]} wanted"
            for name, kind in wanted.items()
            if name in held and held[name][place] != kind[place]
        ]

    differences = [
        _list("missing", [name for name in wanted if name not in held]),
        _list("unexpected", [name for name in held if name not in wanted]),
        _list("of another shape", differing(0)),
        _list("of another type", differing(1)),
    ]
    if any(differences):
        raise CheckpointError(
            f"checkpoint {reader.path} is of another model ({len(held)} tensors, {len(wanted)} wanted): build the "
            f"model it was written with, or choose another checkpoint\n{'; '.join(filter(None, differences))}"
        )


def _list(what: str, names: list[str]) -> str:
    return f"{len(names)} {what}: {listed(names)}" if names else ""
