"""What training has made, from one pipeline to another of the same model over the same processes, without a disk.

    process 2, rank 1 before and after    keeps what it holds, nothing is sent
    process 3, rank 1 -> rank 2           fetches rank 2's state from one that held it

Everyone tells what it holds and what it wants, by the names of a checkpoint, and from these all work out the same
list of sendings: each tensor from the holder with the least to send so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.checkpoint.optimizer import merged_meta
from penstock.runtime.checkpoint.reader import Kind, rename_members, renamed
from penstock.runtime.checkpoint.together import together
from penstock.runtime.checkpoint.training_state import MODEL, StagedState, TrainingState
from penstock.runtime.errors import CheckpointError, RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers


class TensorTransfer(NamedTuple):
    """A tensor on its way from one process to another."""

    name: str
    source: int
    target: int


class StateInventory(NamedTuple):
    """What a process tells the others.

    Attributes:
        held: shape and type of each tensor that it holds, by name. wanted: names.
    """

    held: dict[str, Kind]
    wanted: list[str]


def sendings(inventories: Sequence[StateInventory]) -> list[TensorTransfer]:
    """Who sends what to whom; what a process holds already it keeps.

    Raises:
        RuntimeFailure: something is wanted that nobody holds.
    """
    holders: dict[str, list[int]] = {}
    for process, each in enumerate(inventories):
        for name in each.held:
            holders.setdefault(name, []).append(process)
    load = [0] * len(inventories)
    found = []
    for target, each in enumerate(inventories):
        for name in each.wanted:
            if name in each.held:
                continue
            if name not in holders:
                raise RuntimeFailure(
                    f"process {target} needs {name}, which no process holds: a pipeline can be handed over to one of "
                    "the same model and kind of optimizer only"
                )
            source = min(holders[name], key=lambda process: (load[process], process))
            load[source] += _num_bytes(*inventories[source].held[name])
            found.append(TensorTransfer(name, source, target))
    return found


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class ReceivedState:
    """State that came from another pipeline, in the form of a checkpoint's `Reader`."""

    path = "the pipeline before"

    def __init__(self, tensors: dict[str, Tensor], meta: Any) -> None:
        self._tensors, self.meta = tensors, {"optimizer": meta}

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors with memory of their own."""
        return {name: self._tensors[name].clone() for name in names}


def hand_over(giver: TrainingState, taker: TrainingState, num_updates: int, peers: Peers) -> int:
    """Lets one go on where another is, over the same processes; every one must call this.

    Args:
        num_updates: so far.

    Returns:
        Bytes that this process received.

    Raises:
        RuntimeFailure: they are not of one model.
        DeadlineExceeded, PeerLost: a process is late or gone.
    """
    aliases = {name: stored for part in peers.gather(taker.aliases()) for name, stored in part.items()}
    try:
        held, meta = giver.held()
    except CheckpointError as error:
        raise RuntimeFailure(f"the pipeline before can't be handed over: {error}") from error
    held = {renamed(name, aliases): tensor for name, tensor in held.items()}
    parts = peers.gather(({name: (tuple(t.shape), t.dtype) for name, t in held.items()}, meta))
    known: dict[str, Kind] = {name: kind for kinds, _ in parts for name, kind in kinds.items()}
    meta = merged_meta(each for _, each in parts)
    rename_members(meta, aliases)
    wanted = peers.gather((taker.wanted(known), taker.members()))
    inventories = [StateInventory(kinds, names) for (kinds, _), (names, _) in zip(parts, wanted, strict=True)]
    came = _exchange(sendings(inventories), held, known, peers)
    source = ReceivedState({name: came[name] if name in came else held[name] for name in taker.wanted(known)}, meta)
    staged: StagedState

    def stage() -> None:
        nonlocal staged
        for name, (shape, _) in taker.expected().items():
            if name.startswith(MODEL) and known[name][0] != shape:
                raise CheckpointError(
                    f"{name} has shape {known[name][0]} there and {shape} here; build both from one model"
                )
        staged = taker.stage(source, num_updates, giver.scaler(), [each for _, each in wanted])

    try:
        together(peers, stage, "its state could not be read")
        staged.put_together(peers, "its state could not be put in place")
    except CheckpointError as error:
        raise RuntimeFailure(f"the pipeline after does not take what the one before has: {error}") from error
    return sum(_num_bytes(*known[name]) for name in came)


def _exchange(
    plan: Sequence[TensorTransfer], held: dict[str, Tensor], known: dict[str, Kind], peers: Peers
) -> dict[str, Tensor]:
    """What comes to this process, by name. All is started, then waited for."""
    if not isinstance(peers, GroupPeers):
        return {}
    me, group = peers.here[0], peers.group
    works: list[tuple[Any, int, Tensor]] = []
    came: dict[str, Tensor] = {}
    for number, (name, source, target) in enumerate(plan):
        if not math.prod(known[name][0]):
            came |= {name: torch.empty(known[name][0], dtype=known[name][1], device="cpu")} if target == me else {}
        elif source == me:
            tensor = held[name].detach().cpu().contiguous()
            works.append((dist.isend(tensor, group=group, group_dst=target, tag=number), target, tensor))
        elif target == me:
            shape, dtype = known[name]
            came[name] = torch.empty(shape, dtype=dtype, device="cpu")
            works.append((dist.irecv(came[name], group=group, group_src=source, tag=number), source, came[name]))
    for work, peer, _ in works:
        peers.wait_for(work, "state that is handed over", peer)
    return came
