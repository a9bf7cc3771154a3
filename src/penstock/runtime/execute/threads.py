"""Ranks that are threads of this process, each with its end of the transport; one that fails ends all of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.runtime.errors import PeerLost
from penstock.runtime.execute.executors import run_rank
from penstock.runtime.execute.gang import ThreadBarrier
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.choose import TransportChoice
from penstock.runtime.transport.conditioned import Conditions
from penstock.runtime.transport.loopback import Mailbox


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
        """Runs every worker to its end. Raises what went wrong first, rather than what came of that elsewhere."""
        errors: list[BaseException] = []

        def work(worker: Worker) -> None:
            try:
                run_rank(worker)
            except BaseException as error:
                errors.append(error)
                self._lose(worker.rank)

        threads = [
            threading.Thread(target=work, args=(worker,), name=f"penstock-rank-{worker.rank}") for worker in workers
        ]
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
            box.lose(rank)
