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
from penstock.runtime.checkpoint.folder import JSON, MANIFEST, write_manifest
from penstock.runtime.checkpoint.together import UNWRITTEN, together
from penstock.runtime.errors import CheckpointError
from penstock.runtime.mesh.peers import LocalPeers, Peers
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.dtensor import is_sharded, placements_of, whole

_ELEMENTS = b"archive/data/0"


class ProcessPlan(NamedTuple):
    """What a process could write of a checkpoint.

    Attributes:
        plan: by DCP's keys. owned: keys of tensors that this process answers for.
        holders: by key of a sharded tensor the processes that hold shards of it.
    """

    plan: SavePlan
    owned: set[str]
    holders: dict[str, tuple[int, ...]]


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
            folder.remove(temporary)  # what an earlier kill left
            temporary.mkdir(parents=True)
        return mine

    def write_parts() -> tuple[list[WriteResult], dict[str, JSON]]:
        plans, _ = planner.create_global_plan(_chosen(plans_of_all))
        mine = planner.finish_plan(writer.prepare_global_plan(plans)[me])
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined] # no reader compares that one
            results = writer.write_data(mine, planner).wait()
        return results, _entries(temporary, mine, results, planner)

    def complete() -> None:
        if me == 0:
            writer.finish(planner.metadata, [results for results, _ in written])
            files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
            entries = _merged([each for _, each in written], temporary, files)
            manifest = {"step": step, "meta": meta, "files": files, "tensors": entries}
            write_manifest(temporary / MANIFEST, manifest)
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
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, tensor in sorted({**shards, **tensors}.items()):
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
            raise CheckpointError(
                f"{name} is {tensor.layout} on {tensor.device}: a checkpoint holds dense tensors that have data"
            )
        if any(placement.is_partial() for placement in placements_of(tensor)):
            tensor = whole(tensor)  # the sum, which all who have a part of it work out here, in this order
        if name in tensors or is_sharded(tensor):
            key = name.replace("/", ".")
            held[key], paths[key] = tensor.detach(), tuple(name.split("/"))
    planner.set_up_planner(held, is_coordinator=True)
    planner.mappings = paths
    owned = {name.replace("/", ".") for name in tensors}
    holders = {key: tuple(t.device_mesh.mesh.flatten().tolist()) for key, t in held.items() if is_sharded(t)}
    return ProcessPlan(planner.create_local_plan(), owned, holders)


def _chosen(plans: Sequence[ProcessPlan]) -> list[SavePlan]:
    """Of everyone's plan the parts of tensors that a process owns: the owner's, and other shards on the same mesh."""
    owners = {key: each.holders.get(key) for each in reversed(plans) for key in each.owned}

    def is_part(each: ProcessPlan, key: str) -> bool:
        return key in each.owned or (key in owners and each.holders[key] == owners[key])

    return [
        replace(each.plan, items=[item for item in each.plan.items if is_part(each, item.index.fqn)])
        for each in plans
    ]


def _entries(
    temporary: Path, plan: SavePlan, results: Sequence[WriteResult], planner: CheckedPlanner
) -> dict[str, JSON]:
    """By name what the manifest says of the parts that this process has written, all into one file.

    DCP writes each part by `torch.save`: a zip archive, in which the elements lie as they are, in `archive/data/0`:

        ... <length of the name> <length n of what follows it> archive/data/0 <n bytes> <the elements> ...

    The first part is read again, so that a save fails under a torch that writes them otherwise.
    """
    entries: dict[str, JSON] = {}
    if not results:
        return entries
    planned = {item.index: item.tensor_data for item in plan.items}
    file = results[0].storage_data.relative_path
    with open(temporary / file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for result in results:
            index, place, data = result.index, result.storage_data, planned[result.index]
            assert data is not None
            at = content.find(_ELEMENTS, place.offset, place.offset + place.length)
            begin = at + len(_ELEMENTS) + int.from_bytes(content[at - 2 : at], "little")
            end = begin + data.chunk.sizes.numel() * data.properties.dtype.itemsize
            crc32 = planner.checksums[index]
            if not entries and (at < 0 or zlib.crc32(content[begin:end]) != crc32):
                raise CheckpointError(f"{index.fqn} in {temporary / file} is not where this version looks for it")
            chunk = {"file": file, "offset": begin, "begin": [*data.chunk.offsets], "shape": [*data.chunk.sizes]}
            dtype = str(data.properties.dtype).removeprefix("torch.")
            entry = {"dtype": dtype, "shape": [*data.size], "chunks": []}
            name = "/".join(map(str, planner.mappings[index.fqn]))
            entries.setdefault(name, entry)["chunks"].append({**chunk, "crc32": crc32})
    return entries


def _merged(parts: Sequence[dict[str, JSON]], temporary: Path, files: Mapping[str, int]) -> dict[str, JSON]:
    """The entries of all processes as those of whole tensors."""
    entries: dict[str, JSON] = {}
    for process, part in enumerate(parts):
        for name, entry in part.items():
            if (file := entry["chunks"][0]["file"]) not in files:
                raise CheckpointError(
                    f"process {process} left no {file} in {temporary}: all processes must write to one shared folder"
                )
            entries.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]
    return entries
