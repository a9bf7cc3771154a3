"""The earliest start of every op of given orders: as soon as its row comes to it and what it needs is there.

    row 0 | 0 1 2 3         op 4 waits for a message from op 0, op 2 for one from op 5
    row 1 | 4 5 6 7         starts: 0, then 1 and 4, then 5 and 2, ...

Whatever the order in which rows are gone through, the starts are the same, and where the rows end: no op ever takes
back that it is ready. So one sweep is a proof that orders end, or that they never do. Written to be compiled.
"""

from __future__ import annotations

from typing import Any

Array = Any
"""A list or an array of numbers."""


def earliest(
    first: Array,
    row_of: Array,
    missing: Array,
    edge_first: Array,
    edge_to: Array,
    duration: Array,
    late: Array,
    start: Array,
    place: Array,
    free: Array,
    waiting: Array,
    is_waiting: Array,
) -> int:
    """Fills in the starts; returns how many ops have one: fewer than there are where rows wait for one another.

    Args:
        first: row r has ops `first[r]` to `first[r + 1] - 1`, in its order.
        row_of: of each op. missing: of each op, how many edges lead to it; it is counted down.
        edge_first, edge_to: the edges from op o are `edge_to[edge_first[o]:edge_first[o + 1]]`.
        duration: of each op (ms). late: of each edge, ms from its op's end until what it carries is there.
        start: 0 at first; then when each op starts (ms), or may start as far as is known where it never does.
        place, free: of each row, the op it stands at, and when it is free; `first` and 0 at first.
        waiting, is_waiting: working space, an entry per row.
    """
    num_rows = len(first) - 1
    for row in range(num_rows):
        waiting[row] = num_rows - 1 - row
        is_waiting[row] = 1
    depth, done = num_rows, 0
    while depth > 0:
        depth -= 1
        row = waiting[depth]
        is_waiting[row] = 0
        op = place[row]
        while op < first[row + 1] and missing[op] == 0:
            if free[row] > start[op]:
                start[op] = free[row]
            end = start[op] + duration[op]
            free[row] = end
            done += 1
            op += 1
            place[row] = op
            for edge in range(edge_first[op - 1], edge_first[op]):
                target = edge_to[edge]
                missing[target] -= 1
                if end + late[edge] > start[target]:
                    start[target] = end + late[edge]
                other = row_of[target]
                if missing[target] == 0 and place[other] == target and other != row and is_waiting[other] == 0:
                    is_waiting[other] = 1
                    waiting[depth] = other
                    depth += 1
    return done
