"""The ranks in this process as they run a step: a worker each, with its end of the transport and its handlers.

one process per rank: `run_rank`      all ranks here: in turn, by `run_local`, or in a thread each, `RankThreads`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.dispatch import Dispatch, Dispatcher
from penstock.runtime.execute.active_plan import ActivePlan
from penstock.runtime.execute.executors import RankThreads, run_local, run_rank
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.handlers.backend import Backend
from penstock.runtime.execute.lockstep import Lockstep
from penstock.runtime.execute.plan import StepPlan
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.conditioned import Conditions, local_transports, nothing_comes


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
        self, running: ActivePlan, plan: StepPlan, transport: Transport | None, training: bool = True
    ) -> list[Worker]:
        """Runs a step of some kind to its end.

        Args:
            running: the configuration. plan: of this kind of step.
            transport: between processes; None where all ranks are here.
        """
        graph, threads = plan.wiring.graph, self._threads
        takes_turns = transport is None and threads is None
        # Forwards alone hold nothing, so nothing would keep a dynamic rank from taking in all messages at once.
        # Where processes decide together, ranks that are all in one would have to take turns alike too; nothing comes
        # late to them.
        is_free = training and not (takes_turns and self._together is not None)
        dispatch = running.dispatch if is_free else Dispatch.FROZEN
        together = self._together if dispatch.is_dynamic else None
        decides = Dispatcher if together is None else together.dispatcher
        gang = Gang(graph) if takes_turns and graph.gang_ops else None
        end_of, pause = self._ends(plan.wiring.schedule.num_ranks, transport)
        workers: list[Worker] = []
        for rank in self._ranks:
            dispatcher = decides(graph, rank, dispatch, plan.memory_change, plan.caps[rank])
            table = self._devices.table(rank, plan, training, gang)
            workers.append(Worker(plan.wiring, rank, dispatcher, table, end_of(rank), gang))
        if takes_turns:
            run_local(workers, pause)
        else:
            signatures, digest = self._devices.signatures
            threaded = dispatch.is_dynamic or graph.has_streams or self._devices.runs_ahead
            for worker in workers:
                self._choice.route(worker.transport, running.configuration.delegated)
                worker.transport.begin(plan.expected, signatures, digest, threaded, plan.window)
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

    def _ends(
        self, num_ranks: int, transport: Transport | None
    ) -> tuple[Callable[[int], Transport], Callable[[], bool]]:
        """What gives each rank its end, and what waits for a message where ranks take turns."""
        if transport is not None:
            return lambda rank: transport, nothing_comes
        if self._threads is not None:
            return self._threads.transports.__getitem__, nothing_comes
        return local_transports(num_ranks, self._conditions)
