"""The text grid: a schedule one can read, edit and parse back (`text_parser`).

    schedule 1f1b: 2 ranks, 2 stages, 3 microbatches
    pipeline 0: stages on ranks 0 1
    rank 0 | F0 F1 .  B0 F2 B1 .  B2
    rank 1 | .  F0 B0 F1 B1 F2 B2

A column is one step of unit time, a dot is a bubble (dots mean nothing to the parser). Ranks that host
several stages write the stage before the letter: 2F0. Lines that start with # are comments. Where queues of ops run
their microbatches in another order than the ascending one, lines above the rows say so:

    order of B on stages 0 1: 2 1 0

A forward and a backward that a rank runs as one (see `pairs`) stand in one cell: F3+B1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.schedule.dependencies import predecessors
from penstock.schedule.microbatch_order import grouped
from penstock.schedule.op import Op
from penstock.schedule.pairs import JOIN, paired_steps
from penstock.schedule.placement import ranks_together
from penstock.schedule.stage_graph import StageGraph
from penstock.schedule.updates import NEWEST

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule


def unit_columns(schedule: Schedule) -> list[list[int]]:
    """The column of every op when each takes one unit of time and starts as soon as it can; of a pair, one for both.

    Where the order can't be timed (a deadlock, a missing op), the ops left over follow one another.
    """
    rank_of_op = {op: r for r, row in enumerate(schedule.order) for op in row}
    together = ranks_together(schedule)
    waiting: dict[Op, list[int]] = {}
    finished: dict[Op, int] = {}
    columns: list[list[int]] = [[] for _ in schedule.order]
    graph = schedule.graph
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        row, placed = schedule.order[rank], columns[rank]
        while len(placed) < len(row):
            op = row[len(placed)]
            needed = predecessors(op, graph, rank_of_op)
            missing = next((p for p in needed if p not in finished), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            hosts = together.get(op, (rank,))
            if any(schedule.order[h][len(columns[h]) : len(columns[h]) + 1] != (op,) for h in hosts):
                break  # the last of its ranks to come takes the others along
            if _is_joined(graph, row, len(placed)):
                start = placed[-1]
            else:
                start = max(
                    [*(columns[h][-1] + 1 if columns[h] else 0 for h in hosts), *(finished[p] for p in needed)]
                )
            for host in hosts:
                columns[host].append(start)
            finished[op] = start + 1
            ready.extend(waiting.pop(op, []))
            ready.extend(host for host in hosts if host != rank)
    for rank, row in enumerate(schedule.order):
        placed = columns[rank]
        while len(placed) < len(row):
            placed.append(placed[-1] + (not _is_joined(graph, row, len(placed))) if placed else 0)
    return columns


def _is_joined(graph: StageGraph, row: Sequence[Op], place: int) -> bool:
    """Whether the op at a place of a row is the backward of a pair whose forward comes right before it."""
    return bool(graph.pairs) and place > 0 and graph.forward_of.get(row[place]) == row[place - 1]


def cell_texts(schedule: Schedule, rank: int) -> list[str]:
    """The ops of one row as the grid writes them."""
    single = len(schedule.stages_of(rank)) == 1
    return [op.short() if single and op.stage in schedule.stages_of(rank) else str(op) for op in schedule.order[rank]]


class GridCell(NamedTuple):
    """A cell of the grid: its column, the text, and the op that it is, or the two of a pair."""

    column: int
    text: str
    ops: tuple[Op, ...]


def grid_cells(schedule: Schedule) -> list[list[GridCell]]:
    """The cells of each rank that are not empty."""
    found = []
    for rank, (steps, columns) in enumerate(zip(paired_steps(schedule), unit_columns(schedule), strict=True)):
        own, texts, place = [], cell_texts(schedule, rank), 0
        for ops in steps:
            own.append(GridCell(columns[place], JOIN.join(texts[place : place + len(ops)]), ops))
            place += len(ops)
        found.append(own)
    return found


def rows_text(schedule: Schedule) -> list[str]:
    """The grid's rows, aligned, without the header lines."""
    rows = grid_cells(schedule)
    width = max((len(cell.text) for row in rows for cell in row), default=1)
    label = len(f"rank {schedule.num_ranks - 1}")
    lines = []
    for rank, row in enumerate(rows):
        line = ["."] * (row[-1].column + 1 if row else 0)
        for cell in row:
            line[cell.column] = cell.text
        body = " ".join(c.ljust(width) for c in line)
        lines.append(f"{f'rank {rank}'.ljust(label)} | {body}".rstrip())
    return lines


def _plural(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def _short(number: float) -> str:
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def to_text(schedule: Schedule) -> str:
    """The whole text grid; `parse` reads it back to an equal schedule.

    Args:
        schedule: any schedule.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("gpipe", 2, 2)
        >>> print(ps.schedule.to_text(s))
        schedule gpipe: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 F1 .  .  B0 B1
        rank 1 | .  F0 F1 B0 B1
        >>> ps.parse(ps.schedule.to_text(s)) == s
        True
    """
    head = (
        f"schedule {schedule.name}: {_plural(schedule.num_ranks, 'rank')}, "
        f"{_plural(schedule.num_stages, 'stage')}, "
        f"{_plural(schedule.num_microbatches, 'microbatch', 'microbatches')}"
    )
    if schedule.max_in_flight is not None:
        head += f", at most {_short(schedule.max_in_flight)} in flight"
    lines = [head]
    for k, ranks in enumerate(schedule.placement.pipelines):
        line = f"pipeline {k}: stages on ranks {' '.join(map(str, ranks))}"
        if schedule.placement.num_pipelines > 1:
            mine = [m for m, pipeline in enumerate(schedule.microbatch_pipeline) if pipeline == k]
            line += f", microbatches {' '.join(map(str, mine))}" if mine else ""
        lines.append(line)
    if (updates := schedule.updates) is not None:
        most = "" if updates.max_mismatch is None else f", mismatch at most {updates.max_mismatch}"
        rule = "" if updates.rule == NEWEST else f", weights by {updates.rule}"
        lines.append(f"updates every {_plural(updates.window, 'microbatch', 'microbatches')}{most}{rule}")
    for stage, ranks in schedule.placement.shared:
        lines.append(f"stage {stage}: shared by ranks {' '.join(map(str, ranks))}")
    return "\n".join(lines + _graph_lines(schedule.stage_graph) + _order_lines(schedule) + rows_text(schedule))


def _order_lines(schedule: Schedule) -> list[str]:
    several = schedule.placement.num_pipelines > 1
    return [
        f"order of {kind} on {'stage' if len(stages) == 1 else 'stages'} {' '.join(map(str, stages))}"
        f"{f' of pipeline {pipeline}' if several else ''}: {' '.join(map(str, microbatches))}"
        for kind, pipeline, stages, microbatches in grouped(schedule.microbatch_orders)
    ]


def _graph_lines(graph: StageGraph | None) -> list[str]:
    if graph is None:
        return []
    lines = ["edges " + (" ".join(f"{a}>{b}" for a, b in graph.edges) or "none")]
    if graph.num_microbatches:
        lines.append(f"microbatches of stages {' '.join(map(str, graph.num_microbatches))}")
    for r in graph.registered:
        where = f", on ranks {' '.join(map(str, r.ranks))}" if r.ranks else ""
        how = ", asynchronous" if r.asynchronous else ""
        how += f", holds {_short(r.holds)}" if r.holds else ""
        if r.microbatches:
            how += f", of microbatch{'es' * (r.num_ops > 1)} {' '.join(map(str, r.microbatches))}"
        lines.append(f"kind {r.kind} of stage {r.stage}: {_plural(r.num_ops, 'op')}{where}{how}")
    for n in graph.needs:
        if n.pairs:
            pairs = " ".join(f"{a}>{b}" for a, b in n.pairs)
            lines.append(
                f"needs {n.before[0]} of stage {n.before[1]} before {n.after[0]} of stage {n.after[1]}: {pairs}"
            )
            continue
        lines.append(
            f"needs {n.num_before} {n.before[0]} of stage {n.before[1]} before {n.num_after} {n.after[0]} "
            f"of stage {n.after[1]}"
        )
    return lines
