"""Ranks with delegates and nothing else: processes without torch.distributed, that meet over pipes.

    outcomes = run_delegate_ranks(2, chatter, 1 << 20)

A rank's function gets its number and `gather`, and makes its `DelegateTransport` with them.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

import penstock as ps
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.schedule import Op
from processes import DEADLINE, forkserver


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its function returned, or its error and text. None and "" where it was killed."""

    value: Any = None
    error: str = ""
    text: str = ""


def run_delegate_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE
) -> list[Ended]:
    """Runs `function(rank, gather, *args)` in a process a rank; what is left at the deadline is killed."""
    context = forkserver()
    pairs = [context.Pipe() for _ in range(num_ranks)]
    children = [
        context.Process(target=_child, args=(pairs[rank][1], rank, function, args)) for rank in range(num_ranks)
    ]
    for child, (_, theirs) in zip(children, pairs, strict=True):
        child.start()
        theirs.close()
    try:
        return _relay([ours for ours, _ in pairs], deadline)
    finally:
        for child in children:
            if child.is_alive():
                child.join(5)
                child.kill()
            child.join()


def _relay(pipes: list[Connection], deadline: float) -> list[Ended]:
    ended: dict[int, Ended] = {}
    told: dict[int, Any] = {}
    end = time.monotonic() + deadline
    while len(ended) < len(pipes) and time.monotonic() < end:
        for pipe in wait([p for rank, p in enumerate(pipes) if rank not in ended], timeout=0.2):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                what, value = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                ended[rank] = Ended()
                continue
            if what == "gather":
                told[rank] = value
            else:
                ended[rank] = value
        if len(told) == len(pipes):
            values = [told[rank] for rank in range(len(pipes))]
            for pipe in pipes:
                pipe.send(values)
            told.clear()
    return [ended.get(rank, Ended(error="deadline", text="it was still running")) for rank in range(len(pipes))]


def _child(pipe: Connection, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)

    def gather(value: Any) -> list[Any]:
        pipe.send(("gather", value))
        return pipe.recv()

    try:
        ended = Ended(function(rank, gather, *args))
    except BaseException as error:
        ended = Ended(None, f"{type(error).__name__}: {error}", traceback.format_exc())
    pipe.send(("ended", ended))
    pipe.close()
    os._exit(0)


class Chain:
    """Messages between neighbours of a chain of stages, one per rank, forward and backward."""

    def __init__(self, num_ranks: int, num_microbatches: int) -> None:
        self.num_ranks, self.num_microbatches = num_ranks, num_microbatches
        self.tags = Tags(ps.build("gpipe", num_ranks, num_microbatches))

    def forward(self, source: int) -> list[Edge]:
        return [Edge(Op("F", source, m), Op("F", source + 1, m)) for m in range(self.num_microbatches)]

    def backward(self, source: int) -> list[Edge]:
        return [Edge(Op("B", source, m), Op("B", source - 1, m)) for m in range(self.num_microbatches)]

    def expected(self, rank: int) -> list[ExpectedMessages]:
        channels = [(rank - 1, self.forward(rank - 1))] if rank else []
        if rank < self.num_ranks - 1:
            channels.append((rank + 1, self.backward(rank + 1)))
        return [
            ExpectedMessages(ChannelKey.of(edges[0]), peer, tuple((edge, self.tags.message(edge)) for edge in edges))
            for peer, edges in channels
        ]

    def outgoing(self, rank: int) -> list[tuple[Edge, int]]:
        """All that a rank sends, the two directions in turn."""
        forward = self.forward(rank) if rank < self.num_ranks - 1 else []
        backward = self.backward(rank) if rank else []
        found = []
        for m in range(self.num_microbatches):
            found += [(edges[m], peer) for edges, peer in ((forward, rank + 1), (backward, rank - 1)) if edges]
        return found

    def begin(self, transport: DelegateTransport, rank: int, digest: int = 7) -> None:
        transport.begin(StepMessages(self.expected(rank), ["s"] * self.num_microbatches, digest))


def payload_of(edge: Edge, step: int, shape: Sequence[int]) -> Payload:
    """Numbers that only this message has."""
    seed = hash((edge.producer.stage, edge.consumer.stage, edge.consumer.microbatch, step)) & 0xFFFFFFFF
    generator = torch.Generator().manual_seed(seed)
    return Payload([torch.randn(tuple(shape), generator=generator)], 0, [True])


def exchange(
    transport: DelegateTransport,
    chain: Chain,
    rank: int,
    step: int,
    shape: Callable[[int], Sequence[int]],
    between: Callable[[int], None] = lambda count: None,
) -> int:
    """One step: sends all, takes all in, compares every bit; returns how many came. `between` runs at each send."""
    chain.begin(transport, rank)
    due = sum(len(one.messages) for one in chain.expected(rank))
    came = 0

    def take(edges: list[Edge]) -> int:
        for edge in edges:
            found = transport.take(edge).leaves[0]
            wanted = payload_of(edge, step, shape(edge.consumer.microbatch)).leaves[0]
            assert found is not None
            assert torch.equal(found, wanted), f"rank {rank} got other numbers for {edge} in step {step}"
        return len(edges)

    for count, (edge, target) in enumerate(chain.outgoing(rank)):
        between(count)
        payload = payload_of(edge, step, shape(edge.consumer.microbatch))
        while not transport.send(edge, target, payload):
            came += take(transport.wait([], lambda: f"rank {rank} waits to send"))
        came += take(transport.arrivals())
    while came < due:
        came += take(transport.wait([], lambda: f"rank {rank} waits for its messages"))
    transport.end()
    return came
