"""One process a rank: runs this rank's worker and waits for messages where it must."""

from __future__ import annotations

from penstock.runtime.transports.group import GroupTransport
from penstock.runtime.worker import Worker


def run_rank(worker: Worker, transport: GroupTransport) -> None:
    """Runs the worker to its end.

    Raises:
        DeadlineExceeded, PeerLost: a message did not come; the error says which, from whom.
    """
    while True:
        worker.run_ready()
        if worker.finished:
            return
        for edge in transport.wait(worker.awaited(), worker.stuck_on):
            worker.arrive(edge)
