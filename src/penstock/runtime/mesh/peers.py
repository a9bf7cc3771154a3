"""The ranks of one pipeline, as a step needs them: who is here, and the few values all must share."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.host_process import text_of
from penstock.runtime.errors import DeadlineExceeded, PeerFailed, PeerLost, RuntimeFailure
from penstock.runtime.mesh.collective import (
    FEW_BYTES,
    WeakGroup,
    all_gather,
    all_reduce,
    explained,
    is_direct,
    wait_for,
)
from penstock.schedule import Schedule
from penstock.schedule.placement import ranks_together

FIRST_BYTES, _SIZE = 4096, 8
"""Bytes that ranks send one another before they know how many there are; and those of them that give the number."""
TIED, SUM, SHARED = "a tied parameter", "a sum over all ranks", "what all ranks share"
"""What processes send each other here, in errors."""
_COUNTS_CALLS = torch.torch_version.TorchVersion(torch.__version__) >= "2.15"
"""Whether torch counts the groups that a process has helped to make, and no longer those that it is in."""


R = TypeVar("R")


class Peers(Protocol):
    """Ranks in this process, and what is shared with the others.

    Where there are others, each wait ends after the timeout. Raises DeadlineExceeded, PeerLost.

    Attributes:
        called: what errors call one of them.
    """

    num_ranks: int
    here: tuple[int, ...]
    called: str = "rank"

    def sum(self, values: Tensor) -> Tensor:
        """The sum of every process's `values`."""

    def begin_sum(self, values: Tensor) -> Callable[[], Tensor]:
        """Begins the same; returns what waits for the sum. `values` stay as they are until then."""

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by process; plain data of our own making."""

    def repeated(self, once: Callable[[], R]) -> R:
        """Does something together, from its start where a link was lost, until no process has lost one. Doing it
        again must come to the same.
        """

    def together(self, action: Callable[[], R], what: str) -> list[R]:
        """Runs an action in every process, and returns what it returned in each. If it fails in one, all raise.

        Every process must call it. Results must be plain data.

        Args:
            what: what the action does, as an error says that a process could not do.

        Raises:
            PeerFailed: names the first process in which the action failed, and the cause. Processes in which it
                failed raise their own error.
        """
        result, error, words = None, None, None
        try:
            result = action()
        except (DeadlineExceeded, PeerLost):
            raise  # some process is late or gone, so there is no telling it
        except Exception as failure:  # whatever it is, the others wait to hear of it
            error, words = failure, _in_a_line(failure)
        told = self.gather((result, words))
        if error is not None:
            raise error
        for process, (_, said) in enumerate(told):
            if said is not None:
                raise PeerFailed(f"{self.called} {process} could not {what}: {said}")
        return [each for each, _ in told]


class LocalPeers(Peers):
    """All ranks in this process: nothing to exchange."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.here = tuple(range(num_ranks))

    def sum(self, values: Tensor) -> Tensor:
        return values

    def begin_sum(self, values: Tensor) -> Callable[[], Tensor]:
        return lambda: values

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def repeated(self, once: Callable[[], R]) -> R:
        return once()


class GroupPeers(Peers):
    """One process per rank.

    Args:
        timeout: seconds that any wait may last.

    Attributes:
        guard: what ops go by if there is another interface for them, a `GuardedGroup` of `transport/repeat.py`; None:
            the group alone.
    """

    guard: Any = None

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group = WeakGroup(group)
        self.num_ranks = dist.get_world_size(group)
        self.here: tuple[int, ...] = (dist.get_rank(group),)
        self.timeout = timeout

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group()

    def start(self, op: Callable[..., Any], *given: Any) -> Any:
        """Begins an op of all ranks (see `collective.py`); returns what to wait for. All must begin theirs in one
        order. Raises PeerLost.
        """
        with self.explained(None, "all ranks' values"):
            return op(self.group, *given) if self.guard is None else self.guard.start(op, *given)

    def sum(self, values: Tensor) -> Tensor:
        return self.begin_sum(values)()

    def begin_sum(self, values: Tensor) -> Callable[[], Tensor]:
        if is_direct(values, self.num_ranks):
            begun = self._begin_rows(values.clone(), SUM)
            return lambda: functools.reduce(torch.add, begun())  # in the order of ranks, on all of them
        if self.guard is not None:
            return lambda: self.repeated(lambda: self._begin_large_sum(values)())
        return self._begin_large_sum(values)

    def _begin_large_sum(self, values: Tensor) -> Callable[[], Tensor]:
        total = values.clone()
        work = self.start(all_reduce, total)

        def found() -> Tensor:
            self.wait_for(work, SUM)
            return total

        return found

    def _begin_rows(self, mine: Tensor, what: str) -> Callable[[], Sequence[Tensor]]:
        """Begins to give every rank the few values of all ranks; returns what waits for them."""
        if self.guard is None:
            return self._begin_large_rows(mine, what)
        told = self.guard.begin_gather(mine.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

        def heard() -> Sequence[Tensor]:
            with self.explained(None, what) as limit:
                parts = told(limit.total_seconds())
            return [torch.frombuffer(bytearray(part), dtype=mine.dtype).view(mine.shape) for part in parts]

        return heard

    def _begin_large_rows(self, mine: Tensor, what: str) -> Callable[[], Sequence[Tensor]]:
        """Begins the same by the group, for values of any size."""
        rows = mine.new_empty(self.num_ranks, *mine.shape)
        work = self.start(all_gather, mine, rows)

        def came() -> Sequence[Tensor]:
            self.wait_for(work, what)
            return rows.unbind(0)

        return came

    def share(
        self, tensors: Sequence[Tensor | None], likes: Sequence[Tensor | None], source: int, targets: Sequence[int]
    ) -> list[Tensor | None]:
        """What `source` has, for `targets`; None for others. All are dense.

        Args:
            likes: of each tensor the shape and the one type.
        """
        rank = self.here[0]
        if (rank != source and rank not in targets) or any(like is None for like in likes):
            return list(tensors) if rank == source else [None] * len(tensors)
        known = [like for like in likes if like is not None]
        there = torch.tensor([tensor is not None for tensor in tensors]).to(known[0])
        if rank == source:
            pairs = zip(tensors, known, strict=True)
            whole = [torch.zeros_like(like) if tensor is None else tensor for tensor, like in pairs]
            flat = torch.cat([there, *(tensor.reshape(-1) for tensor in whole)]).cpu()
            for target in targets:
                if target != source:
                    self.send(flat, target, TIED)
            return list(tensors)
        sizes = [len(likes), *(like.numel() for like in known)]
        flat = torch.empty(sum(sizes), dtype=known[0].dtype, device="cpu")
        self.receive(flat, source, TIED)
        flags, *parts = flat.split(sizes)
        return [
            torch.empty_like(like).copy_(part.view(like.shape)) if is_there else None
            for like, part, is_there in zip(known, parts, flags.tolist(), strict=True)
        ]

    def gather(self, value: Any) -> list[Any]:
        """Raises RuntimeFailure, in every process, for a value that cannot be sent."""
        try:
            data = pickle.dumps(value)
        except Exception as error:  # whatever it is, the others wait for what this one has
            said = f"rank {self.here[0]} shares a value that can't be sent ({type(error).__name__}: {error})"
            data = pickle.dumps(RuntimeFailure(f"{said}; give plain data: numbers, text, tensors, lists, dicts"))
        head = len(data).to_bytes(_SIZE, "little") + data[: FIRST_BYTES - _SIZE]
        parts = self._gather_bytes(head.ljust(FIRST_BYTES, b"\0"))
        sizes = [int.from_bytes(part[:_SIZE], "little") for part in parts]
        if max(sizes) <= FIRST_BYTES - _SIZE:
            parts = [part[_SIZE:] for part in parts]
        else:
            parts = self._gather_bytes(data.ljust(max(sizes), b"\0"))
        found = [pickle.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]
        for each in found:
            if isinstance(each, RuntimeFailure):
                raise each
        return found

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's data, of which all have as much."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if self.guard is None or len(data) <= FEW_BYTES:
            rows = self._begin_rows(mine, SHARED)()
        else:
            rows = self.repeated(lambda: self._begin_large_rows(mine, SHARED)())
        return [row.numpy().tobytes() for row in rows]

    def repeated(self, once: Callable[[], R]) -> R:
        return once() if self.guard is None else self.guard.repeated(once)

    def send(self, tensor: Tensor, target: int, what: str, timeout: float | None = None) -> None:
        """Sends a tensor on the processor that lies in one piece. Raises DeadlineExceeded, PeerLost, with `what`."""
        with self.explained(target, f"{what} to be taken", timeout) as limit:
            if self.guard is not None:
                self.guard.send(tensor, target, limit)
            elif (work := dist.isend(tensor, group=self.group, group_dst=target)) is not None:
                work.wait(limit)

    def receive(self, tensor: Tensor, source: int, what: str, timeout: float | None = None) -> None:
        """Fills a tensor with what another rank sends. Raises as `send`."""
        with self.explained(source, what, timeout) as limit:
            if self.guard is not None:
                self.guard.receive(tensor, source, limit)
            elif (work := dist.irecv(tensor, group=self.group, group_src=source)) is not None:
                work.wait(limit)

    def wait_for(self, work: Any, what: str, peer: int | None = None) -> None:
        """Waits for what was begun here, with one rank or all. Raises DeadlineExceeded, PeerLost, with `what`."""
        wait_for(work, self.here[0], peer, what, self.timeout)

    def explained(
        self, peer: int | None, what: str, timeout: float | None = None
    ) -> AbstractContextManager[timedelta]:
        """Around a wait; gives how long it may take."""
        return explained(self.here[0], peer, what, self.timeout if timeout is None else timeout)


class MeshPeers(GroupPeers):
    """All processes of a mesh.

    Sums go along its dimensions, one after the other: each has the same terms in the same order everywhere, so all
    come to the same, and a link that serves no dimension, which may be slow, is not crossed.

    Args:
        along: the peers of this process along each dimension.
    """

    called: str = "process"

    def __init__(self, group: dist.ProcessGroup, along: Sequence[Peers], timeout: float) -> None:
        super().__init__(group, timeout)
        self.along = tuple(along)

    def begin_sum(self, values: Tensor) -> Callable[[], Tensor]:
        first, *others = self.along
        begun = first.begin_sum(values)

        def found() -> Tensor:
            total = begun()
            for peers in others:
                total = peers.sum(total)
            return total

        return found


def peers_of(mesh: Any, num_ranks: int, timeout: float) -> Peers:
    """The ranks to run over: the mesh's, torch.distributed's where it is set up, or all in this process."""
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    if group is None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return LocalPeers(num_ranks)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeFailure(
            f"mesh is {mesh!r:.60}; give a process group that this process is in, a device mesh, which "
            "ps.runtime.device_mesh(ps.Mesh(...)) makes, or None for all of torch.distributed"
        )
    size = dist.get_world_size(group)
    if size != num_ranks:
        raise RuntimeFailure(
            f"the schedule is for {num_ranks} ranks and the process group has {size}; build it with "
            f"num_ranks={size} or start {num_ranks} processes"
        )
    return GroupPeers(group, timeout)


Key = TypeVar("Key")


def groups_of(
    sets: Mapping[Key, tuple[int, ...]], whole: dist.ProcessGroup, timeout: float, backend: str | None = None
) -> dict[Key, dist.ProcessGroup | None]:
    """For each set of ranks a group of its own, in ascending order; None where this process is not in it.

    Every process of the pipeline must call it, with the same sets.

    Args:
        whole: the pipeline's group. timeout: seconds after which waits in a group end.
        backend: of the groups; that of all of torch.distributed where not given.
    """
    members = dist.get_process_group_ranks(whole)
    inside = {key: [members[rank] for rank in ranks] for key, ranks in sets.items()}
    return groups_of_processes(inside, timeout, len(members) == dist.get_world_size(), backend)


def groups_of_processes(
    sets: Mapping[Key, Sequence[int]], timeout: float, whole: bool, backend: str | None = None
) -> dict[Key, dist.ProcessGroup | None]:
    """The same of sets of processes, by their numbers in all of torch.distributed.

    Args:
        whole: every process of torch.distributed calls it, with the same sets; else every process of theirs does, and
            others may have sets of their own, as many.
        backend: of the groups; that of all of torch.distributed where not given.
    """
    limit = timedelta(seconds=timeout)
    made: dict[Key, dist.ProcessGroup | None] = {}
    for key, inside in sets.items():
        is_member = dist.get_rank() in inside
        group: object = None
        if whole or is_member:
            alone = not whole
            group = dist.new_group(sorted(inside), timeout=limit, backend=backend, use_local_synchronization=alone)
        if not is_member and not (whole and _COUNTS_CALLS):
            # A group that its members alone make is named after them and after how many groups they know. So who is
            # not in this one makes one of itself, and all go on counting alike.
            dist.new_group([dist.get_rank()], timeout=limit, use_local_synchronization=True)
        made[key] = group if is_member and isinstance(group, dist.ProcessGroup) else None
    return made


def meeting_groups(schedule: Schedule, peers: GroupPeers) -> dict[tuple[str, int], WeakGroup]:
    """For each kind of op on a stage that several ranks run together, this one among them, their group.

    Asynchronous ops have groups of their own: what they do there keeps its own order. Every process of the pipeline
    must call it.
    """
    together = {(op.kind, op.stage): ranks for op, ranks in sorted(ranks_together(schedule).items())}
    keys = {place: (ranks, place if place in schedule.asynchronous else None) for place, ranks in together.items()}
    groups = groups_of({key: key[0] for key in keys.values()}, peers.group, peers.timeout)
    found = {place: groups[key] for place, key in keys.items()}
    return {place: WeakGroup(group) for place, group in found.items() if group is not None}


def _in_a_line(error: Exception) -> str:
    """What an error says, and where it was."""
    text = text_of(error)
    named = text if isinstance(error, RuntimeFailure) else f"{type(error).__name__}: {text}"
    return "; ".join([named, *map(str, getattr(error, "__notes__", ()))])


def require_same(given: Sequence[Mapping[str, object]], rule: str, shown: bool = True) -> None:
    """Compares what each rank was given, by subject, with that of the first rank that has the subject.

    Args:
        shown: whether values say something to a person; if they are short, they are in the error.

    Raises:
        RuntimeFailure: names the first subject that differs, and the ranks whose is not that rank's.
    """
    for subject in dict.fromkeys(subject for mine in given for subject in mine):
        first = next(rank for rank, mine in enumerate(given) if subject in mine)
        ranks = [r for r, mine in enumerate(given) if subject in mine and mine[subject] != given[first][subject]]
        if ranks:
            *others, last = map(str, ranks)
            which = f"ranks {', '.join(others)} and {last} were" if others else f"rank {last} was"
            one, other = repr(given[first][subject]), repr(given[ranks[0]][subject])
            values = f" (rank {ranks[0]} has {other}, rank {first} has {one})"
            said = values if shown and len(one) < 60 and len(other) < 60 else ""
            raise RuntimeFailure(f"{which} given another {subject} than rank {first}{said}; {rule}")


def schedule_digest(schedule: Schedule) -> str:
    """Tells schedules apart by what runs, whatever they are called."""
    whole = (each and astuple(each) for each in (schedule.placement, schedule.stage_graph, schedule.updates))
    orders = [astuple(each) for each in schedule.microbatch_orders]
    fields = schedule.order, schedule.microbatch_pipeline, orders, *whole
    return hashlib.sha256(repr(fields).encode()).hexdigest()
