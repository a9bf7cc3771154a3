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
from collections.abc import Callable, Sequence
from time import perf_counter_ns, sleep

import torch

from penstock.cost import Costs
from penstock.runtime.emulation.gang import EmulatedGang
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.handlers.backend import Handler
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.transfer_record import SHORTEST_WAIT
from penstock.runtime.transport.wiring import Station, Wiring
from penstock.schedule import Op
from penstock.schedule.op import UPDATE
from penstock.schedule.updates import OWNER

_PR_SET_TIMERSLACK = 29
Ended = Callable[[Op], None]


class EmulatedBackend:
    """One handler for every kind of op of one rank.

    Args:
        stretch: seconds of sleep to one second of an op.
        ended: called when an op has ended.

    Attributes:
        late: of every op, how long after its due moment it ended, in nanoseconds.
    """

    def __init__(self, wiring: Wiring, costs: Costs, stretch: float = 1.0, ended: Ended | None = None) -> None:
        self._ended = ended
        self.late: list[int] = []
        self._wiring, self._costs = wiring, costs
        self._stretch = stretch
        self._durations: dict[Op, int] = {}
        self._bodies: dict[int, torch.Tensor] = {}
        self._free: int | None = None
        self.began: int | None = None
        self.handlers: dict[str, Handler] = dict.fromkeys({op.kind for op in wiring.graph.ops}, self.run)
        self._rank, self._numbers = 0, wiring.graph.number
        self._meeting: EmulatedGang | None = None
        self._stream_free = 0

    def begin(self, rank: int = 0, meeting: EmulatedGang | None = None) -> None:
        """Starts a step of a rank: what was owed is forgotten.

        Args:
            meeting: where the ranks meet for what they run together; not needed where there is nothing of that kind.
        """
        self._free = None
        self.late = []
        self._rank, self._meeting = rank, meeting
        self._numbers = self._wiring.numbers(rank)
        self._stream_free = 0

    def waited(self, start: int, end: int) -> None:
        """Takes note that the rank waited for a message, from `start` to `end` in nanoseconds."""
        if end - start > SHORTEST_WAIT:
            self._free = end

    def run(self, station: Station, inputs: Sequence[Payload]) -> list[Payload]:
        """Takes the time of an op, and gives messages of the sizes that the costs say."""
        op = station.op
        self._check(station.incoming, inputs, op)
        duration = self._duration(op)
        ready = perf_counter_ns() if self._free is None else self._free
        together = self._wiring.ranks_of(op)
        if len(together) > 1 and self._meeting is not None:
            ready = self._meeting.meet(op, self._rank, together, ready)
        due = ready + duration
        self._sleep(due)
        self._free = due
        self.began = ready if len(together) > 1 else None
        if self._ended is not None:
            self._ended(op)
        return [self._payload(edge) for edge in station.given]

    def start(self, op: Op, received: Sequence[Payload]) -> EmulatedStart:
        """Starts an asynchronous op, which begins when the stream is free, of all ranks that run it together."""
        self._check(self._wiring.stations[self._numbers[op]].incoming, received, op)
        now = perf_counter_ns()
        # The rank came to it when the op before was to end; or just now, when the last word that it waited for came.
        return EmulatedStart(self, op, now if received or self._free is None else self._free)

    def run_job(self, op: Op, moment: int) -> tuple[int, int]:
        """An asynchronous op that may begin at `moment`, in the stream's thread; returns when it began and ended."""
        begin = max(moment, self._stream_free)
        together = self._wiring.ranks_of(op)
        if len(together) > 1 and self._meeting is not None:
            begin = self._meeting.meet(op, self._rank, together, begin)
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
        while (left := due - perf_counter_ns()) > 0:
            sleep(left / 1e9)
        self.late.append(perf_counter_ns() - due)

    def _payload(self, edge: Edge) -> Payload:
        size = int(self._costs.message_size(edge.producer, edge.consumer))
        stamp = torch.tensor(self._stamp(edge))
        if not size:
            return Payload.gradients([stamp])
        body = self._bodies.get(size)
        if body is None:
            # Never written and never read: where threads hand it over, even a stage's parameters take no memory.
            body = self._bodies[size] = torch.empty(size, dtype=torch.uint8)
        return Payload.gradients([stamp, body])

    def _takes(self, op: Op) -> float:
        """Milliseconds of an op; an update takes longest on the copy that owns its stage."""
        owns = op.kind != UPDATE or self._wiring.schedule.pipeline_of(op) == OWNER
        return self._costs.duration(*op, owns=owns)

    def _stamp(self, edge: Edge) -> list[int]:
        """What tells a message from all others."""
        number = self._wiring.graph.number
        return [number[edge.producer], number[edge.consumer]]


class EmulatedStart:
    """An asynchronous op under way that is emulated."""

    def __init__(self, backend: EmulatedBackend, op: Op, moment: int) -> None:
        self._backend, self._op, self._moment = backend, op, moment

    def wait(self) -> tuple[int, int]:
        return self._backend.run_job(self._op, self._moment)

    def done(self) -> bool:
        """Never told without waiting: it takes its time only then."""
        return False

    def settle(self) -> None:
        self.wait()


def sharpen_timers() -> None:
    """Asks the system not to put off this thread's timers to save power (Linux does, by 50 us)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
