"""One rank at work: it asks the decision core what to run, has a handler run it, and passes messages on.

    transport --arrive--> dispatcher --next--> handlers[kind] --> dispatcher.finish
        ^                                            |
        +--------------------- send -----------------+

A worker never waits, and knows nothing of threads or processes. The executors do. It does not know either what an op
does: its `Backend` has a handler for each kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from penstock.dispatch import Dispatcher, FrozenDispatcher
from penstock.dispatch.graph import ALONE
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.async_ops import AsyncOpHandle, AsyncStream, Start
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.launched_ops import LaunchedOps
from penstock.runtime.execute.step_end import FAILED, StepFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.wiring import WiredOp, Wiring
from penstock.schedule import Op
from penstock.schedule.dependencies import predecessors
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, OF_UPDATES, RECOMPUTE, WEIGHT


class UnsentMessage(NamedTuple):
    """A message that has not left.

    Attributes:
        after: how many of the step's ops must have ended on the device first.
    """

    after: int
    edge: Edge
    target: int
    payload: Payload


Handler = Callable[[WiredOp, Sequence[Payload]], Sequence[Payload]]
"""Runs one op on what its incoming edges brought, in their order and without tokens. Returns the payload of each of
`wired.output_edges`, in that order."""


class Backend:
    """What runs the ops of one rank in one step.

    Args:
        start: starts asynchronous ops; None where there are none.

    Attributes:
        handlers: by kind of op.
        launched: the ops that a device was given; None where each has run when its handler returns.
        began: when the op run last began, in nanoseconds of the monotonic clock, where that was later than its call:
            it waited for other ranks that run it too. Else None.
    """

    began: int | None = None

    def __init__(
        self, handlers: Mapping[str, Handler], start: Start | None = None, launched: LaunchedOps | None = None
    ) -> None:
        self.handlers, self.launched = handlers, launched
        self._start = start

    def begin(self) -> None:
        """Before the rank's first op, in the thread that runs them."""

    def start(self, op: Op, received: Sequence[Payload]) -> AsyncOpHandle:
        """Starts an asynchronous op, given what its incoming edges brought, tokens too.

        Raises:
            RuntimeFailure: nothing starts such ops.
        """
        if self._start is None:
            raise RuntimeFailure(f"{op} is asynchronous, and nothing here starts such ops")
        return self._start(op, received)

    def waited(self, start: int, end: int) -> None:
        """Takes note that the rank waited for messages, from `start` to `end` in nanoseconds of that clock."""


class Worker:
    """One rank's step, from its first op to its last.

    Args:
        gang: where ranks of this process meet for ops that they run together; None where each is on its own.
        failure: of this process in the step; None where an error of an op ends the step at once.

    Attributes:
        times, async_times: start and end of every op that has ended, in nanoseconds of the monotonic clock; those of
            asynchronous ops apart.
        peak_held: the most activations held so far.
    """

    def __init__(
        self,
        wiring: Wiring,
        rank: int,
        dispatcher: Dispatcher | FrozenDispatcher,
        backend: Backend,
        transport: Transport,
        gang: Gang | None = None,
        failure: StepFailure | None = None,
    ) -> None:
        self.rank = rank
        self._failure = failure or StepFailure(is_shared=False)
        self.dispatcher = dispatcher
        self.times: list[tuple[Op, int, int]] = []
        self.async_times: list[tuple[Op, int, int]] = []
        self.peak_held = 0.0
        self._wiring = wiring
        self._backend, self._handlers = backend, backend.handlers
        self.transport = transport
        self._local: dict[Edge, Payload] = {}
        self._unsent: deque[UnsentMessage] = deque()
        self._launched = backend.launched
        self._held_back: int | None = None
        """An op that is not launched before all messages have left."""
        self._number, self._wired_ops = wiring.waiting(rank), wiring.wired_ops
        self._gang = gang
        self._standing: int | None = None
        """The op that this rank has come to, and others have not."""
        self._stream: AsyncStream | None = None
        self._next_async: list[int] = []
        """Asynchronous ops that this rank has come to, and others have not."""

    @property
    def finished(self) -> bool:
        """All ops ran and all their messages are with the transport."""
        if not self.dispatcher.finished or self._unsent or self._standing is not None:
            return False
        if self._launched is not None and not self._launched.is_empty:
            return False
        return self._stream is None or not (self._next_async or self._stream.num_open)

    def begin(self, wake: Callable[[], None] | None) -> None:
        """Before the first op, in the thread that runs them.

        Args:
            wake: ends this rank's wait for messages; None where it shares its thread with other ranks.
        """
        self._backend.begin()
        if self._launched is not None:
            self._launched.begin(wake)
        if self._wiring.graph.has_streams:
            self._stream = AsyncStream(self._backend.start, wake)

    def end(self) -> None:
        """After the last op, or after what went wrong: ends the stream of asynchronous ops."""
        if self._stream is not None:
            self._stream.close()

    def run_ready(self) -> bool:
        """Runs ops until the next one must wait; returns whether anything moved."""
        moved = False
        number, gang, arrivals = self._number, self._gang, self.transport.arrivals
        launched = self._launched
        while True:
            for edge in arrivals():  # before what a wake told of: `arrivals` takes that as well
                self.dispatcher.arrive(number[edge.consumer])
                moved = True
            if launched is not None and self._take_ended(launched):
                moved = True
            while self._unsent and (launched is None or self._unsent[0].after <= launched.num_ended):
                if not self._send(self._unsent[0]):
                    return moved
                self._unsent.popleft()
                moved = True
            if self._stream is not None and self._advance_async_ops(self._stream):
                moved = True
                continue
            if launched is not None:
                op = self._launchable(launched)
            else:
                op = self.dispatcher.next() if self._standing is None else self._standing
            if op is None:
                return moved
            if gang is not None and self._wiring.graph.gang[op] != ALONE:
                if self._standing is None:
                    gang.arrive(op)
                    self._standing = op
                    moved = True
                if not gang.may_run(op):
                    return moved
                self._standing = None
            self._run(op)
            moved = True

    def wait_for_first(self) -> bool:
        """Where this rank shares its thread: waits for the first op under way; whether there was one."""
        if self._launched is not None and not self._launched.is_empty:
            self._launched.wait()
            return True
        return self._stream is not None and self._stream.wait_for_first()

    def looks_again(self) -> int | None:
        """When to end a wait for messages at the latest (ns of the monotonic clock): an op may run on the device for
        longer than any message may take. None where nothing runs there."""
        if self._launched is None or self._launched.is_empty:
            return None
        return perf_counter_ns() + DEVICE_POLL_NS

    def waited(self, start: int, end: int) -> None:
        """Takes note that the executor waited for messages (ns of the monotonic clock)."""
        self._backend.waited(start, end)

    def arrive(self, edge: Edge) -> None:
        """Takes note of a message that the executor waited for."""
        self.dispatcher.arrive(self._number[edge.consumer])

    def awaited(self) -> Sequence[Edge]:
        """Messages from other ranks that the first op not yet run needs (those that came in included)."""
        number = self.dispatcher.first_awaited()
        return () if number is None else self._wiring.awaited[number]

    def stuck_on(self) -> str:
        """In words, what the rank waits for."""
        if self._unsent:
            after, edge, target, _ = self._unsent[0]
            if self._launched is not None and after > self._launched.num_ended:
                return f"rank {self.rank} waits for its device to end {edge.producer}, to send it to rank {target}"
            return f"rank {self.rank} waits to send {edge} to rank {target}: the channel is full"
        wiring = self._wiring
        if self._standing is not None and self._gang is not None:
            op = wiring.graph.ops[self._standing]
            others = ", ".join(map(str, self._gang.absent(self._standing) or [wiring.rank_of(op)]))
            return f"rank {self.rank} has come to {op.short()} of stage {op.stage} and waits for rank {others}"
        number = self.dispatcher.first_awaited()
        if number is not None:
            op = wiring.graph.ops[number]
            ran = {op for op, _, _ in self.times}
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

    def _advance_async_ops(self, stream: AsyncStream) -> bool:
        """Takes note of asynchronous ops that ended, and starts those whose turn it is; whether there were any."""
        moved = False
        gang, gang_of = self._gang, self._wiring.graph.gang
        for number, start, end in stream.ended():
            wired = self._wiring.wired_ops[number]
            self.async_times.append((wired.op, start, end))
            for _, edge, target, is_local in wired.sends:  # tokens, all of them
                if not is_local:
                    self._unsent.append(UnsentMessage(0, edge, target, TOKEN))
            self.dispatcher.finish(number)
            moved = True
        while (found := self.dispatcher.next_async()) is not None:
            if gang is not None and gang_of[found] != ALONE:
                gang.arrive(found)
            self._next_async.append(found)
            moved = True
        while self._next_async:
            number = self._next_async[0]
            if gang is not None and gang_of[number] != ALONE and not gang.may_run(number):
                break
            del self._next_async[0]
            wired = self._wiring.wired_ops[number]
            stream.start(number, wired.op, [self.transport.take(edge) for edge in wired.input_edges])
            moved = True
        return moved

    def _run(self, number: int) -> None:
        wired = self._wired_ops[number]
        launched = self._launched
        if launched is None:
            inputs, start, after = self._inputs(wired), perf_counter_ns(), 0
            outputs = self._handle(wired, inputs)  # the op has ended when its handler returns
            self.times.append((wired.op, self._backend.began or start, perf_counter_ns()))
        else:
            outputs = launched.launch(wired.op, partial(self._handle, wired, self._inputs(wired)))
            after = launched.num_launched
        for place, edge, target, is_local in wired.sends:
            payload = TOKEN if place < 0 else outputs[place]
            if is_local:
                self._local[edge] = payload
            elif after or self._unsent or not self.transport.send(edge, target, payload):
                self._unsent.append(UnsentMessage(after, edge, target, payload))
        self.dispatcher.finish(number)

    def _handle(self, wired: WiredOp, inputs: Sequence[Payload]) -> Sequence[Payload]:
        op, failure = wired.op, self._failure
        if failure.has_come(inputs) and op.kind in COMPUTES:
            return [FAILED] * len(wired.output_edges)
        try:
            return self._handlers[op.kind](wired, inputs)
        except Exception as error:
            error.add_note(f"in {op.short()} of stage {op.stage} on rank {self.rank}")
            if not failure.keeps(error):
                raise
            return [FAILED] * len(wired.output_edges)

    def _inputs(self, wired: WiredOp) -> list[Payload]:
        """What came in along the edges of an op that begins, without tokens."""
        take, local = self.transport.take, self._local
        inputs = [take(edge) if is_remote else local.pop(edge) for edge, is_remote in wired.inputs]
        if wired.num_tokens:
            del inputs[-wired.num_tokens :]
        if (held := self.dispatcher.held) > self.peak_held:
            self.peak_held = held
        return inputs

    def _take_ended(self, launched: LaunchedOps) -> bool:
        """Takes note of ops that have ended on the device; whether there were any."""
        before = launched.num_ended
        self.times += launched.ended()
        return launched.num_ended > before

    def _launchable(self, launched: LaunchedOps) -> int | None:
        """The next op, unless enough are under way, or it must come after all messages have left."""
        if launched.is_full:
            return None
        op, self._held_back = self._held_back, None
        if op is None:
            op = self.dispatcher.next() if self._standing is None else self._standing
        if op is None or (launched.is_empty and not self._unsent) or self._wired_ops[op].op.kind in WAITS_FOR_NOBODY:
            return op
        if self._standing is None:
            self._held_back = op
        return None

    def _send(self, message: UnsentMessage) -> bool:
        """Sends; False where the channel is full."""
        _, edge, target, payload = message
        if self._launched is None:
            return self.transport.send(edge, target, payload)
        with self._launched.queue.beside(payload):  # its op has ended
            return self.transport.send(edge, target, payload)


WAITS_FOR_NOBODY = frozenset({FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE})
"""Kinds of ops in whose middle a rank waits for no other. Before any other op is launched, all messages must have
left: a rank that stands in the middle of one sends nothing, and others may need just that to come there."""
COMPUTES = WAITS_FOR_NOBODY.union(OF_UPDATES)
"""Kinds of ops that compute nothing where a process has failed. All others may be waited for by other processes."""
DEVICE_POLL_NS = 1_000_000_000
"""Nanoseconds after which a rank that waits for messages looks at its device again, should no mark have woken it."""
TOKEN = Payload([])
"""What a token carries."""
