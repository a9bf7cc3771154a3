"""A folder of checkpoints: the names in it, the renames that keep a complete one there, and reading one.

    step-00000100             complete: appears by one rename, vanishes by one rename
    step-00000100.old         complete too, seen only for the moment in which step 100 is replaced by a new one
    step-00000100.damaged     set aside when an older one was loaded in its place
    .step-00000200.writing    not yet complete
    .step-00000050.deleting   no longer complete

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

import contextlib
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.errors import CheckpointError, DamagedCheckpointError, listed
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.pytree import DTYPES

JSON = Any

FORMAT = "penstock-checkpoint"
VERSION = 4
MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})(\.old)?", re.ASCII)
"""The name of a checkpoint's folder."""
REMAINS = re.compile(r"\.step-\d{8,}(\.old)?\.(writing|deleting)", re.ASCII)
Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


def write_manifest(path: Path, manifest: JSON) -> None:
    """Writes and syncs a `manifest.json`. Raises `OSError` as the disk does."""
    inner = _compact(manifest)
    head = f'"format":"{FORMAT}","version":{VERSION},"crc32":{zlib.crc32(inner)}'
    with open(path, "wb") as file:
        file.write(b'{%s,\n"manifest":%s}\n' % (head.encode(), inner))
        file.flush()
        os.fsync(file.fileno())


def _manifest_of(path: Path, content: bytes) -> JSON:
    """What is in a `manifest.json`. One with the right checksum is as we wrote it, so nothing in it is checked.

    Raises:
        DamagedCheckpointError: the checksum does not match.
        CheckpointError: the checkpoint is whole, and in a format that this release does not read.
    """
    try:
        value = json.loads(content)
        is_whole = (value["format"], value["crc32"]) == (FORMAT, zlib.crc32(_compact(value["manifest"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum does not match")
    if (version := value["version"]) != VERSION:
        raise CheckpointError(
            f"{path.parent} has format version {version}, and this release of penstock reads {VERSION}: load it with "
            "the release that wrote it"
        )
    return value["manifest"]


def _compact(value: JSON) -> bytes:
    """The JSON that checksums are taken of. Loading and writing it again gives the same bytes."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


class Reader(Mapping[str, Tensor]):
    """A checkpoint's manifest, and its tensors on demand. Only files that are needed are opened.

    A tensor comes on the CPU, with memory of its own each time it is asked for.

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
        manifest = _manifest_of(file, content)
        self.step, self.meta, self._files = manifest["step"], manifest["meta"], manifest["files"]
        if (step := STEP.fullmatch(self.path.name)) is not None and int(step[1]) != self.step:
            raise DamagedCheckpointError(f"{file} is of step {self.step}, and its folder of another")
        self.digest = hashlib.sha256(content).hexdigest()
        self._tensors: dict[str, JSON] = manifest["tensors"]

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # the base class would read the tensor

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor. Raises `CheckpointError` for a missing or truncated file, and bytes that have changed."""
        entry = self._tensors[name]
        (shape, dtype), chunks = _kind(entry), entry["chunks"]
        if len(chunks) == 1:
            return self._part(name, chunks[0], dtype)
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        for chunk in chunks:
            place = whole
            for dim, (begin, size) in enumerate(zip(chunk["begin"], chunk["shape"], strict=True)):
                place = place.narrow(dim, begin, size)
            place.copy_(self._part(name, chunk, dtype))
        return whole

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
        return {name: _kind(entry) for name, entry in self._tensors.items() if name.startswith(prefix)}

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name. Raises `CheckpointError` as for one, and for an unknown name."""
        wanted = list(names)
        if unknown := [name for name in wanted if name not in self]:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {unknown[0]!r}")
        return {name: self[name] for name in wanted}

    def require_complete(self) -> None:
        """Raises `CheckpointError` for a file that is not there, or of another size."""
        for file in self._files:
            self._require_size(file)

    def _part(self, name: str, chunk: JSON, dtype: torch.dtype) -> Tensor:
        self._require_size(chunk["file"])
        part = torch.empty(chunk["shape"], dtype=dtype, device="cpu")
        memory = bytes_of(part)
        path = self.path / chunk["file"]
        with open(path, "rb") as file:
            file.seek(chunk["offset"])
            num_read = file.readinto(memory) if memory else 0
        if num_read != part.nbytes or zlib.crc32(memory) != chunk["crc32"]:
            raise DamagedCheckpointError(f"{name} in {path} is not what was written: its checksum differs")
        return part

    def _require_size(self, file: str) -> None:
        path = self.path / file
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing: copy it there")
        if (size := path.stat().st_size) != self._files[file]:
            raise DamagedCheckpointError(f"{path} has {size} bytes, the manifest says {self._files[file]}")


def _kind(entry: JSON) -> Kind:
    return tuple(entry["shape"]), DTYPES[entry["dtype"]]


def renamed(name: str, aliases: Mapping[str, str]) -> str:
    """A name in a checkpoint, with the name that its parameter has here."""
    return "/".join(aliases.get(part, part) for part in name.split("/"))


def rename_members(optimizer: JSON, aliases: Mapping[str, str]) -> None:
    """The same for the parameters of each group in the meta of an optimizer, if there is one."""
    for group in () if optimizer is None else optimizer["groups"]:
        group["members"] = [aliases.get(name, name) for name in group["members"]]


def match(what: str, there: Mapping[str, Kind], here: Mapping[str, Kind]) -> None:
    """Compares the shapes and types of a model's tensors in a checkpoint with those of the model here.

    Raises `CheckpointError` with the first few names that are missing, unexpected or different.
    """
    if other := sorted(name for name in {**there, **here} if there.get(name) != here.get(name)):
        said = [f"{name} is {there.get(name)} there and {here.get(name)} here" for name in other]
        raise CheckpointError(
            f"{what} is of another model: build the model it was written with, or choose another "
            f"checkpoint\n{listed(said)}"
        )


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint in a folder, None without one; a folder that is a checkpoint is its own.

    Temporaries and half-deleted ones do not count. One that is damaged does, as does one of another format: to go
    back in time silently would be worse than the error that its `Reader` raises. Raises `CheckpointError` for a
    folder that cannot be read.
    """
    return next(iter(candidates(directory)), None)


def candidates(directory: str | Path) -> list[Path]:
    """The checkpoint meant by a path and the older ones beside it, or all in a folder; the newest first."""
    path = Path(directory)
    try:
        if STEP.fullmatch(path.name) and path.is_dir():
            beside = _newest_first(path.parent)
            return beside[[each.name for each in beside].index(path.name) :]
        if (path / MANIFEST).exists():
            return [path]
        return _newest_first(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def complete(path: Path) -> bool:
    """Whether the manifest can be read and every file that it lists is there with its full size.

    So is a checkpoint of a format that this release does not read.
    """
    try:
        Reader(path).require_complete()
    except DamagedCheckpointError:
        return False
    except CheckpointError:
        pass
    return True


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is there to look at and counts no more. Raises `OSError`."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    sync(path.parent)
    return aside


def commit(temporary: Path, target: Path) -> None:
    """Makes a written temporary the checkpoint of its step; one that was there goes once the new one is in place."""
    sync(temporary)
    old = target.with_name(target.name + ".old")
    if target.exists() and old.exists() and not complete(target):
        remove(target)
    elif target.exists():
        remove(old)
        os.rename(target, old)
    os.rename(temporary, target)
    sync(target.parent)
    remove(old)


def prune(directory: Path, keep: int, current: Path) -> None:
    """Removes all but the newest `keep` complete checkpoints, never `current`, and what earlier kills left.

    What the disk refuses to remove stays, and is tried again after the next save.
    """
    for entry in list(directory.iterdir()):
        if REMAINS.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    others = [path for path in _newest_first(directory) if path != current and complete(path)]
    for path in others[keep - 1 :]:
        with contextlib.suppress(OSError):
            remove(path)


def remove(path: Path) -> None:
    """Deletes a folder so that it is never seen half-deleted under its own name. Does nothing where there is none."""
    if not path.name.startswith(".") and path.exists():
        hidden = path.with_name(f".{path.name}.deleting")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _newest_first(directory: Path) -> list[Path]:
    """Every folder named like a checkpoint; a replaced one comes after its successor."""
    found = [(STEP.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir()]
    named = [(int(name[1]), name[2] is None, path) for name, path in found if name is not None]
    return [path for _, _, path in sorted(named, reverse=True)]
