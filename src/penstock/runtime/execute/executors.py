"""Runs a step on the ranks in this process. Each rank has a worker, its end of the transport, and its handlers.

    run_rank       worker runs what is ready -> waits for messages of other ranks -> ...
    run_local      rank 0 runs what is ready -> rank 1 runs what is ready -> ... -> rank 0 ...
    RankThreads    `run_rank` in a thread per rank (`emulation/`)

A process with one rank uses `run_rank`. If all ranks are in one process, they take turns (`run_local`), or each has a
thread.

Where other processes run the same ops, as replicas that update within a step or as shards do, the collectives of all
ranks here must begin in the order in which they begin there. A frozen order gives that to a single rank. Ranks that
take turns must take the same turns too, whatever comes late. So a turn then begins and ends with nothing under way,
and whose turn is next follows from the orders alone:

    rank 0 | F0 F1 U0 |waits for its asynchronous ops|                   |F2 ...      U0 adds up over the replicas
    rank 1 |          |waits for messages to it      |F0 B0 U1 |waits ...|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Protocol

from penstock.dispatch import Dispatch, Dispatcher, FrozenDispatcher
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.gang import Gang, Lockstep, LockstepDispatcher
from penstock.runtime.execute.plan import ActivePlan, StepPlan
from penstock.runtime.execute.step_end import StepFailure
from penstock.runtime.execute.worker import Backend, Worker
from penstock.runtime.transport.base import StepMessages, Transport
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.link_conditions import ConditionedTransport, Conditions, sleep_until
from penstock.runtime.transport.loopback import Mailbox, loopback_ends


class Devices(Protocol):
    """What the ranks in this process run their ops on."""

    def table(self, rank: int, plan: StepPlan, training: bool, gang: Gang | None) -> Backend:
        """The handlers of a rank in a step. `gang`: where ranks take turns."""

    @property
    def runs_ahead(self) -> bool:
        """Whether ranks launch ops behind others that have not ended, and are woken when these have."""

    @property
    def signatures(self) -> tuple[list[str], int]:
        """What messages of each microbatch of the step look like, in words, and a number for all of it."""


class RankThreads(Protocol):
    """The ranks of this process, with a thread each."""

    @property
    def transports(self) -> Sequence[Transport]:
        """By rank."""

    def run(self, workers: Sequence[Worker]) -> None:
        """Runs every worker to its end."""


class StepExecutor:
    """What runs the steps of a pipeline.

    Args:
        choice, conditions: how messages travel, and what is injected into links.
        together: those who decide together with this process; None where there are none.
        threads: where all ranks are here and have a thread each; None where each has a process, or they take turns.
    """

    def __init__(
        self,
        devices: Devices,
        ranks: tuple[int, ...],
        choice: TransportChoice,
        conditions: Conditions | None = None,
        together: Lockstep | None = None,
        threads: RankThreads | None = None,
    ) -> None:
        self._devices, self._ranks = devices, ranks
        self._choice, self._conditions, self._together, self._threads = choice, conditions, together, threads

    def run(
        self,
        running: ActivePlan,
        plan: StepPlan,
        transport: Transport | None,
        training: bool = True,
        failure: StepFailure | None = None,
    ) -> list[Worker]:
        """Runs a step of some kind to its end.

        Args:
            running: the configuration. plan: of this kind of step.
            transport: between processes; None where all ranks are here.
            failure: of this process; None where an error of an op ends the step at once.
        """
        graph, threads = plan.wiring.graph, self._threads
        takes_turns = transport is None and threads is None
        # Forwards alone hold nothing, so nothing would keep a dynamic rank from taking in all messages at once.
        takes_turns_alike = takes_turns and self._together is not None
        is_free = training and not takes_turns_alike
        dispatch = running.dispatch if is_free else Dispatch.FROZEN
        together = self._together if dispatch.is_dynamic else None
        decides = Dispatcher if together is None else partial(LockstepDispatcher, together)
        changes, in_order = plan.memory_change, not (dispatch.is_dynamic or graph.has_streams)
        gang = Gang(graph) if takes_turns and graph.gang_ops else None
        ends = self._ends(plan.wiring.schedule.num_ranks, transport)
        workers: list[Worker] = []
        for rank in self._ranks:
            dispatcher = (
                FrozenDispatcher(graph, rank, changes)
                if in_order
                else decides(graph, rank, dispatch, changes, plan.caps[rank])
            )
            table = self._devices.table(rank, plan, training, gang)
            workers.append(Worker(plan.wiring, rank, dispatcher, table, ends[rank], gang, failure))
        if takes_turns:
            run_local(workers, alike=takes_turns_alike)
        else:
            signatures, digest = self._devices.signatures
            threaded = dispatch.is_dynamic or graph.has_streams or self._devices.runs_ahead
            step = StepMessages(plan.expected, signatures, digest, threaded, plan.window)
            for worker in workers:
                self._choice.route(worker.transport, running.configuration.delegated)
                worker.transport.begin(step)
            if threads is not None:
                threads.run(workers)
            else:
                worker = workers[0]
                does_other_things = graph.has_streams or self._devices.runs_ahead
                if does_other_things and together is not None and not together.is_first:
                    together.listen(graph.first[worker.rank + 1] - graph.first[worker.rank], worker.transport.wake)
                run_rank(worker)
            for worker in workers:
                worker.transport.end()
        if together is not None:
            together.end()
        return workers

    def _ends(self, num_ranks: int, transport: Transport | None) -> Sequence[Transport]:
        """Each rank's end, by rank."""
        if transport is not None:
            return [transport] * num_ranks
        if self._threads is not None:
            return self._threads.transports
        return loopback_ends([Mailbox() for _ in range(num_ranks)], self._conditions)


def run_rank(worker: Worker) -> None:
    """Runs the worker to its end, in a thread of its own.

    Raises:
        DeadlineExceeded, PeerLost: a message did not come; the error says which, from whom.
    """
    transport = worker.transport
    worker.begin(transport.wake)
    try:
        while True:
            worker.run_ready()
            if worker.finished:
                return
            start = perf_counter_ns()
            edges = transport.wait(worker.awaited(), worker.stuck_on, worker.looks_again())
            worker.waited(start, perf_counter_ns())
            for edge in edges:
                worker.arrive(edge)
    finally:
        worker.end()


def run_local(workers: Sequence[Worker], alike: bool = False) -> None:
    """Runs every worker to its end, each as far as it goes, round after round.

    Args:
        alike: whether turns must not depend on the clock, as other processes take the same.

    Raises:
        RuntimeFailure: no worker can go on; it names what each waits for.
    """
    for worker in workers:
        worker.begin(None)
    try:
        while not all(worker.finished for worker in workers):
            moved = False
            for worker in workers:
                moved = (_turn_alike(worker, workers) if alike else worker.run_ready()) or moved
            if not (moved or any(worker.wait_for_first() for worker in workers) or _wait_for_messages(workers, min)):
                waits = "\n".join(f"  {w.stuck_on()}" for w in workers if not w.finished)
                raise RuntimeFailure(
                    f"no rank can go on:\n{waits}\nThe schedule was checked before it ran, so this is a mistake in "
                    "Penstock; please report it"
                )
    finally:
        for worker in workers:
            worker.end()


def _wait_for_messages(workers: Sequence[Worker], which: Callable[[list[int]], int]) -> bool:
    """Waits for the first or for all (`min`, `max`) of the messages that were sent between these ranks and have not
    come; False where there is none.
    """
    ends = (worker.transport for worker in workers)
    dues = [due for end in ends if isinstance(end, ConditionedTransport) for due in end.dues()]
    if dues:
        sleep_until(which(dues))
    return bool(dues)


def _turn_alike(worker: Worker, workers: Sequence[Worker]) -> bool:
    """A turn that begins and ends with nothing under way; whether anything moved."""
    _wait_for_messages(workers, max)
    moved = False
    while worker.run_ready() or worker.wait_for_first():
        moved = True
    return moved
