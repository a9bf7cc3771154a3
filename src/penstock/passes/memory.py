"""What a schedule's ops hold on each rank, beside what they may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cost import Costs
from penstock.dispatch import Graph
from penstock.engine.memory import levels
from penstock.engine.tolerance import EPSILON
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.async_ops import activations_added
from penstock.simulation.lowered import given_caps, memory_changes


@dataclass(frozen=True)
class Memory:
    """What ops do to the activations a rank holds, and how many it may hold.

    Attributes:
        change: per op number, in the units of the costs: above 0 held from its start, below 0 freed at its end.
        count: per op number, the same in stage activations, as `check` counts them.
        caps: per rank, in the units of the costs; inf for no limit.
        max_count: most stage activations a rank may hold from F to B or W: the schedule's own limit, or inf.
    """

    change: list[float]
    count: list[float]
    caps: list[float]
    max_count: float

    def levels(self, graph: Graph, rank: int) -> list[float]:
        """What `rank` holds from the start of each op of its row (those that free: after their end)."""
        return levels(self.change, graph.first, rank)

    def room(self, rank: int) -> float:
        """The cap with a little slack for sums of floats."""
        return self.caps[rank] * (1 + EPSILON)


def memory_of(schedule: Schedule, graph: Graph, costs: Costs, memory_limit: float | Sequence[float] | None) -> Memory:
    """The memory of a schedule under a limit, and under its own.

    Args:
        memory_limit: in the units of the costs' activations, one for all ranks or one per rank; None for none.

    Raises:
        ScheduleError: limits of the wrong number, or below 0.
    """
    most = math.inf if schedule.max_in_flight is None else schedule.max_in_flight
    again = {(op.stage, op.microbatch) for op in graph.ops if op.kind == "R"}
    count = [activations_added(op, again, graph.holds) for op in graph.ops]
    caps = given_caps(math.inf if memory_limit is None else memory_limit, schedule.num_ranks)
    return Memory(memory_changes(graph, costs), count, caps, most)


def check_fits(schedule: Schedule, graph: Graph, memory: Memory, hint: str) -> None:
    """Raises ScheduleError where the schedule as it is holds more than it may."""
    for rank in range(graph.num_ranks):
        for step, level in enumerate(memory.levels(graph, rank)):
            if level > memory.room(rank):
                op = schedule.order[rank][step]
                raise ScheduleError(
                    f"rank {rank}, step {step}, {op.short()} of stage {op.stage}: the rank would hold {level:g}, the "
                    f"limit is {memory.caps[rank]:g} (rule: memory); {hint}",
                    rule="memory",
                    rank=rank,
                    step=step,
                    op=op,
                )
