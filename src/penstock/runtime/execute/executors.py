"""What drives workers: one process per rank, or all ranks in one process, in turn.

run_rank     worker runs what is ready -> waits for messages of other processes -> ...
run_local    rank 0 runs what is ready -> rank 1 runs what is ready -> ... -> rank 0 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.conditioned import nothing_comes


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
        if not moved and not any(worker.settle() for worker in workers) and not pause():
            waits = "\n".join(f"  {w.stuck_on()}" for w in workers if not w.finished)
            raise RuntimeFailure(f"no rank can go on:\n{waits}\nps.check(schedule) shows the cause")
