"""CP-SAT on problems of any stages: the shortest order of all ops, or of those in a window of a sequence.

    before | window            | after                      minimise over the freed ops
    -------+-------------------+-----------------           max(start + duration + tail)
    fixed  | in a better order | same order, moved

A freed op may start no earlier than what is before it allows. Once it has ended, at least the longest way through
what is after it is still to go (its tail). Above all, windows shorten the warm-up and the cool-down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.network import Array
from penstock.planning.graph.bounds import op_arrays
from penstock.planning.op_arrays import OpArrays, paths
from penstock.planning.order_model import ROUGH_STEPS, STOPPING, OrderModel, TimeGrid

if TYPE_CHECKING:
    from penstock.planning.graph.search import GraphSearch

MOST_OPS = 2_000
"""Ops above which CP-SAT finds nothing in the time that local search needs, if all are freed."""
_FIRST_WINDOW, _LARGEST_WINDOW = 64, 384
_SLICE = 2.0
"""Seconds for one window, at most."""


def lessen(search: GraphSearch, until: float) -> None:
    """Asks for the least makespan until `until` (seconds since the search began): first in few steps of time, which
    closes in on it, then in more, which proves it."""
    num_ops = search.problem.num_ops
    for num_steps in ROUGH_STEPS if num_ops <= MOST_OPS else ():
        left = until - STOPPING - search.seconds
        if search.closed or left <= 0:
            return
        sequence, bound = _shortened(search, search.sequence, 0, num_ops, num_steps, left)
        search.take(sequence, "exact")
        search.improve_bound(bound)
        search.report(search.how)


def shorten_windows(search: GraphSearch, until: float) -> None:
    """Frees window after window, both ends first, larger ones where no window of a size helps any more."""
    problem, size = search.problem, _FIRST_WINDOW
    sequence, best = search.sequence, search.value
    while size <= _LARGEST_WINDOW:
        improved = False
        for first in _windows(problem.num_ops, size):
            left = until - search.seconds
            if search.closed or left <= STOPPING:
                return
            steps, last = ROUGH_STEPS[0], min(first + size, problem.num_ops)
            found, _ = _shortened(search, sequence, first, last, steps, min(left, _SLICE))
            value, start = problem.placed(found)
            if 0 <= value <= best:  # another order of the same length may let the next window shorten it
                improved |= search.take(found, "ends")
                sequence, best = problem.sorted_by_start(found, start), value
        if not improved:
            if size >= problem.num_ops:
                break
            size *= 2


def _windows(num_ops: int, size: int) -> list[int]:
    """Where windows begin: at both ends first, and then, with overlap, from both ends to the middle."""
    last = max(0, num_ops - size)
    places: list[int] = []
    for offset in range(0, last // 2 + 1, max(1, size // 2)):
        places += [place for place in (offset, last - offset) if place not in places]
    return places[:6]


def _shortened(
    search: GraphSearch, sequence: Array, first: int, last: int, num_steps: int, seconds: float
) -> tuple[Array, float]:
    """The sequence with the ops at places `first` to `last - 1` in a better order, if one is found, and a bound (ms)
    on every such sequence."""
    problem = search.problem
    value, start = problem.placed(sequence)
    times = (float(ms) for ms in (*problem.network.duration, *problem.more.need_delay))
    model = OrderModel(TimeGrid.of(times, value, num_steps))
    of_place = problem.ops_of(sequence)
    made = model.add_ops(_freed(op_arrays(problem), start, of_place, first, last))
    for op, ms in zip(made, start[of_place[first:last]].tolist(), strict=True):
        model.hint(op, ms)
    model.minimize(made)
    answer = model.solve(seconds, search.seed, probes=True)
    if not answer.found:
        return sequence, 0.0
    found = np.array(sequence)
    freed = found[first:last]
    # Of ops that start together, those of no length go first.
    found[first:last] = freed[
        np.lexsort((problem.network.duration[freed] > 0, [model.value(op.start) for op in made]))
    ]
    return found, answer.bound


def _freed(ops: OpArrays, start: Array, of_place: Array, first: int, last: int) -> OpArrays:
    """The ops at places `first` to `last - 1` of a sequence, between those before, which start as they do, and those
    after, which keep their order.

    Args:
        start: of each op, in ms.
        of_place: the op at each place.
    """
    place = np.argsort(of_place)
    before, after = place < first, place >= last
    head, ended = ops.head.copy(), start + ops.duration
    source, to, rows, cap = [ops.source], [ops.to], [], []
    for row, most in zip(ops.rows, ops.cap, strict=True):
        in_order = row[np.argsort(place[row])]
        earlier, later = in_order[before[in_order]], in_order[after[in_order]]
        mine = in_order[len(earlier) : len(in_order) - len(later)]
        head[mine] = np.maximum(head[mine], ended[earlier[-1:]].max(initial=0.0))
        if len(later):
            source += [mine, later[:-1]]
            to += [np.full(len(mine), later[0]), later[1:]]
        rows.append(place[mine] - first)
        cap.append(most - float((ops.takes - ops.gives)[earlier].sum()))
    met = before[ops.source]
    np.maximum.at(head, ops.to[met], ended[ops.source[met]] + ops.delay[met])
    sources, targets = np.concatenate(source), np.concatenate(to)
    delay = np.concatenate([ops.delay, np.zeros(len(sources) - len(ops.delay))])
    _, tail = paths(ops.duration, sources, targets, delay)
    inside = ~(before | after)[ops.source] & ~(before | after)[ops.to]
    freed = of_place[first:last]
    source_of, to_of = (place[each[inside]] - first for each in (ops.source, ops.to))
    return OpArrays(
        ops.duration[freed], head[freed], tail[freed], rows, source_of, to_of, ops.delay[inside], ops.takes[freed],
        ops.gives[freed], cap,
    )  # fmt: skip
