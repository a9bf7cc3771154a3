"""What the experiments on one GPU share: two processes on it, ops of matrix products, and the device's own times.

    | GEMM | GEMM | ... | GEMM | fill the message |      an op on the stream that computes
    ^      ^            ^      ^                  ^      marks: events that the device passes

Two processes without MPS take turns on a GPU, in slices of about two milliseconds, whenever both have work there. So
the second process computes nothing here, and what its communication alone takes is measured as a control.

On `cpu` an op has ended when its call returns. The tests run the same code there; its times say nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import torch
from torch import Tensor

import penstock as ps
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.schedule import Op

MB = 1 << 20
SHAPES = {"cuda": (4096, 4096, 2048), "cpu": (64, 64, 64)}
"""Rows, inner size and columns of a GEMM: 69 GFLOP, about the 110 microseconds of the paper's on an H100."""
OP_MS = 10.0
"""Milliseconds of an op, as in the paper's simulations."""
WARM_UP = 200
"""GEMMs before the first that counts."""


QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""So that no two streams share a queue between host and GPU, where what computes could stand behind a message."""


class PairFailed(Exception):
    """One of two processes failed, ended early, or was not done in time."""


@dataclass(frozen=True)
class Peer:
    """A process's end of the pair.

    Attributes:
        rank: 0 or 1. values: to the other, for `gather`. signals: to the other, for what is said while ops run.
    """

    rank: int
    values: Connection
    signals: Connection

    def gather(self, value: Any) -> list[Any]:
        """Both values, by rank. Both must be small: each is written before the other is read."""
        self.values.send(value)
        other = self.values.recv()
        return [other, value] if self.rank else [value, other]


def run_pair(function: Callable[..., Any], *args: Any, limit: float) -> list[Any]:
    """What `function(peer, *args)` returns in each of two processes.

    Args:
        limit: seconds after which both are ended.

    Raises:
        PairFailed: with what the first that failed said.
    """
    context = multiprocessing.get_context("spawn")
    values, signals, told = context.Pipe(), context.Pipe(), [context.Pipe(duplex=False) for _ in range(2)]
    children = [
        context.Process(target=_child, args=(Peer(rank, values[rank], signals[rank]), told[rank][1], function, args))
        for rank in range(2)
    ]
    for child in children:
        child.start()
    for given in (*values, *signals, *(theirs for _, theirs in told)):
        given.close()
    try:
        return _results([ours for ours, _ in told], limit)
    finally:
        for child in children:
            child.kill()
            child.join()


def _results(pipes: Sequence[Connection], limit: float) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + limit
    while len(found) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        if not (ready := wait(left, timeout=max(0.0, end - time.monotonic()))):
            raise PairFailed(f"still running after {limit:g} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                fine, value = pipes[rank].recv()
            except EOFError:
                raise PairFailed(f"process {rank} ended before it was done") from None
            if not fine:
                raise PairFailed(f"process {rank}: {value}")
            found[rank] = value
    return [found[rank] for rank in range(len(pipes))]


def _child(peer: Peer, told: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(QUEUES)
    torch.set_num_threads(1)
    try:
        told.send((True, function(peer, *args)))
    except BaseException:
        told.send((False, traceback.format_exc()))
        time.sleep(1.0)  # so that the other's word, that this one is gone, comes later
    os._exit(0)  # what a communicator still waits for must not keep the process


class HostMark:
    """A mark where an op has ended when its call returns."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostMark) -> float:
        return (later._at - self._at) * 1e3


class DeviceClock:
    """Marks on the stream that computes, and when they were passed by the host's clock, which processes share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.synchronize()
        # Of several, that with the shortest wait says best how the two clocks stand to each other.
        tried = []
        for _ in range(5):
            before = time.perf_counter()
            origin = self.mark()
            origin.synchronize()
            after = time.perf_counter()
            tried.append((after - before, (before + after) / 2, origin))
        _, self._at, self._origin = min(tried, key=lambda each: each[0])

    def mark(self, sleeps: bool = False) -> Any:
        """Behind all that the device was given so far. With `sleeps` a wait for it takes no processor."""
        if self.device.type != "cuda":
            return HostMark()
        event = torch.cuda.Event(enable_timing=True, blocking=sleeps)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def moment(self, mark: Any) -> float:
        """Seconds of `time.perf_counter` at which a mark was passed."""
        return float(self._at + self._origin.elapsed_time(mark) / 1e3)


class Gemms:
    """Ops of several equal matrix products."""

    def __init__(self, device: torch.device) -> None:
        rows, inner, columns = SHAPES[device.type]
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self._left = torch.randn(rows, inner, device=device, dtype=kind)
        self._right = torch.randn(inner, columns, device=device, dtype=kind)
        self._out = torch.empty(rows, columns, device=device, dtype=kind)

    def op(self, count: int, clock: DeviceClock) -> list[Any]:
        """Launches so many; returns the marks before, between and after them."""
        marks = [clock.mark()]
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)
            marks.append(clock.mark())
        return marks

    def count_for(self, ms: float, clock: DeviceClock) -> int:
        """How many take so long; warms the device up first."""
        self.op(WARM_UP, clock)
        marks = self.op(WARM_UP, clock)
        clock.synchronize()
        return max(1, round(ms / median(intervals(marks))))


def intervals(marks: Sequence[Any]) -> list[float]:
    """Milliseconds from each mark to the next."""
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many there are, their median, 90th percentile and largest; no numbers of none."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median": median(ordered),
        "p90": ordered[-(-9 * len(ordered) // 10) - 1],
        "most": ordered[-1],
    }


class DelegatedLink:
    """Messages between the two processes by `DelegateTransport`: forward from rank 0, backward from rank 1.

    Args:
        device: where this process's messages lie. most: messages of a step each way. host_memory: see the transport.
    """

    def __init__(self, peer: Peer, device: torch.device, most: int, host_memory: int) -> None:
        self._rank, self._other = peer.rank, 1 - peer.rank
        self._edges = (
            [Edge(Op("F", 0, m), Op("F", 1, m)) for m in range(most)],
            [Edge(Op("B", 1, m), Op("B", 0, m)) for m in range(most)],
        )
        self._tags = Tags(ps.build("gpipe", 2, most))
        self._most = most
        self.transport = DelegateTransport(
            peer.rank, peer.gather, self._tags, 60.0, host_memory=host_memory, device=device
        )
        self.transport.prepare([(0, 1)])
        self._came: list[Edge] = []

    def begin(self, incoming: int, num_bytes: int) -> None:
        """A step in which so many messages come in, all of this size, as do those that go out."""
        edges = self._edges[self._other][:incoming]
        expected = []
        if edges:
            messages = tuple((edge, self._tags.message(edge)) for edge in edges)
            expected = [ExpectedMessages(ChannelKey.of(edges[0]), self._other, messages)]
        self.transport.begin(StepMessages(expected, [str(num_bytes)] * self._most))

    def send(self, number: int, leaf: Tensor) -> None:
        payload = Payload([leaf], 0, [False])
        while not self.transport.send(self._edges[self._rank][number], self._other, payload):
            self._came += self.transport.wait([], lambda: "a sender waits for room")

    def arrived(self) -> list[tuple[int, Tensor]]:
        """Messages that have come in since they were last asked for: each number, and the tensor on the device."""
        edges, self._came = [*self._came, *self.transport.arrivals()], []
        return [self._take(edge) for edge in edges]

    def receive(self) -> tuple[int, Tensor]:
        """The next message, for which it waits."""
        if not self._came:
            self._came = self.transport.wait([], lambda: "a receiver waits")
        return self._take(self._came.pop(0))

    def _take(self, edge: Edge) -> tuple[int, Tensor]:
        (leaf,) = self.transport.take(edge).leaves
        assert leaf is not None
        return edge.consumer.microbatch, leaf


def device_facts(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on, besides what the record of a run has."""
    if device.type != "cuda":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "device_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
