"""Writing a checkpoint with torch.distributed.checkpoint (DCP).

DCP's own `save` plans, writes and commits by collectives of its own, which know neither our deadlines nor our way of
failing. Here the same steps of its planner and its writer run between calls of `together`:

    every process   a plan: which tensors, and which shards of tensors, it could write
                    -- together: everyone's plan --
    every process   the same global plan, in which each part has one writer
    every process   its file `__<process>_0.distcp`, with a checksum of each part
                    -- together: where all parts lie --
    process 0       `.metadata` for DCP's readers, `manifest.json` for ours, and the rename
                    -- together: it is there --

Only a save imports this module, as DCP takes a fifth of a second to import.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from penstock.runtime.checkpoint import folder
from penstock.runtime.checkpoint.reader import JSON, MANIFEST, Chunk, Manifest, TensorEntry
from penstock.runtime.checkpoint.together import UNWRITTEN, together
from penstock.runtime.errors import CheckpointError
from penstock.runtime.mesh.peers import LocalPeers, Peers
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.dtensor import is_sharded, placements_of, whole

_ELEMENTS = b"archive/data/0"


class ProcessPlan(NamedTuple):
    """What a process could write of a checkpoint.

    Attributes:
        plan: by DCP's keys. names: by key the name of a tensor. owned: keys of tensors that this process answers for.
        holders: by key of a sharded tensor the processes that hold shards of it.
    """

    plan: SavePlan
    names: dict[str, str]
    owned: set[str]
    holders: dict[str, tuple[int, ...]]


class WrittenFile(NamedTuple):
    """What a process has written: for DCP's metadata, and for the manifest."""

    results: list[WriteResult]
    chunks: dict[MetadataIndex, Chunk]


class CheckedPlanner(DefaultSavePlanner):
    """DCP's planner, which takes a checksum of each part as the part is written."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[MetadataIndex, int] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor = cast(Tensor, super().resolve_data(write_item))
        part = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        self.checksums[write_item.index] = zlib.crc32(bytes_of(part))
        return part


def write(
    directory: str | Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: JSON,
    *,
    peers: Peers | None = None,
    keep: int = 2,
    shards: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes the checkpoint of a step and returns its folder, `directory/step-00000100`.

    Every process calls it with the tensors it owns (plain names; tied, strided and 0-dim ones too), the same step and
    the same small JSON `meta`, of which process 0's is written. Afterwards the newest `keep` complete ones stay.

    Args:
        shards: tensors that another process owns, and of which this one holds a shard.

    Raises:
        CheckpointError: on every process, when any of them fails (what cannot be stored, a full disk). The older
            checkpoints are then untouched and nothing half-written is left. What `peers` raises passes through.
    """
    peers = LocalPeers(1) if peers is None else peers
    me, directory = peers.here[0], Path(directory)
    target, temporary = directory / f"step-{step:08d}", directory / f".step-{step:08d}.writing"
    planner, writer = CheckedPlanner(), FileSystemWriter(temporary)

    def plan() -> ProcessPlan:
        mine = _plan(planner, tensors, shards or {})
        if me == 0:
            folder.fresh(temporary)
        return mine

    def write_parts() -> WrittenFile:
        plans, _ = planner.create_global_plan(_chosen(plans_of_all))
        mine = planner.finish_plan(writer.prepare_global_plan(plans)[me])
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined] # no reader compares that one
            results = writer.write_data(mine, planner).wait()
        return WrittenFile(results, _chunks(temporary, mine, results, planner.checksums))

    def complete() -> None:
        if me == 0:
            writer.finish(planner.metadata, [each.results for each in written])
            _manifest(temporary, step, meta, plans_of_all, written).save(temporary / MANIFEST)
            folder.commit(temporary, target)
            folder.prune(directory, keep, target)

    what = f"checkpoint {target} {UNWRITTEN}"
    try:
        plans_of_all = together(peers, plan, what)
        written = together(peers, write_parts, what)
        together(peers, complete, what)
    except BaseException as error:
        if me == 0:
            folder.remove(temporary)
        if isinstance(error, CheckpointError):  # in all of them: when the first goes on, nothing is left
            peers.gather(None)
        raise
    return target


def _plan(planner: DefaultSavePlanner, tensors: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> ProcessPlan:
    """A process's plan. DCP's keys are names with dots: `optimizer/layers.0.weight/exp_avg` has no slashes there."""
    held: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, tensor in sorted({**shards, **tensors}.items()):
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            raise CheckpointError(
                f"{name} is {tensor.layout} on {tensor.device}: a checkpoint holds dense tensors that have data"
            )
        if any(placement.is_partial() for placement in placements_of(tensor)):
            tensor = whole(tensor)  # the sum, which all who have a part of it work out here, in this order
        if name in tensors or is_sharded(tensor):
            key = name.replace("/", ".")
            held[key], names[key] = tensor.detach(), name
    holders = {
        key: tuple(tensor.device_mesh.mesh.flatten().tolist()) for key, tensor in held.items() if is_sharded(tensor)
    }
    planner.set_up_planner(held, is_coordinator=True)
    planner.mappings = {key: tuple(name.split("/")) for key, name in names.items()}
    owned = {key for key, name in names.items() if name in tensors}
    return ProcessPlan(planner.create_local_plan(), names, owned, holders)


def _chosen(plans: Sequence[ProcessPlan]) -> list[SavePlan]:
    """Of everyone's plan the parts of tensors that a process owns: the owner's, and other shards on the same mesh."""
    owners = {key: each.holders.get(key) for each in reversed(plans) for key in each.owned}

    def is_part(each: ProcessPlan, key: str) -> bool:
        return key in each.owned or (key in owners and each.holders[key] == owners[key])

    return [
        replace(each.plan, items=[item for item in each.plan.items if is_part(each, item.index.fqn)])
        for each in plans
    ]


def _chunks(
    folder: Path, plan: SavePlan, results: Sequence[WriteResult], checksums: Mapping[MetadataIndex, int]
) -> dict[MetadataIndex, Chunk]:
    """Where the elements of each written part lie.

    DCP writes each part by `torch.save`: a zip archive, in which the elements lie as they are, in `archive/data/0`:

        ... <length of the name> <length n of what follows it> archive/data/0 <n bytes> <the elements> ...

    The first part is read again, so that a save fails under a torch that writes them otherwise.
    """
    planned = {item.index: item.tensor_data for item in plan.items}
    chunks: dict[MetadataIndex, Chunk] = {}
    for name in {result.storage_data.relative_path for result in results}:
        with open(folder / name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for index, place in ((r.index, r.storage_data) for r in results if r.storage_data.relative_path == name):
                data = planned[index]
                assert data is not None
                at = content.find(_ELEMENTS, place.offset, place.offset + place.length)
                begin = at + len(_ELEMENTS) + int.from_bytes(content[at - 2 : at], "little")
                num_bytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize
                if not chunks and (at < 0 or zlib.crc32(content[begin : begin + num_bytes]) != checksums[index]):
                    raise CheckpointError(f"{index.fqn} in {folder / name} is not where this version looks for it")
                offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                chunks[index] = Chunk(name, begin, offsets, sizes, checksums[index])
    return chunks


def _manifest(
    temporary: Path, step: int, meta: JSON, plans: Sequence[ProcessPlan], written: Sequence[WrittenFile]
) -> Manifest:
    files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    tensors: dict[str, TensorEntry] = {}
    for process, (each, (_, chunks)) in enumerate(zip(plans, written, strict=True)):
        if lost := {chunk.file for chunk in chunks.values()} - files.keys():
            raise CheckpointError(
                f"process {process} left no {min(lost)} in {temporary}: all processes must write to one shared folder"
            )
        for item in each.plan.items:
            if (chunk := chunks.get(item.index)) is not None and (data := item.tensor_data) is not None:
                name, dtype = each.names[item.index.fqn], str(data.properties.dtype).removeprefix("torch.")
                known = tensors.get(name, TensorEntry(dtype, tuple(data.size), ()))
                tensors[name] = replace(known, chunks=(*known.chunks, chunk))
    return Manifest(step, meta, files, tensors)
