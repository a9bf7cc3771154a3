"""The ranks of one pipeline, as a step needs them: who is here, and the few values all must share."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeVar

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


class Guard(Protocol):
    """What processes of a group tell each other where there is another interface for it."""

    def start(self, op: Callable[..., Any], *given: Any) -> Any:
        """Begins `op(group, *given)` on the group that there is now; returns what to wait for."""

    def begin_gather(self, data: bytes) -> Callable[[float], list[bytes]]:
        """Tells the others a few bytes, which no lost link holds up; returns what waits, so many seconds, for all."""

    def repeated(self, once: Callable[[], R]) -> R:
        """Does something together, from its start where a link was lost, until no process has lost one."""

    def send(self, tensor: Tensor, target: int, limit: timedelta) -> None:
        """Sends a tensor."""

    def receive(self, tensor: Tensor, source: int, limit: timedelta) -> None:
        """Fills a tensor with what another rank sends."""


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


class UnsendableValue(NamedTuple):
    """In place of a value that cannot be pickled, and why."""

    why: str


class GroupPeers(Peers):
    """One process per rank.

    Args:
        timeout: seconds that any wait may last.

    Attributes:
        guard: what ops go by where there is another interface for them; None: the group alone.
    """

    guard: Guard | None = None

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
        if self.guard is not None and is_direct(values, self.num_ranks):
            told = self.guard.begin_gather(_bytes_of(values))

            def summed() -> Tensor:
                with self.explained(None, SUM) as limit:
                    parts = told(limit.total_seconds())
                found = (torch.frombuffer(bytearray(part), dtype=values.dtype) for part in parts)
                return reduce(torch.add, found).view(values.shape)

            return summed
        if self.guard is not None:
            return lambda: self.repeated(lambda: self._large_sum(values)())
        if not is_direct(values, self.num_ranks):
            return self._large_sum(values)
        rows = values.new_empty(self.num_ranks, *values.shape)
        work = self.start(all_gather, values.clone(), rows)

        def added() -> Tensor:
            self.wait_for(work, SUM)
            return reduce(torch.add, rows.unbind(0))  # in the order of ranks, on all of them

        return added

    def _large_sum(self, values: Tensor) -> Callable[[], Tensor]:
        total = values.clone()
        work = self.start(all_reduce, total)

        def found() -> Tensor:
            self.wait_for(work, SUM)
            return total

        return found

    def share(
        self, tensors: Sequence[Tensor | None], likes: Sequence[Tensor | None], source: int, targets: Sequence[int]
    ) -> list[Tensor | None]:
        """What `source` has, for `targets`, who say by `likes` what shapes and one type it has; None for others."""
        rank = self.here[0]
        if rank == source:
            self._send_all(tensors, [target for target in targets if target != source])
            return list(tensors)
        if rank not in targets or any(like is None for like in likes):
            return [None] * len(tensors)
        return self._receive_all([like for like in likes if like is not None], source)

    def _send_all(self, tensors: Sequence[Tensor | None], targets: Sequence[int]) -> None:
        """For each (whether there is one, sparse dimensions, entries, whether coalesced), then all dense ones as one
        message, then the parts of the sparse ones.
        """
        if not targets:
            return
        there = [tensor for tensor in tensors if tensor is not None]
        dense = [tensor.reshape(-1) for tensor in there if not tensor.is_sparse]
        parts = [
            torch.tensor([_kind_of(tensor) for tensor in tensors], device="cpu"),
            *([torch.cat(dense)] if dense else []),
        ]
        parts += [part for t in there if t.is_sparse for part in (t._indices(), t._values())]
        for part in (part.cpu().contiguous() for part in parts):
            for target in targets:
                self.send(part, target, TIED)

    def _receive_all(self, likes: Sequence[Tensor], source: int) -> list[Tensor | None]:
        """What `_send_all` sent."""
        kinds = torch.zeros(len(likes), 4, dtype=torch.int64, device="cpu")
        self.receive(kinds, source, TIED)
        dense = [like for like, (there, dims, _, _) in zip(likes, kinds.tolist(), strict=True) if there and not dims]
        flat = torch.empty(sum(like.numel() for like in dense), dtype=likes[0].dtype, device="cpu")
        if dense:
            self.receive(flat, source, TIED)
        found: list[Tensor | None] = []
        start = 0
        for like, (present, sparse_dims, num, coalesced) in zip(likes, kinds.tolist(), strict=True):
            if not present:
                found.append(None)
            elif not sparse_dims:
                part = flat[start : start + like.numel()].view(like.shape)
                found.append(torch.empty_like(like).copy_(part))
                start += like.numel()
            else:
                found.append(self._receive_sparse(like, source, sparse_dims, num, bool(coalesced)))
        return found

    def _receive_sparse(self, like: Tensor, source: int, sparse_dims: int, num: int, coalesced: bool) -> Tensor:
        indices = torch.empty(sparse_dims, num, dtype=torch.int64, device="cpu")
        values = torch.empty(num, *like.shape[sparse_dims:], dtype=like.dtype, device="cpu")
        self.receive(indices, source, TIED)
        self.receive(values, source, TIED)
        return torch.sparse_coo_tensor(
            indices, values, like.shape, device=like.device, is_coalesced=coalesced, check_invariants=False
        )

    def gather(self, value: Any) -> list[Any]:
        """Raises RuntimeFailure, in every process, for a value that cannot be sent."""
        try:
            data = pickle.dumps(value)
        except Exception as error:  # whatever it is, the others wait for what this one has
            data = pickle.dumps(UnsendableValue(f"{type(error).__name__}: {error}"))
        found = [pickle.loads(part) for part in self._gathered(data)]
        for rank, each in enumerate(found):
            if isinstance(each, UnsendableValue):
                raise RuntimeFailure(
                    f"rank {rank} shares a value that can't be sent ({each.why}); give plain data: numbers, text, "
                    "tensors, and lists, tuples and dicts of them"
                )
        return found

    def _gathered(self, data: bytes) -> list[bytes]:
        """Everyone's data."""
        head = len(data).to_bytes(_SIZE, "little") + data[: FIRST_BYTES - _SIZE]
        parts = self._gather_rows(head.ljust(FIRST_BYTES, b"\0"))
        sizes = [int.from_bytes(part[:_SIZE], "little") for part in parts]
        longest = max(sizes)
        if longest <= FIRST_BYTES - _SIZE:
            parts = [part[_SIZE:] for part in parts]
        else:
            parts = self._gather_rows(data.ljust(longest, b"\0"))
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _gather_rows(self, data: bytes) -> list[bytes]:
        """Everyone's data, of which all have as much."""
        if self.guard is not None and len(data) <= FEW_BYTES:
            with self.explained(None, SHARED) as limit:
                return self.guard.begin_gather(data)(limit.total_seconds())
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def once() -> list[bytes]:
            rows = mine.new_empty(self.num_ranks, len(mine))
            self.wait_for(self.start(all_gather, mine, rows), SHARED)
            return [row.tobytes() for row in rows.numpy()]

        return self.repeated(once)

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


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _kind_of(tensor: Tensor | None) -> list[int]:
    if tensor is None:
        return [0, 0, 0, 0]
    if tensor.is_sparse:
        return [1, tensor.sparse_dim(), tensor._nnz(), int(tensor.is_coalesced())]
    return [1, 0, 0, 0]


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
    """For each set of ranks a group of its own; None where this process is not in it.

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
    for key, each in sets.items():
        inside = list(each)
        is_member = dist.get_rank() in inside
        group: object = None
        if whole:
            group = dist.new_group(inside, timeout=limit, backend=backend)
        elif is_member:
            group = dist.new_group(inside, timeout=limit, backend=backend, use_local_synchronization=True)
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
        ranks = [
            rank for rank, mine in enumerate(given) if subject in mine and mine[subject] != given[first][subject]
        ]
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
