"""What drives workers: one process per rank, or all ranks in one process, in turn or in a thread each.

run_rank       worker runs what is ready -> waits for messages of other ranks -> ...
run_local      rank 0 runs what is ready -> rank 1 runs what is ready -> ... -> rank 0 ...
RankThreads    `run_rank` in a thread per rank, each with its end of the transport; one that fails ends all of them
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

from penstock.runtime.errors import PeerLost, RuntimeFailure
from penstock.runtime.execute.gang import ThreadBarrier
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.conditioned import Conditions, nothing_comes
from penstock.runtime.transport.loopback import Mailbox


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


def run_local(workers: Sequence[Worker], pause: Callable[[], bool] = nothing_comes) -> None:
    """Runs every worker to its end, each as far as it goes, round after round.

    `pause` waits for a message that is under way, and returns False where none is.

    Raises:
        RuntimeFailure: no worker can go on; it names what each waits for.
    """
    for worker in workers:
        worker.begin(None)
    while True:
        moved = False
        for worker in workers:
            moved = worker.run_ready() or moved
        if all(worker.finished for worker in workers):
            return
        if not moved and not any(worker.wait_for_first() for worker in workers) and not pause():
            waits = "\n".join(f"  {w.stuck_on()}" for w in workers if not w.finished)
            raise RuntimeFailure(f"no rank can go on:\n{waits}\nps.check(schedule) shows the cause")


def run_threads(name: str, works: Sequence[Callable[[], None]], lose: Callable[[int], None]) -> None:
    """Runs functions to their ends, a thread each. Raises what went wrong first, not what came of that elsewhere.

    Args:
        name: of the threads, before their numbers.
        lose: called with the number of one that failed, so that the others end; with 0 where the wait is broken off.
    """
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            works[place]()
        except BaseException as error:
            errors.append(error)
            lose(place)

    threads = [threading.Thread(target=run, args=(place,), name=f"{name}-{place}") for place in range(len(works))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        lose(0)
        raise
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])


class RankThreads:
    """The ranks of a pipeline.

    Args:
        choice: how messages travel, which are handed over: its bound holds, its name makes no difference.
        conditions: of the links. timeout: seconds that any wait may last.

    Attributes:
        transports: by rank. barrier: where they meet for ops that they run together.
    """

    def __init__(self, num_ranks: int, choice: TransportChoice, conditions: Conditions, timeout: float) -> None:
        self._boxes = [Mailbox() for _ in range(num_ranks)]
        self.transports: list[Transport] = choice.between_threads(self._boxes, conditions, timeout)
        self.barrier = ThreadBarrier(num_ranks, timeout)

    def run(self, workers: Sequence[Worker]) -> None:
        """Runs every worker to its end. Raises as `run_threads`."""
        works = [partial(run_rank, worker) for worker in workers]
        run_threads("penstock-rank", works, lambda place: self._lose(workers[place].rank))

    def close(self) -> None:
        for transport in self.transports:
            transport.close()

    def _lose(self, rank: int) -> None:
        self.barrier.lose(rank)
        for box in self._boxes:
            box.lose(rank)
