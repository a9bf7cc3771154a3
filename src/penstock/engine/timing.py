"""The times of given orders: the sweep, and the space it works in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from penstock.engine import sweep
from penstock.engine.compiled import compiled
from penstock.engine.network import FLOATS, Array, Irregularities, Network

COMPILE_ABOVE = 20_000
"""Ops above which loading compiled code (about 0.6 s, once a process) pays for a single run."""


@dataclass(frozen=True)
class OrderTimes:
    """When orders run.

    Attributes:
        start: of each op, ms; 0 where it never runs.
        reached: how many places of each row were reached: all, or those before which the rows wait for one another.
        makespan: ms until the last row has ended, tails counted; -1 where some never do.
    """

    start: Array
    reached: list[int]
    makespan: float

    @property
    def complete(self) -> bool:
        """Whether every op has run."""
        return self.makespan >= 0


class Timer:
    """Times orders of one network, one after the other.

    Args:
        compile: whether by compiled code; by default where there are many ops.
    """

    def __init__(
        self, network: Network, irregular: Irregularities | None = None, compile: bool | None = None
    ) -> None:
        self._compile = network.num_ops > COMPILE_ABOVE if compile is None else compile
        self._network, self._irregular = self._taken(network), self._taken(irregular)
        self._sweep: ModuleType = compiled(sweep) if self._compile else sweep
        self._num_queues, self._num_ops = len(network.rank), network.num_ops

    def time(self, row: Array, duration: Array | None = None) -> OrderTimes:
        """Times orders.

        Args:
            row: of each place of the rows, the queue whose next op runs there.
            duration: ms of each queue's ops, an array; those of the network where not given.
        """
        space = self._new_space()
        makespan = self._earliest(row, duration, space)
        reached = np.asarray(space[2]) - np.asarray(self._network.row_first)[:-1]
        return OrderTimes(space[0], reached.tolist(), makespan)

    def makespan(self, row: Array, duration: Array | None = None) -> float:
        """The makespan alone, in space that is used again; args as of `time`."""
        return self._earliest(row, duration, self._space)

    def _earliest(self, row: Array, duration: Array | None, space: list[Array]) -> float:
        row, network = np.asarray(row, np.int64), self._network
        if duration is not None:
            network = network._replace(duration=duration if self._compile else duration.tolist())
        return float(self._sweep.earliest(network, self._irregular, row if self._compile else row.tolist(), *space))

    @cached_property
    def _space(self) -> list[Array]:
        return self._new_space()

    def _new_space(self) -> list[Array]:
        """What the sweep writes: starts, then what it works in."""
        num_rows, ints = self._network.num_ranks, np.int64
        sizes = (self._num_ops, float), (self._num_queues, ints), (num_rows, ints), (num_rows, float)
        space: list[Array] = [np.zeros(*each) for each in (*sizes, (2 * num_rows, ints), (num_rows, ints))]
        return space if self._compile else [each.tolist() for each in space]

    def _taken(self, arrays: Any) -> Any:
        """The arrays as the sweep takes them: compiled, as arrays; else as lists."""
        if arrays is None:
            return None
        taken: dict[str, Array] = {}
        for name, values in arrays._asdict().items():
            if values is not None and self._compile:
                taken[name] = np.asarray(values, np.float64 if name in FLOATS else np.int64)
            elif values is not None:
                taken[name] = values if isinstance(values, list) else values.tolist()
        return arrays._replace(**taken)
