"""The ranks of one pipeline, as a step needs them: who is here, and the few values all must share."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.mesh.failure import explain
from penstock.runtime.mesh.weak_group import WeakGroup


class Peers(Protocol):
    """Ranks in this process, and what is shared with the others.

    Where there are others, each wait ends after the timeout. Raises DeadlineExceeded, PeerLost.
    """

    num_ranks: int
    here: tuple[int, ...]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of every process's `values`."""

    def share(self, tensor: Tensor | None, like: Tensor | None, source: int, targets: Sequence[int]) -> Tensor | None:
        """What `source` has, for `targets`, who say by `like` what shape and type it will be; None for others."""

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by process; plain data of our own making."""

    def barrier(self) -> None:
        """Waits for everyone."""


class LocalPeers:
    """All ranks in this process: nothing to exchange."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.here = tuple(range(num_ranks))

    def sum(self, values: Tensor) -> Tensor:
        return values

    def share(self, tensor: Tensor | None, like: Tensor | None, source: int, targets: Sequence[int]) -> Tensor | None:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass


class GroupPeers:
    """One process a rank.

    Args:
        timeout: seconds that any wait may last.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group = WeakGroup(group)
        self.num_ranks = dist.get_world_size(group)
        self.here: tuple[int, ...] = (dist.get_rank(group),)
        self._timeout = timeout

    @property
    def timeout(self) -> float:
        """Seconds that any wait may last."""
        return self._timeout

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group()

    def sum(self, values: Tensor) -> Tensor:
        self._wait(lambda: self.group.allreduce([values]), None, "a sum over all ranks")
        return values

    def share(self, tensor: Tensor | None, like: Tensor | None, source: int, targets: Sequence[int]) -> Tensor | None:
        rank = self.here[0]
        if rank == source:
            for target in targets:
                if target != source:
                    self._send_one(tensor, target)
            return tensor
        if rank not in targets or like is None:
            return None
        kind = torch.zeros(4, dtype=torch.int64)
        self._receive(kind, source)
        present, sparse_dims, num, coalesced = kind.tolist()
        if not present:
            return None
        if not sparse_dims:
            buffer = torch.empty(like.shape, dtype=like.dtype)
            self._receive(buffer, source)
            return torch.empty_like(like).copy_(buffer)
        indices = torch.empty(sparse_dims, num, dtype=torch.int64)
        values = torch.empty(num, *like.shape[sparse_dims:], dtype=like.dtype)
        self._receive(indices, source)
        self._receive(values, source)
        return torch.sparse_coo_tensor(
            indices, values, like.shape, device=like.device, is_coalesced=bool(coalesced), check_invariants=False
        )

    def _send_one(self, tensor: Tensor | None, target: int) -> None:
        """A tensor, or that there is none: (whether there is one, sparse dimensions, entries, whether coalesced) and
        its parts."""
        if tensor is None:
            kind, parts = [0, 0, 0, 0], []
        elif tensor.is_sparse:
            kind = [1, tensor.sparse_dim(), tensor._nnz(), int(tensor.is_coalesced())]
            parts = [tensor._indices(), tensor._values()]
        else:
            kind, parts = [1, 0, 0, 0], [tensor]
        for part in (torch.tensor(kind), *parts):
            self._send(part.cpu().contiguous(), target)

    def gather(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64)
        sizes[self.here[0]] = data.numel()
        longest = int(self.sum(sizes).max())
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.num_ranks)]
        mine = torch.nn.functional.pad(data, (0, longest - data.numel()))
        self._wait(lambda: dist.all_gather(parts, mine, group=self.group, async_op=True), None, "what all ranks tell")
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def _send(self, tensor: Tensor, target: int) -> None:
        self._wait(
            lambda: dist.isend(tensor, group=self.group, group_dst=target), target, "a tied parameter to be taken"
        )

    def _receive(self, tensor: Tensor, source: int) -> None:
        self._wait(lambda: dist.irecv(tensor, group=self.group, group_src=source), source, "a tied parameter")

    def _wait(self, start: Callable[[], Any], peer: int | None, what: str) -> None:
        try:
            start().wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise explain(error, self.here[0], peer, what, self._timeout) from None


class MeshPeers(GroupPeers):
    """All processes of a mesh.

    Sums go along its dimensions, one after the other: each has the same terms in the same order everywhere, so all
    come to the same, and a link that serves no dimension, which may be slow, is not crossed.

    Args:
        along: the peers of this process along each dimension.
    """

    def __init__(self, group: dist.ProcessGroup, along: Sequence[Peers], timeout: float) -> None:
        super().__init__(group, timeout)
        self._along = tuple(along)

    def sum(self, values: Tensor) -> Tensor:
        for peers in self._along:
            values = peers.sum(values)
        return values


def peers_of(mesh: Any, num_ranks: int, timeout: float) -> Peers:
    """The ranks to run over: the mesh's, torch.distributed's where it is set up, or all in this process."""
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    if group is None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return LocalPeers(num_ranks)
        group = dist.group.WORLD
    size = dist.get_world_size(group)
    if size != num_ranks:
        raise RuntimeFailure(
            f"the schedule is for {num_ranks} ranks and the process group has {size}; build it with "
            f"num_ranks={size} or start {num_ranks} processes"
        )
    return GroupPeers(group, timeout)
