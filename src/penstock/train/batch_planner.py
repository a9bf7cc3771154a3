"""Plans the batch of each step in another process, while the step before it runs.

rank 0                step 4 runs       | step 5 runs       |
planning process      plans step 5      | plans step 6      |

The process is `python -m penstock.train.batch_planner`, without torch: it reads problems and lengths, and writes
plans, until its input ends. `BatchPlanner` starts it and asks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
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


class BatchPlanner:
    """Plans batches in a process of its own, which ends with this one.

    Args:
        timeout: most seconds to wait for an answer.

    Attributes:
        waited: seconds that training has waited for plans.
    """

    def __init__(self, problem: BatchProblem, timeout: float) -> None:
        self.waited = 0.0
        self._problem, self._timeout = problem, timeout
        self._asked: list[int] = []
        # In a session of its own: Ctrl-C is for the ranks, which first end their step. It ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.train.batch_planner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to: Connection[Any, Any] = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._from: Connection[Any, Any] = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._send(problem)

    def use(self, costs: CostsByLength) -> None:
        """Plans from now on over other costs."""
        self._problem = replace(self._problem, costs=costs)
        self._send(self._problem)

    def ask(self, step: int, lengths: Lengths) -> None:
        """Starts planning a step."""
        self._asked.append(step)
        self._send((step, lengths))

    def plan(self, step: int, lengths: Lengths) -> BatchPlan:
        """The plan of a step. It is asked for now if it was not before. Other steps that were asked for are dropped.

        Raises:
            RuntimeFailure: the process has ended, answers too late, or says that no plan keeps the limits.
        """
        if step not in self._asked:
            self.ask(step, lengths)
        began = time.perf_counter()
        answer = self._answer(step)
        while self._asked.pop(0) != step:
            answer = self._answer(step)
        self.waited += time.perf_counter() - began
        if not isinstance(answer, BatchPlan):
            raise _failed(f"the batch of step {step} can't be planned: {answer}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._to.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:  # amid a plan that nobody needs any more
            self._process.kill()
            self._process.wait()
        self._from.close()

    def _send(self, value: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever waits for the answer is told
            self._to.send(value)

    def _answer(self, step: int) -> object:
        try:
            if not self._from.poll(self._timeout):
                raise _failed(
                    f"the batch of step {step} was not planned within {self._timeout:g} s; raise --timeout, or give "
                    "--packing arrival"
                )
            _, answer = self._from.recv()
        except (EOFError, OSError):
            raise _failed(
                f"the process that plans batches has ended (exit code {self._process.poll()}) before step {step} was "
                "planned; go on from the last checkpoint, with --packing arrival if it happens again"
            ) from None
        return answer


def _failed(why: str) -> Exception:
    from penstock.runtime.errors import RuntimeFailure  # loads torch, which the planning process does without

    return RuntimeFailure(why)


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
    from penstock.train import batch_planner

    batch_planner.main()
