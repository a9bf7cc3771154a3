"""The process that plans batches: it reads problems and lengths, and writes plans, until its input ends.
Without torch.

It is `python -m penstock.train.planning_process`. `BatchPlanner` starts it and asks.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from penstock.cost import CostsByLength
from penstock.planning.batches import BatchPlan, Lengths, plan_batch
from penstock.schedule import Schedule


@dataclass(frozen=True)
class BatchProblem:
    """What `plan_batch` needs besides the lengths: `dispatches` are those that it may choose from."""

    schedule: Schedule
    costs: CostsByLength
    num_replicas: int
    token_limit: int | None
    dispatches: tuple[str, ...]

    def plan(self, lengths: Lengths) -> BatchPlan:
        return plan_batch(
            lengths,
            self.schedule,
            self.costs,
            num_replicas=self.num_replicas,
            token_limit=self.token_limit,
            dispatches=self.dispatches,
        )


def serve(asked: Connection[Any, Any], answers: Connection[Any, Any]) -> None:
    """Answers requests. A problem is kept for the requests that follow; (step, lengths) is answered by (step,
    plan).
    """
    problem: BatchProblem | None = None
    while True:
        try:
            value = asked.recv()
        except EOFError:
            return
        if isinstance(value, BatchProblem):
            problem = value
            continue
        step, lengths = value
        assert problem is not None
        try:
            answer: BatchPlan | str = problem.plan(lengths)
        except ValueError as error:  # what planning refuses; anything else is a mistake, and ends the process
            answer = str(error)
        answers.send((step, answer))


def main() -> None:
    # What else would print goes where errors go.
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        serve(Connection(os.dup(0), writable=False), answers)


if __name__ == "__main__":
    # By the module's own name, so that what is pickled here is of the classes that the parent knows.
    from penstock.train import planning_process

    planning_process.main()
