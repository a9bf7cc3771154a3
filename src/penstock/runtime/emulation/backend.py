"""The emulated backend: an op takes the time that the costs say and no processor; its messages are real bytes.

The rank sleeps through each op. No sleep ends on time, and the worker takes some microseconds between ops, so an
op's end is not "now plus its duration" but a moment of its own, counted from where the op before was to end:

    to end        |=====op=====|=====op=====|               a rank that never waits
    ends          |=====op======|=====op===|                late by a little, and the next one is shorter by it

A debt is carried only while the rank has work. Once it stood idle for a message the next op starts when that came.
So what errors there are do not add up along a rank, and no run is shorter than its ops on any rank.

A real op that several ranks run brings their parts together by itself, with a collective for example. An emulated op
has none. A barrier replaces it, and tells all ranks when the last one came. Ranks are threads of this process, or
processes of one host.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta
from time import perf_counter_ns
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.cost import Costs
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.execute.executors import run_rank
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.plan import StepPlan
from penstock.runtime.execute.worker import Backend, Worker
from penstock.runtime.mesh.collective import WeakGroup, explain
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import SHORTEST_WAIT
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.link_conditions import Conditions, sleep_until
from penstock.runtime.transport.loopback import Handed, Mailbox, loopback_ends
from penstock.runtime.transport.wiring import WiredOp, Wiring
from penstock.schedule import Op
from penstock.schedule.op import OF_UPDATES
from penstock.schedule.updates import OWNER

_PR_SET_TIMERSLACK = 29
LEAD = 5_000_000
"""Nanoseconds from the moment when all ranks are ready to the start of a step, so that all start it together."""
Ended = Callable[[Op], None]


class Barrier(Protocol):
    """Where ranks meet that have a clock in common, and a thread or a process each.

    Both methods wait until all have come, and return the last of their moments (ns of that clock).

    Raises:
        DeadlineExceeded, PeerLost: with who did not come.
    """

    def begin(self, rank: int, moment: int) -> int:
        """All ranks come to the begin of a step."""

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        """All of `ranks` come to `op`, this one being ready for it from `moment` on."""


class ThreadBarrier:
    """Of ranks that are threads of this process.

    Args:
        timeout: seconds before a wait ends with DeadlineExceeded.
    """

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self._ranks, self._timeout = range(num_ranks), timeout
        self._changed = threading.Condition()
        self._moments: dict[Hashable, dict[int, int]] = {}
        self._left: dict[Hashable, int] = {}
        self._lost: int | None = None

    def lose(self, rank: int) -> None:
        """Lets all who wait know that a rank failed."""
        with self._changed:
            self._lost = rank
            self._changed.notify_all()

    def begin(self, rank: int, moment: int) -> int:
        return self._last("the begin of a step", rank, self._ranks, moment)

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        return self._last(op, rank, ranks, moment)

    def _last(self, what: Hashable, rank: int, ranks: Sequence[int], moment: int) -> int:
        with self._changed:
            moments = self._moments.setdefault(what, {})
            moments[rank] = moment
            self._changed.notify_all()
            came = self._changed.wait_for(lambda: self._lost is not None or len(moments) == len(ranks), self._timeout)
            absent = ", ".join(str(r) for r in ranks if r not in moments)
            if absent and self._lost is not None:
                raise PeerLost(f"rank {self._lost} failed; rank {rank} waits at {what} for rank {absent}")
            if not came:
                raise DeadlineExceeded(f"rank {rank} waited {self._timeout:g} s at {what} for rank {absent}")
            self._left[what] = self._left.get(what, len(ranks)) - 1
            if not self._left[what]:  # the next step has the same ops
                del self._left[what], self._moments[what]
            return max(moments.values())


class ProcessBarrier:
    """Of ranks that are processes of one host, whose clocks are one.

    Args:
        groups: for each kind of op on a stage the ranks that run it. One group an order of ops: what another thread
            meets for must have its own.
    """

    def __init__(self, peers: Peers, groups: Mapping[tuple[str, int], WeakGroup], timeout: float) -> None:
        self._peers, self._groups, self._timeout = peers, groups, timeout

    def begin(self, rank: int, moment: int) -> int:
        return int(max(self._peers.gather(moment)))

    def meet(self, op: Op, rank: int, ranks: Sequence[int], moment: int) -> int:
        latest = torch.tensor([moment], device="cpu")
        group = self._groups[op.kind, op.stage]()
        try:
            work = dist.all_reduce(latest, dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise explain(error, rank, None, f"them to come to {op}", self._timeout) from None
        return int(latest)


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
        owns = op.kind not in OF_UPDATES or self._wiring.schedule.pipeline_of(op) == OWNER
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


class ThreadedRanks:
    """The ranks of a pipeline, each of which is a thread of this process.

    Args:
        choice: how messages travel, which are handed over: its bound holds, its name makes no difference.
        conditions: of the links. timeout: seconds that any wait may last.

    Attributes:
        transports: by rank. barrier: where they meet for ops that they run together.
    """

    def __init__(self, num_ranks: int, choice: TransportChoice, conditions: Conditions, timeout: float) -> None:
        self._boxes: list[Mailbox[Handed]] = [Mailbox() for _ in range(num_ranks)]
        self.transports = loopback_ends(self._boxes, conditions, timeout, choice.depth)
        self.barrier = ThreadBarrier(num_ranks, timeout)

    def run(self, workers: Sequence[Worker]) -> None:
        """Runs every worker to its end, a thread each. Raises the first failure, not those that it led to on other
        ranks.
        """
        errors: list[BaseException] = []

        def run(worker: Worker) -> None:
            try:
                run_rank(worker)
            except BaseException as error:
                errors.append(error)
                self._lose(worker.rank)

        threads = [threading.Thread(target=run, args=(each,), name=f"penstock-rank-{each.rank}") for each in workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self._lose(workers[0].rank)
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])

    def close(self) -> None:
        for transport in self.transports:
            transport.close()

    def _lose(self, rank: int) -> None:
        self.barrier.lose(rank)
        for box in self._boxes:
            box.lose(rank, None)


def sharpen_timers() -> None:
    """Asks the system not to put off this thread's timers to save power (Linux does, by 50 us)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
