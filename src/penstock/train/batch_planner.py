"""Plans the batch of each step in another process, while the step before it runs.

rank 0                step 4 runs       | step 5 runs       |
planning process      plans step 5      | plans step 6      |
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from penstock.cost import CostsByLength
from penstock.planning.batches import BatchPlan, Lengths
from penstock.runtime import RuntimeFailure
from penstock.train.planning_process import BatchProblem


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
            [sys.executable, "-m", "penstock.train.planning_process"],
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
            raise RuntimeFailure(f"the batch of step {step} can't be planned: {answer}")
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
                raise RuntimeFailure(
                    f"the batch of step {step} was not planned within {self._timeout:g} s; raise --timeout, or give "
                    "--packing arrival"
                )
            _, answer = self._from.recv()
        except (EOFError, OSError):
            raise RuntimeFailure(
                f"the process that plans batches has ended (exit code {self._process.poll()}) before step {step} was "
                "planned; go on from the last checkpoint, with --packing arrival if it happens again"
            ) from None
        return answer
