"""What training has made, from one pipeline to another of the same model over the same processes, without a disk.

    process 2, rank 1 before and after    keeps what it holds, nothing is sent
    process 3, rank 1 -> rank 2           fetches rank 2's state from one that held it

Everyone tells what it holds and what it wants, by the names of a checkpoint, and from these all work out the same
list of sendings: each tensor from the holder with the least to send so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.checkpoint.folder import Kind, match, rename_members, renamed
from penstock.runtime.checkpoint.optimizer import merged_meta
from penstock.runtime.checkpoint.together import together
from penstock.runtime.checkpoint.training_state import COUNTERS, MODEL, StagedState, TrainingState
from penstock.runtime.errors import CheckpointError, RuntimeFailure
from penstock.runtime.mesh.peers import GroupPeers, Peers


def sendings(held: Sequence[Mapping[str, Kind]], wanted: Sequence[Sequence[str]]) -> list[tuple[str, int, int]]:
    """By name, source and target who sends what to whom; what a process holds already it keeps.

    Args:
        held: of each process, shape and type of the tensors that it holds. wanted: names, of each process.

    Raises:
        RuntimeFailure: something is wanted that nobody holds.
    """
    holders: dict[str, list[int]] = {}
    for process, those in enumerate(held):
        for name in those:
            holders.setdefault(name, []).append(process)
    load = [0] * len(held)
    found = []
    for target, names in enumerate(wanted):
        for name in names:
            if name in held[target]:
                continue
            if name not in holders:
                raise RuntimeFailure(
                    f"process {target} needs {name}, which no process holds: a pipeline can be handed over to one of "
                    "the same model and kind of optimizer only"
                )
            source = min(holders[name], key=lambda process: (load[process], process))
            load[source] += _num_bytes(held[source][name])
            found.append((name, source, target))
    return found


def _num_bytes(kind: Kind) -> int:
    shape, dtype = kind
    return math.prod(shape) * dtype.itemsize


class ReceivedState(dict[str, Tensor]):
    """State of another pipeline, which stays what it is there."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).clone()


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
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    kinds, metas = zip(*peers.gather((mine, meta)), strict=True)
    known: dict[str, Kind] = {name: kind for those in kinds for name, kind in those.items()}
    meta = merged_meta(metas)
    rename_members(meta, aliases)
    wanted, members = zip(*peers.gather((taker.wanted(known), taker.members())), strict=True)
    came = _exchange(sendings(kinds, wanted), held, known, peers)
    tensors = ReceivedState({name: held[name] for name in taker.wanted(known) if name in held} | came)
    staged: StagedState

    def stage() -> None:
        nonlocal staged
        expected = taker.expected(MODEL)
        match("the pipeline before", {name: known[name] for name in expected}, expected)
        counters = {"num_updates": num_updates, **giver.scaler()}
        staged = taker.stage(tensors, {COUNTERS: counters, "optimizer": meta}, "the pipeline before", members)

    try:
        together(peers, stage, "its state could not be read")
        staged.put_together(peers, "its state could not be put in place")
    except CheckpointError as error:
        raise RuntimeFailure(f"the pipeline after does not take what the one before has: {error}") from error
    return sum(_num_bytes(known[name]) for name in came)


def _exchange(
    plan: Sequence[tuple[str, int, int]], held: dict[str, Tensor], known: dict[str, Kind], peers: Peers
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
