"""All ranks in one process, in turn: for debugging, tests and a single device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.worker import Worker


def nothing_comes() -> bool:
    """What is sent is there at once, so there is nothing to wait for."""
    return False


def run_local(workers: Sequence[Worker], pause: Callable[[], bool] = nothing_comes) -> None:
    """Runs every worker to its end, each as far as it goes, round after round.

    `pause` waits for a message that is under way, and returns False where none is.

    Raises:
        RuntimeFailure: no worker can go on; it names what each waits for.
    """
    while True:
        moved = False
        for worker in workers:
            moved = worker.run_ready() or moved
        if all(worker.finished for worker in workers):
            return
        if not moved and not any(worker.settle() for worker in workers) and not pause():
            waits = "\n".join(f"  {w.stuck_on()}" for w in workers if not w.finished)
            raise RuntimeFailure(f"no rank can go on:\n{waits}\nps.check(schedule) shows the cause")
