"""The ranks of one pipeline, as a step needs them: who is here, and the few values all must share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Peers(Protocol):
    """Ranks in this process, and what is shared with the others."""

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
    """One process a rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.here: tuple[int, ...] = (dist.get_rank(group),)

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def share(self, tensor: Tensor | None, like: Tensor | None, source: int, targets: Sequence[int]) -> Tensor | None:
        rank = self.here[0]
        if rank == source:
            for target in targets:
                if target != source:
                    present = torch.tensor([0 if tensor is None else 1])
                    dist.send(present, group=self.group, group_dst=target)
                    if tensor is not None:
                        dist.send(tensor.cpu().contiguous(), group=self.group, group_dst=target)
            return tensor
        if rank not in targets or like is None:
            return None
        present = torch.zeros(1, dtype=torch.int64)
        dist.recv(present, group=self.group, group_src=source)
        if not present.item():
            return None
        buffer = torch.empty(like.shape, dtype=like.dtype)
        dist.recv(buffer, group=self.group, group_src=source)
        return buffer.to(like.device)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.group)
