"""The emulated backend: an op takes the time that the costs say and no processor; its messages are real bytes.

The rank sleeps through each op. No sleep ends on time, and the worker takes some microseconds between ops, so an
op's end is not "now plus its duration" but a moment of its own, counted from where the op before was to end:

    to end        |=====op=====|=====op=====|               a rank that never waits
    ends          |=====op======|=====op===|                late by a little, and the next one is shorter by it

A debt is carried only while the rank has work. Once it stood idle for a message the next op starts when that came.
So what errors there are do not add up along a rank, and no run is shorter than its ops on any rank.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import torch

from penstock.cost import Costs
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.gang import Barrier, Gang
from penstock.runtime.execute.plan import StepPlan
from penstock.runtime.execute.worker import Backend
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import SHORTEST_WAIT
from penstock.runtime.transport.link_conditions import sleep_until
from penstock.runtime.transport.wiring import WiredOp, Wiring
from penstock.schedule import Op
from penstock.schedule.op import UPDATE
from penstock.schedule.updates import OWNER

_PR_SET_TIMERSLACK = 29
LEAD = 5_000_000
"""Nanoseconds from the moment when all ranks are ready to the start of a step, so that all start it together."""
Ended = Callable[[Op], None]


class EmulatedBackend(Backend):
    """One handler for every kind of op of one rank, in one step.

    Args:
        stretch: seconds of sleep to one second of an op.
        ended: called when an op has ended.
        barrier: where the ranks meet, to start the step together, and for what they run together; None for a rank by
            itself.

    Attributes:
        step_start: when the step began (ns of the monotonic clock).
        late: of every op, how long after its due moment it ended, in nanoseconds.
    """

    def __init__(
        self,
        wiring: Wiring,
        costs: Costs,
        stretch: float = 1.0,
        ended: Ended | None = None,
        rank: int = 0,
        barrier: Barrier | None = None,
    ) -> None:
        self._wiring, self._costs, self._rank, self._barrier = wiring, costs, rank, barrier
        self._stretch, self._ended = stretch, ended
        self.late: list[int] = []
        self.step_start = 0
        self._durations: dict[Op, int] = {}
        self._bodies: dict[int, torch.Tensor] = {}
        self._free: int | None = None
        super().__init__(dict.fromkeys({op.kind for op in wiring.graph.ops}, self.run))
        self._numbers = wiring.numbers(rank)
        self._stream_free = 0

    def begin(self) -> None:
        """Waits for the moment at which all ranks start the step."""
        sharpen_timers()
        self.step_start = perf_counter_ns()
        if self._barrier is not None:
            self.step_start = self._barrier.begin(self._rank, self.step_start) + LEAD
            sleep_until(self.step_start)

    def waited(self, start: int, end: int) -> None:
        """Takes note that the rank waited for a message, from `start` to `end` in nanoseconds."""
        if end - start > SHORTEST_WAIT:
            self._free = end

    def run(self, wired: WiredOp, inputs: Sequence[Payload]) -> list[Payload]:
        """Takes the time of an op, and gives messages of the sizes that the costs say."""
        op = wired.op
        self._check(wired.input_edges, inputs, op)
        duration = self._duration(op)
        ready = perf_counter_ns() if self._free is None else self._free
        together = self._wiring.ranks_of(op)
        if len(together) > 1 and self._barrier is not None:
            ready = self._barrier.meet(op, self._rank, together, ready)
        due = ready + duration
        self._sleep(due)
        self._free = due
        self.began = ready if len(together) > 1 else None
        if self._ended is not None:
            self._ended(op)
        return [self._payload(edge) for edge in wired.output_edges]

    def start(self, op: Op, received: Sequence[Payload]) -> EmulatedStart:
        """Starts an asynchronous op, which begins when the stream is free, of all ranks that run it together."""
        self._check(self._wiring.wired_ops[self._numbers[op]].input_edges, received, op)
        now = perf_counter_ns()
        # The rank came to it when the op before was to end; or just now, when the last word that it waited for came.
        return EmulatedStart(self, op, now if received or self._free is None else self._free)

    def run_job(self, op: Op, moment: int) -> tuple[int, int]:
        """An asynchronous op that may begin at `moment`, in the stream's thread; returns when it began and ended."""
        begin = max(moment, self._stream_free)
        together = self._wiring.ranks_of(op)
        if len(together) > 1 and self._barrier is not None:
            begin = self._barrier.meet(op, self._rank, together, begin)
        self._stream_free = begin + self._duration(op)
        self._sleep(self._stream_free)
        return begin, self._stream_free

    def _check(self, incoming: Sequence[Edge], received: Sequence[Payload], op: Op) -> None:
        for edge, payload in zip(incoming, received, strict=False):  # tokens come last, and have nothing to check
            stamp = payload.leaves[0] if payload.leaves else None
            if stamp is not None and stamp.tolist() != self._stamp(edge):
                raise RuntimeFailure(f"{op} received something else than {edge}")

    def _duration(self, op: Op) -> int:
        """Nanoseconds of an op."""
        duration = self._durations.get(op)
        if duration is None:
            duration = self._durations[op] = round(self._takes(op) * 1e6 * self._stretch)
        return duration

    def _sleep(self, due: int) -> None:
        sleep_until(due)
        self.late.append(perf_counter_ns() - due)

    def _payload(self, edge: Edge) -> Payload:
        size = int(self._costs.message_size(edge.producer, edge.consumer))
        stamp = torch.tensor(self._stamp(edge), device="cpu")
        if not size:
            return Payload.gradients([stamp])
        body = self._bodies.get(size)
        if body is None:
            # Never written and never read: where threads hand it over, even a stage's parameters take no memory.
            body = self._bodies[size] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return Payload.gradients([stamp, body])

    def _takes(self, op: Op) -> float:
        """Milliseconds of an op; an update takes longest on the copy that owns its stage, and a pair's time is its
        forward's."""
        graph = self._wiring.schedule.graph
        if graph.pairs and op in graph.backward_of:
            return self._costs.pair_duration(op, graph.backward_of[op])
        if graph.pairs and op in graph.forward_of:
            return 0.0
        owns = op.kind != UPDATE or self._wiring.schedule.pipeline_of(op) == OWNER
        return self._costs.duration(*op, owns=owns)

    def _stamp(self, edge: Edge) -> list[int]:
        """What tells a message from all others."""
        number = self._wiring.graph.number
        return [number[edge.producer], number[edge.consumer]]


class EmulatedStart:
    """An asynchronous op under way that is emulated."""

    timeout, has_ended = float("inf"), False

    def __init__(self, backend: EmulatedBackend, op: Op, moment: int) -> None:
        self._backend, self._op, self._moment = backend, op, moment

    def wait(self) -> tuple[int, int]:
        return self._backend.run_job(self._op, self._moment)


class EmulatedDevices:
    """Those of the ranks in this process.

    Args:
        barrier: where all ranks meet. num_indices: see `wiring.num_indices`.

    Attributes:
        stretch: of the next step. ended: see `EmulatedBackend`.
        backends: of the latest step, by rank.
    """

    runs_ahead = False

    def __init__(self, costs: Costs, stretch: float, barrier: Barrier, num_indices: int) -> None:
        self.stretch = stretch
        self.ended: Ended | None = None
        self.backends: dict[int, EmulatedBackend] = {}
        self.signatures = ["emulated"] * num_indices, zlib.crc32(b"emulated")
        self._costs, self._barrier = costs, barrier

    def table(self, rank: int, plan: StepPlan, training: bool, gang: Gang | None) -> EmulatedBackend:
        made = EmulatedBackend(plan.wiring, self._costs, self.stretch, self.ended, rank, self._barrier)
        self.backends[rank] = made
        return made


def sharpen_timers() -> None:
    """Asks the system not to put off this thread's timers to save power (Linux does, by 50 us)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
