"""Pairs: a forward of one microbatch and a backward of another that a rank runs as one op.

    order      rank 0 | 0F3 3B1 0F4          as a pair   rank 0 | 0F3+3B1 0F4
    runs as    |== 0F3 ==|==== 3B1 ====|                 |== 0F3 ==|
                                                         |==== 3B1 ===|

This is what DualPipe is about: while one of the two waits for its messages (all-to-all of experts, say), the other
one computes. torch writes such a pair as `(0F3;3B1)OVERLAP_F_B`.

Both ops stay in the order of their rank, the forward first and the backward next. That they are a pair is said beside
the order (`Schedule.pairs`), so whatever goes through ops finds each of them, and an order without its pairs is a
schedule too. What being a pair means is said here and nowhere else:

- the pair starts when both have what they need, so the forward waits for what the backward needs
  (`dependencies.predecessors`);
- both end together, when the pair's time (`Costs.pair_duration`) is over: it is the forward that takes it, and the
  backward, which comes right after it, takes none;
- a rank that may run any ready op still takes pairs in their turn, so that nothing comes between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, Op

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule

RULE = "pairs"
JOIN = "+"
"""Between the two ops of a pair, where it is written."""


class Pair(NamedTuple):
    """A forward and the backward that its rank runs with it. Written 0F3+3B1.

    Attributes:
        forward: the F.
        backward: the B, of another microbatch.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("dualpipe-v", 2, 4, overlap=True)
        >>> pair = s.pairs[0]
        >>> str(pair), pair.forward.microbatch, pair.backward.microbatch
        ('0F3+3B1', 3, 1)
    """

    forward: Op
    backward: Op

    def __str__(self) -> str:
        return f"{self.forward}{JOIN}{self.backward}"


def sorted_pairs(pairs: Iterable[Any]) -> tuple[Pair, ...]:
    """Pairs in the order in which a schedule keeps them. Raises ScheduleError for what are none."""
    found = set()
    for each in pairs:
        try:
            forward, backward = (Op(*op) for op in each)
        except (TypeError, ValueError):
            raise ScheduleError(
                f"{each!r} is no pair: give a forward and a backward, like (Op('F', 0, 3), Op('B', 3, 1))", rule=RULE
            ) from None
        found.add(Pair(forward, backward))
    return tuple(sorted(found))


def paired_steps(schedule: Schedule) -> list[list[tuple[Op, ...]]]:
    """Each rank's row, op by op, the two of a pair at once where they stand side by side."""
    backward_of = dict(schedule.pairs)
    rows = []
    for row in schedule.order:
        steps: list[tuple[Op, ...]] = []
        for op in row:
            if steps and len(steps[-1]) == 1 and backward_of.get(steps[-1][0]) == op:
                steps[-1] = (*steps[-1], op)
            else:
                steps.append((op,))
        rows.append(steps)
    return rows


def of_steps(rows: Iterable[Iterable[Sequence[Op]]]) -> tuple[tuple[tuple[Op, ...], ...], tuple[Pair, ...]]:
    """The other way: the rows op by op, and the pairs among them."""
    order, pairs = [], []
    for row in rows:
        ops: list[Op] = []
        for step in row:
            ops.extend(step)
            if len(step) == 2:
                pairs.append(Pair(*step))
        order.append(tuple(ops))
    return tuple(order), sorted_pairs(pairs)


def separate_pairs(schedule: Schedule) -> Schedule:
    """The schedule with the ops of each pair one after the other, each for itself.

        before   rank 0 | 0F3+3B1 0F4          after    rank 0 | 0F3 3B1 0F4

    Args:
        schedule: with or without pairs.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("dualpipe-v", 2, 4, overlap=True)
        >>> len(s.pairs), len(ps.passes.separate_pairs(s).pairs)
        (6, 0)
    """
    return replace(schedule, pairs=()) if schedule.pairs else schedule


def require_no_pairs(schedule: Schedule, what: str) -> None:
    """Raises ScheduleError where ops are pairs; `what` says who takes none."""
    if schedule.pairs:
        raise ScheduleError(
            f"{schedule.name} has {len(schedule.pairs)} pairs of a forward and a backward that run as one "
            f"({schedule.pairs[0]} for one), and {what}; give ps.passes.separate_pairs(schedule), and join pairs "
            "again with ps.passes.overlap_pairs (rule: pairs)",
            rule=RULE,
        )


def wrong_pair(schedule: Schedule) -> tuple[int, int, Op, str] | None:
    """The first pair that cannot be one: rank, step and op, and what is wrong with it. None where all are right."""
    if not schedule.pairs:
        return None  # without its ops being asked for
    spots = {op: (rank, step) for rank, row in enumerate(schedule.order) for step, op in enumerate(row)}
    taken: dict[Op, Pair] = {}
    for pair in schedule.pairs:
        forward, backward = pair
        there = next((op for op in pair if op in spots), None)
        if there is None:
            return 0, 0, forward, f"the pair {pair} is of ops that no rank runs"
        spot = (*spots[there], there)
        for op, kind, what in ((forward, FORWARD, "forward"), (backward, BACKWARD, "full backward")):
            if op.kind != kind:
                halves = "; a backward in halves (I, W) is no part of a pair" if op.kind in ("I", "W") else ""
                return *spot, f"in the pair {pair} {op} is of kind {op.kind}, where a {what} ({kind}) is due{halves}"
            if op not in spots:
                return *spot, f"the pair {pair} needs {op}, which no rank runs"
            if op in taken:
                return *spots[op], op, f"it is in two pairs, {taken[op]} and {pair}; an op runs once"
            taken[op] = pair
        (rank, step), (other, then) = spots[forward], spots[backward]
        spot = rank, step, forward
        if rank != other:
            return *spot, f"in the pair {pair} {backward} is on rank {other}: the two of a pair run on one rank"
        if forward.microbatch == backward.microbatch and not schedule.graph.num_microbatches:
            said = f"the pair {pair} is of one microbatch, {forward.microbatch}, whose backward needs this forward"
            return *spot, f"{said}; pair those of different microbatches"
        if then != step + 1:
            said = f"in the pair {pair} the backward stands at step {then}"
            return *spot, f"{said}: it comes right after its forward, at step {step + 1}"
        for op in pair:
            if len(schedule.hosts(op)) > 1:
                return *spots[op], op, f"in the pair {pair} it is run by several ranks together, which no pair is"
    return None
