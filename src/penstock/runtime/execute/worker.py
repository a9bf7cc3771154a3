"""One rank at work: asks the decision core what to run, has its handler run it, passes messages on.

    transport --arrive--> dispatcher --next--> handlers[kind] --> dispatcher.finish
        ^                                            |
        +--------------------- send -----------------+

It neither waits nor knows threads or processes: the executors do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from penstock.dispatch import Dispatcher
from penstock.dispatch.graph import ALONE
from penstock.runtime.execute.async_ops import SharedThreadStream, Stream, WatchedStream
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.handlers.backend import Backend
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.wiring import Wiring
from penstock.schedule import Op
from penstock.schedule.dependencies import predecessors


class OpRecorder:
    """Start and end of every op of a rank, in nanoseconds of the monotonic clock."""

    def __init__(self) -> None:
        self.times: list[tuple[Op, int, int]] = []
        self.apart: list[tuple[Op, int, int]] = []
        """Of asynchronous ops."""


class Worker:
    """One rank's step, from its first op to its last.

    Args:
        meeting: where ranks of this process meet for ops that they run together; None where each is on its own.
    """

    def __init__(
        self,
        wiring: Wiring,
        rank: int,
        dispatcher: Dispatcher,
        backend: Backend,
        transport: Transport,
        meeting: Gang | None = None,
    ) -> None:
        self.rank = rank
        self.dispatcher = dispatcher
        self.recorder = OpRecorder()
        self.peak_held = 0.0
        self._wiring = wiring
        self._backend, self._handlers = backend, backend.handlers
        self.transport = transport
        self._local: dict[Edge, Payload] = {}
        self._unsent: deque[tuple[Edge, int, Payload]] = deque()
        self._number, self._stations = wiring.numbers(rank), wiring.stations
        self._meeting = meeting
        self._standing: int | None = None
        """The op that this rank has come to, and others have not."""
        self._stream: Stream | None = None
        self._apart: list[int] = []
        """Asynchronous ops that this rank has come to, and others have not."""

    @property
    def finished(self) -> bool:
        """All ops ran and all their messages are with the transport."""
        if not self.dispatcher.finished or self._unsent or self._standing is not None:
            return False
        return self._stream is None or not (self._apart or self._stream.num_open)

    def begin(self, wake: Callable[[], None] | None) -> None:
        """Before the first op, in the thread that runs them.

        Args:
            wake: ends this rank's wait for messages; None where it shares its thread with other ranks.
        """
        self._backend.begin()
        if self._wiring.graph.has_streams:
            start = self._backend.start
            self._stream = SharedThreadStream(start) if wake is None else WatchedStream(start, wake)

    def end(self) -> None:
        """After the last op, or after what went wrong: ends the stream of asynchronous ops."""
        if self._stream is not None:
            self._stream.close()

    def run_ready(self) -> bool:
        """Runs ops until the next one must wait; returns whether anything moved."""
        moved = False
        number, meeting, arrivals = self._number, self._meeting, self.transport.arrivals
        while True:
            while self._unsent:
                if not self.transport.send(*self._unsent[0]):
                    return moved
                self._unsent.popleft()
                moved = True
            for edge in arrivals():
                self.dispatcher.arrive(number[edge.consumer])
                moved = True
            if self._stream is not None and self._go_on_apart(self._stream):
                moved = True
                continue
            op = self.dispatcher.next() if self._standing is None else self._standing
            if op is None:
                return moved
            if meeting is not None and self._wiring.graph.gang[op] != ALONE:
                if self._standing is None:
                    meeting.come(op)
                    self._standing = op
                    moved = True
                if not meeting.may_run(op):
                    return moved
                self._standing = None
            self._run(op)
            moved = True

    def settle(self) -> bool:
        """Where this rank shares its thread: waits for the first of its asynchronous ops; whether there was one."""
        return self._stream is not None and self._stream.settle()

    def waited(self, start: int, end: int) -> None:
        """Takes note that the executor waited for messages (ns of the monotonic clock)."""
        self._backend.waited(start, end)

    def arrive(self, edge: Edge) -> None:
        """Takes note of a message that the executor waited for."""
        self.dispatcher.arrive(self._number[edge.consumer])

    def awaited(self) -> Sequence[Edge]:
        """Messages from other ranks that the first op not yet run needs (those that came in included)."""
        number = self.dispatcher.first_awaited()
        return () if number is None else self._wiring.stations[number].remote

    def stuck_on(self) -> str:
        """In words, what the rank waits for."""
        if self._unsent:
            edge, target, _ = self._unsent[0]
            return f"rank {self.rank} waits to send {edge} to rank {target}: the channel is full"
        wiring = self._wiring
        if self._standing is not None and self._meeting is not None:
            op = wiring.graph.ops[self._standing]
            others = ", ".join(map(str, self._meeting.absent(self._standing) or [wiring.rank_of(op)]))
            return f"rank {self.rank} has come to {op.short()} of stage {op.stage} and waits for rank {others}"
        number = self.dispatcher.first_awaited()
        if number is not None:
            op = wiring.graph.ops[number]
            ran = {op for op, _, _ in self.recorder.times}
            needed = predecessors(op, wiring.schedule.graph, wiring.graph.number)
            sources = [
                f"{p.short()} of stage {p.stage} from rank {wiring.rank_of(p)}" for p in needed if p not in ran
            ]
            return f"rank {self.rank} waits to run {op.short()} of stage {op.stage}, which needs {', '.join(sources)}"
        if self._stream is not None and self._stream.num_open:
            return (
                f"rank {self.rank} waits for the end of asynchronous ops, {self._stream.num_open} of which are open"
            )
        return f"rank {self.rank} has finished"

    def _go_on_apart(self, stream: Stream) -> bool:
        """Takes note of asynchronous ops that ended, and starts those whose turn it is; whether there were any."""
        moved = False
        for number, start, end in stream.ended():
            station = self._wiring.stations[number]
            self.recorder.apart.append((station.op, start, end))
            for _, edge, target, is_local in station.sent:  # tokens, all of them
                if not is_local:
                    self._unsent.append((edge, target, TOKEN))
            self.dispatcher.finish(number)
            moved = True
        while (found := self.dispatcher.next_apart()) is not None:
            if self._meeting is not None and self._wiring.graph.gang[found] != ALONE:
                self._meeting.come(found)
            self._apart.append(found)
            moved = True
        while self._apart and self._may_start(self._apart[0]):
            number = self._apart.pop(0)
            station = self._wiring.stations[number]
            stream.start(number, station.op, [self.transport.take(edge) for edge in station.incoming])
            moved = True
        return moved

    def _may_start(self, number: int) -> bool:
        alone = self._meeting is None or self._wiring.graph.gang[number] == ALONE
        return alone or self._meeting.may_run(number)  # type: ignore[union-attr]

    def _run(self, number: int) -> None:
        op, _, _, _, _, taken, num_tokens, sent = station = self._stations[number]
        local, transport, dispatcher = self._local, self.transport, self.dispatcher
        inputs = [transport.take(edge) if is_remote else local.pop(edge) for edge, is_remote in taken]
        if num_tokens:
            del inputs[-num_tokens:]
        if (held := dispatcher.held) > self.peak_held:
            self.peak_held = held
        start = perf_counter_ns()
        try:
            outputs = self._handlers[op.kind](station, inputs)
        except Exception as error:
            error.add_note(f"in {op.short()} of stage {op.stage} on rank {self.rank}")
            raise
        self.recorder.times.append((op, self._backend.began or start, perf_counter_ns()))
        del inputs
        for place, edge, target, is_local in sent:
            payload = TOKEN if place < 0 else outputs[place]
            if is_local:
                local[edge] = payload
            elif self._unsent or not transport.send(edge, target, payload):
                self._unsent.append((edge, target, payload))
        dispatcher.finish(number)


TOKEN = Payload([])
"""What a token carries."""
