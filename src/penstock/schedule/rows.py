"""Runs rows of ops without time: each row goes on until an op needs one that has not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.schedule.op import Op


@dataclass(frozen=True)
class UntimedRun:
    """Where a run without time ended: `steps[row]` ops done, and what each unfinished row waits for.

    Rows are the ranks and, where ops are asynchronous, their streams (`async_ops.rows_of`). `blocked[row]` is (op,
    peer row, full): the op the row waits for, or, where `full`, the op whose message found its channel to the peer
    full.
    """

    steps: tuple[int, ...]
    blocked: dict[int, tuple[Op, int, bool]]


def run_rows(
    rows: Sequence[Sequence[Op]],
    needs: Callable[[Op], list[Op]],
    together: Mapping[Op, tuple[int, ...]],
    begun: Sequence[int] = (),
    ran: Callable[[Op, int, list[Op]], None] | None = None,
) -> UntimedRun:
    """Runs all rows until none can go on. The end does not depend on the way there.

    Args:
        needs: returns what an op waits for, in any row.
        together: the rows of each op that several rows run at once.
        begun: ops that each row has done; empty from the beginning.
        ran: is told of each op that runs, its row and what it waited for; of an op of several rows once.
    """
    row_of_op = {op: number for number, row in enumerate(rows) for op in row}
    steps = [*begun] or [0] * len(rows)
    done = {op for row, count in zip(rows, steps, strict=True) for op in row[:count]}
    waiting: dict[Op, list[int]] = {}
    blocked: dict[int, tuple[Op, int, bool]] = {}
    ready = list(range(len(rows)))
    while ready:
        number = ready.pop()
        blocked.pop(number, None)
        row = rows[number]
        while steps[number] < len(row):
            op = row[steps[number]]
            needed = needs(op)
            missing = next((each for each in needed if each not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(number)
                blocked[number] = missing, row_of_op.get(missing, number), False
                break
            hosts = together.get(op, (number,))
            late = next((host for host in hosts if rows[host][steps[host] : steps[host] + 1] != (op,)), None)
            if late is not None:  # the last of its rows to come takes the others along
                blocked[number] = op, late, False
                break
            if ran is not None:
                ran(op, number, needed)
            for host in hosts:
                steps[host] += 1
                if host != number:
                    blocked.pop(host, None)
                    ready.append(host)
            done.add(op)
            ready += waiting.pop(op, ())
    return UntimedRun(tuple(steps), blocked)
