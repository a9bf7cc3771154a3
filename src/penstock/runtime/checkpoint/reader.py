"""Reading a checkpoint: any names, from whichever shards hold them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.index import INDEX, JSON, Entry, Index
from penstock.runtime.checkpoint.shard import DTYPES, checksum

__all__ = ["Reader", "Source"]


class Source(Protocol):
    """Where state is loaded from: a checkpoint, or another pipeline."""

    meta: JSON

    @property
    def path(self) -> Path | str:
        """Its name in errors."""

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, each with memory of its own."""


class Reader:
    """A checkpoint's index, and its tensors on demand; only the shards that are needed are opened.

    Raises `CheckpointError` when the folder is no checkpoint, is of a newer format, or its index is damaged.
    """

    path: Path
    step: int
    meta: JSON

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._index = Index.load(self.path / INDEX)
        self.step, self.meta = self._index.step, self._index.meta

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._index.tensors)

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
        """Like `load`, one at a time; a shard is open while the names that follow lie in it."""
        for shard, members in itertools.groupby(names, key=lambda name: self._entry(name).shard):
            yield from self._read(self.path / shard, members)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """The names, each once, so that `iterate` opens every shard once."""
        return sorted(set(names), key=lambda name: (self._entry(name).shard, name))

    def _entry(self, name: str) -> Entry:
        try:
            return self._index.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"checkpoint {self.path} has no tensor {name!r}; it has {len(self._index.tensors)} others"
            ) from None

    def _read(self, path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        self._check_size(path)
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"shard {path} is damaged: {error}. Use an older checkpoint") from error
        with file:
            for name in names:
                yield name, self._tensor(file, path, name)

    def _tensor(self, file: safe_open, path: Path, name: str) -> Tensor:
        entry = self._entry(name)
        try:
            tensor = file.get_tensor(name).clone()
        except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{name} in shard {path} is damaged: {error}. Use an older checkpoint") from error
        if (
            tuple(tensor.shape) != entry.shape
            or tensor.dtype != DTYPES[entry.dtype]
            or checksum(tensor) != entry.crc32
        ):
            raise CheckpointError(
                f"{name} in shard {path} is not what was written: its checksum differs. Use an older checkpoint"
            )
        return tensor

    def _check_size(self, path: Path) -> None:
        expected = self._index.shards[path.name]
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"shard {path} is missing: copy it there, or use an older checkpoint") from None
        except OSError as error:
            raise CheckpointError(f"shard {path} cannot be read: {error.strerror or error}") from error
        if size != expected:
            raise CheckpointError(
                f"shard {path} has {size} bytes, the index says {expected}: it is truncated or was replaced. "
                "Use an older checkpoint"
            )
