"""Writing a checkpoint: every rank its shard, rank 0 the index and the rename. And a model as one file for others."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from penstock.formats.files import replaced
from penstock.runtime.checkpoint import folder
from penstock.runtime.checkpoint.folder import sync
from penstock.runtime.checkpoint.format import (
    INDEX,
    JSON,
    LARGEST_STEP,
    Index,
    IndexEntry,
    TensorSpec,
    by_alignment,
    check_tensor,
    compact,
    dtype_code,
    shard_name,
    write_file,
)
from penstock.runtime.checkpoint.reader import Reader
from penstock.runtime.errors import CheckpointError
from penstock.runtime.tensors.dtensor import is_sharded, whole

UNWRITTEN = "could not be written"

T = TypeVar("T")


def write(
    directory: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: JSON,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    barrier: Callable[[], None] = lambda: None,
    keep: int = 2,
    helped: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes the checkpoint of a step and returns its folder, `directory/step-00000100`.

    Every rank calls it with the tensors it owns (plain names; tied, strided and 0-dim ones too), the same step and
    the same small JSON `meta`, of which rank 0's is written. A name given by two ranks must have the same content.
    `barrier` returns when all ranks have called it (three times a write; a failed rank comes to all three, so
    nobody waits for it). Afterwards the newest `keep` complete checkpoints stay.

    A tensor of which ranks have shards is gathered when its turn comes, one after the other by name, and then
    forgotten. The rank that owns it gives it among `tensors`, the others among `helped`.

    Raises `CheckpointError` on every rank when any rank fails (what cannot be stored, a full disk): the older
    checkpoints are then untouched and nothing half-written is left. What `barrier` raises passes through.
    """
    directory = Path(directory)
    target = folder.step_folder(directory, max(0, step))
    temporary = folder.temporary_folder(directory, max(0, step))
    failure = WriteFailure(f"checkpoint {target}")
    try:
        failure.attempt(lambda: _check(step, rank, num_ranks, keep, meta))
        if rank == 0:
            failure.attempt(lambda: folder.fresh(temporary))
        barrier()
        gathering = ShardGathering(tensors, helped or {})
        inode = failure.attempt(lambda: _write_shard(temporary, rank, gathering))
        gathering.rest()
        if failure.error:
            _tell(temporary, rank, failure.error)
        barrier()
        if rank == 0:
            failure.attempt(lambda: _write_index(temporary, step, meta, num_ranks))
            failure.attempt(lambda: folder.commit(temporary, target))
            if failure.error:
                folder.remove(temporary)
        barrier()
    except BaseException:
        if rank == 0:
            folder.remove(temporary)
        raise
    if rank != 0 and not failure.error and not _holds(target / shard_name(rank), inode):
        failure.error = CheckpointError(
            f"{failure.what} was not completed by rank 0; older checkpoints are untouched"
        )
    if failure.error:
        raise failure.error
    if rank == 0:
        try:
            folder.prune(directory, keep, target)
        except OSError as error:  # raised as an error that all ranks are told
            raise CheckpointError(
                f"{failure.what} was written, and then {directory} could not be read: {error.strerror or error}; "
                "see to it that nothing else removes or moves the folder"
            ) from error
    return target


class ShardGathering:
    """The tensors of this rank, whole and one after the other in the order of all ranks, those of others on the way.

    All ranks that have shards of a tensor must come to it, so one that cannot write goes through the rest as well.
    """

    def __init__(self, own: Mapping[str, Tensor], helped: Mapping[str, Tensor]) -> None:
        self.own = own
        self._all = {name: tensor for name, tensor in {**helped, **own}.items() if isinstance(tensor, Tensor)}
        self._order = iter(sorted(self._all, key=lambda name: (-self._all[name].dtype.itemsize, name)))

    def get(self, spec: TensorSpec) -> Tensor:
        """A tensor of this rank; asked for in the order of `by_alignment`."""
        return next(tensor for name, tensor in self._whole() if name == spec.name)

    def rest(self) -> None:
        """Helps with what has not been asked for."""
        for _ in self._whole():
            pass

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name in self._order:
                if name in self.own or is_sharded(self._all[name]):
                    yield name, whole(self._all[name].detach())
        except Exception:  # another rank is gone, and would be waited for again with every tensor
            self._order = iter(())
            raise


_MAKE_ROOM, _ELSEWHERE = "; make room there, or save to another folder", "; save to a folder that can be written to"
_WAYS: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _MAKE_ROOM),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR), _ELSEWHERE),
    errno.EFBIG: "; raise the limit of this process (ulimit -f) or of the file system",
    errno.EMFILE: "; raise the limit of this process (ulimit -n)",
}
"""What to do, by the disk's error."""


class WriteFailure:
    """The first error of this rank, kept until the last barrier is passed."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: CheckpointError | None = None

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Runs the action, unless one failed before it, and keeps its error instead of raising it."""
        if self.error:
            return None
        try:
            return action()
        except CheckpointError as error:
            self.error = error
        except Exception as error:  # whatever it is, the other ranks wait at the barrier
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
            way = _WAYS.get(getattr(error, "errno", None), "")
            self.error = CheckpointError(
                f"{self.what} {UNWRITTEN}: {reason}. Nothing of it is left; older ones are untouched{way}"
            )
            self.error.__cause__ = error
        return None


def _check(step: int, rank: int, num_ranks: int, keep: int, meta: JSON) -> None:
    if not 0 <= step <= LARGEST_STEP or keep < 1 or not 0 <= rank < num_ranks:
        raise CheckpointError(
            f"got step {step}, keep {keep}, rank {rank} of {num_ranks}: step is 0 or more, at most {LARGEST_STEP}, "
            "keep is 1 or more, rank below num_ranks"
        )
    try:
        for key in _keys(meta):
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r:.60} is of type {type(key).__name__}, and would come back as text")
        text = compact(meta)
        if compact(json.loads(text)) != text:
            raise ValueError("it reads back differently")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"meta must be plain JSON (dicts, lists, text, numbers): {error}") from None


def _keys(value: JSON) -> Iterator[object]:
    """Those of all dicts in a value."""
    if isinstance(value, dict):
        yield from value
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for each in value:
        yield from _keys(each)


def _write_shard(temporary: Path, rank: int, gathering: ShardGathering) -> int:
    """Writes this rank's shard and a note on it for rank 0; returns the shard's inode."""
    specs = by_alignment(check_tensor(name, tensor) for name, tensor in gathering.own.items())
    path = temporary / shard_name(rank)
    size, sums = write_file(path, specs, gathering.get)
    note = {"size": size, "tensors": [[spec.name, spec.shape, spec.dtype, sums[spec.name]] for spec in specs]}
    _note(temporary, rank).write_text(compact(note), encoding="ascii")
    return path.stat().st_ino


def _tell(temporary: Path, rank: int, error: CheckpointError) -> None:
    """Leaves rank 0 the reason, if the disk still takes it."""
    with contextlib.suppress(OSError):
        _note(temporary, rank).write_text(compact({"error": str(error)}), encoding="ascii")


def _write_index(temporary: Path, step: int, meta: JSON, num_ranks: int) -> None:
    shards: dict[str, int] = {}
    tensors: dict[str, IndexEntry] = {}
    for rank in range(num_ranks):
        shard = shard_name(rank)
        note = _read_note(temporary, rank)
        shards[shard] = note["size"]
        for name, shape, dtype, crc32 in note["tensors"]:
            entry = IndexEntry(shard, tuple(shape), dtype, crc32)
            first = tensors.setdefault(name, entry)
            if first[1:] != entry[1:]:
                raise CheckpointError(
                    f"{name} was given with different contents by {first.shard} and {shard}: "
                    "each tensor has one owner, or equal copies"
                )
    Index(step, meta, shards, tensors).save(temporary / INDEX)
    for rank in range(num_ranks):
        _note(temporary, rank).unlink()


def _read_note(temporary: Path, rank: int) -> JSON:
    try:
        note = json.loads(_note(temporary, rank).read_text(encoding="ascii"))
    except (OSError, ValueError):
        raise CheckpointError(
            f"rank {rank} left no shard in {temporary}: all ranks must write to one shared folder with space on it"
        ) from None
    if "error" in note:
        raise CheckpointError(f"rank {rank}: {note['error']}")
    return note


def _note(temporary: Path, rank: int) -> Path:
    return temporary / f"rank-{rank:05d}.json"


def _holds(path: Path, inode: int | None) -> bool:
    try:
        return os.stat(path).st_ino == inode
    except OSError:
        return False


MODEL = "model/"


def export(path: str | Path, source: Mapping[str, Tensor] | Reader) -> Path:
    """Writes one `.safetensors` file, beside and renamed, and returns its path.

    From a mapping its names are taken as they are; from a checkpoint's reader its `model/` tensors without that
    prefix, one at a time. Raises `CheckpointError` when there is nothing to write, a tensor cannot be stored or
    the disk refuses; a file of that name is then as it was.
    """
    path = Path(path)
    specs, tensors = _from_reader(source) if isinstance(source, Reader) else _from_mapping(source)
    if not specs:
        raise CheckpointError(f"{path} would be empty: there are no tensors named {MODEL}... to export")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as beside:
            write_file(beside, specs, lambda spec: next(tensors))
        sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}. It is as it was") from error
    return path


def _from_mapping(tensors: Mapping[str, Tensor]) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    specs = by_alignment(check_tensor(name, tensor) for name, tensor in tensors.items())
    return specs, (tensors[spec.name] for spec in specs)


def _from_reader(reader: Reader) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    names = reader.in_order(name for name in reader.names() if name.startswith(MODEL))
    names.sort(key=lambda name: -reader.dtype(name).itemsize)
    specs = [
        TensorSpec(name[len(MODEL) :], reader.shape(name), dtype_code(name, reader.dtype(name))) for name in names
    ]
    return specs, (tensor for _, tensor in reader.iterate(names))
