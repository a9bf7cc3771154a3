"""Which transport carries messages: its name as users give it, what it holds, and how it is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from penstock.dispatch import Dispatch
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.transports.channel import Tags
from penstock.runtime.transports.conditioned import ConditionedLines, ConditionedTransport, Conditions
from penstock.runtime.transports.group import GroupTransport
from penstock.runtime.transports.lines import LineTransport, lines_of
from penstock.runtime.wiring import Wiring
from penstock.simulate import Blocking

NAMES = ("host", "direct", "delegate", "nccl")
BASES = ("host", "direct")
"""Transports of which single links may be delegated."""
DEPTH = 2
"""Messages that a direct channel holds where nothing else is said."""


@dataclass(frozen=True)
class TransportChoice:
    """How messages travel.

    Attributes:
        name: "host" (through host memory, sends never wait), "direct" (in order, a bounded channel a link),
            "delegate" (every link by delegate processes) or "nccl" (from GPU to GPU).
        depth: messages that a channel of "direct" holds before its sender stands still; None: any number.
        has_delegates: whether single links may go by delegates while it runs.

    Raises:
        RuntimeFailure: another name, or a depth that cannot be.
    """

    name: str = "host"
    depth: int | None = None
    has_delegates: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise RuntimeFailure(f"transport {self.name!r}: give {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}")
        if self.name == "direct":
            object.__setattr__(self, "depth", DEPTH if self.depth is None else self.depth)
            if not isinstance(self.depth, int) or self.depth < 1:
                raise RuntimeFailure(f"a direct channel of depth {self.depth} carries nothing; give at least 1")
        elif self.depth is not None:
            raise RuntimeFailure(f"depth={self.depth} is for transport='direct'; {self.name!r} has no bound")

    def require_dispatch(self, dispatch: Dispatch) -> None:
        """Raises RuntimeFailure where messages cannot be told apart as this dispatch needs."""
        if self.name == "nccl" and dispatch is not Dispatch.FROZEN:
            raise RuntimeFailure("transport 'nccl' needs frozen dispatch: it can't tell which message has come")

    def route(self, transport: Any, delegated: Collection[tuple[int, int]]) -> None:
        """Says, between two steps, which links go by delegates."""
        if self.has_delegates and hasattr(transport, "route"):
            transport.route(frozenset(delegated))

    def simulated(self, delegated: Collection[tuple[int, int]] = ()) -> Blocking | str:
        """What the simulator calls it, with these links delegated."""
        return "decoupled" if self.depth is None else Blocking(self.depth, frozenset(delegated))

    def make(
        self,
        group: dist.ProcessGroup,
        tags: Tags,
        timeout: float,
        wiring: Wiring,
        dispatch: Dispatch,
        device: torch.device,
        conditions: Conditions | None,
    ) -> Any:
        """One rank's end, with link conditions where they are given.

        Raises:
            RuntimeFailure: "nccl" without a GPU or with dynamic dispatch.
        """
        if self.name == "nccl":
            self.require_dispatch(dispatch)
            return _nccl(group, tags, timeout, wiring, device, conditions)
        if self.name != "host":
            raise RuntimeFailure(f"transport {self.name!r} runs between threads only, so far; use 'host'")
        if conditions is not None:
            return ConditionedTransport(group, tags, timeout, conditions=conditions)
        return GroupTransport(group, tags, timeout)


def _nccl(
    group: dist.ProcessGroup,
    tags: Tags,
    timeout: float,
    wiring: Wiring,
    device: torch.device,
    conditions: Conditions | None,
) -> LineTransport:
    if device.type != "cuda" or not dist.is_nccl_available():
        raise RuntimeFailure(f"transport 'nccl' needs stages on a GPU, they are on {device}; use transport='host'")
    lines = lines_of(wiring)
    if conditions is not None:
        return ConditionedLines(group, tags, timeout, lines, "nccl", device, conditions=conditions)
    return LineTransport(group, tags, timeout, lines, "nccl", device)
