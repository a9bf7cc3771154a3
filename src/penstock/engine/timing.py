"""The times of given orders: the sweep, and the space it works in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np

from penstock.engine import sweep
from penstock.engine.arrays import Array, prepared, taken
from penstock.engine.compiled import compiled, is_compiled
from penstock.engine.network import Irregularities, Network


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
        compile: whether as C; by default where that can be had.
    """

    def __init__(
        self, network: Network, irregular: Irregularities | None = None, compile: bool | None = None
    ) -> None:
        self._as_c = is_compiled() if compile is None else compile
        self._network = prepared(network, self._as_c)
        self._irregular = None if irregular is None else prepared(irregular, self._as_c)
        self._sweep: ModuleType = compiled(sweep) if self._as_c else sweep
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
        network = self._network
        if duration is not None:
            network = network._replace(duration=taken(duration, np.float64, self._as_c))
        return float(self._sweep.earliest(network, self._irregular, taken(row, np.int64, self._as_c), *space))

    @cached_property
    def _space(self) -> list[Array]:
        return self._new_space()

    def _new_space(self) -> list[Array]:
        """What the sweep writes: starts, then what it works in."""
        num_rows, ints = self._network.num_ranks, np.int64
        sizes = (self._num_ops, float), (self._num_queues, ints), (num_rows, ints), (num_rows, float)
        space: list[Array] = [np.zeros(*each) for each in (*sizes, (2 * num_rows, ints), (num_rows, ints))]
        return space if self._as_c else [each.tolist() for each in space]
