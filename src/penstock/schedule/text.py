"""The text grid: a schedule one can read, edit and parse back (`text_parser`).

    schedule 1f1b: 2 ranks, 2 stages, 3 microbatches
    pipeline 0: stages on ranks 0 1
    rank 0 | F0 F1 .  B0 F2 B1 .  B2
    rank 1 | .  F0 B0 F1 B1 F2 B2

A column is one step of unit time, a dot is a bubble (dots mean nothing to the parser). Ranks that host several
stages write the stage before the letter: 2F0. Lines that start with # are comments. A forward and a backward that a
rank runs as one (see `pairs`) stand in one cell: F3+B1. Where queues of ops run their microbatches in another order
than the ascending one, lines above the rows say so:

    order of B on stages 0 1: 2 1 0

`LINES` holds every line above the rows as a template of text and fields. Both the writer and the parser follow it.
An error about an op shows it here: its row of the grid with an arrow under it (`spot_of`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.schedule.dependencies import predecessors, run_rows
from penstock.schedule.errors import ScheduleError, name_of
from penstock.schedule.microbatch_order import grouped
from penstock.schedule.op import Op
from penstock.schedule.pairs import JOIN, paired_steps
from penstock.schedule.placement import ranks_together
from penstock.schedule.stage_graph import StageGraph

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule


def _read_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _read_arrows(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in re.findall("([0-9]+)>([0-9]+)", text))


def _read_end(text: str) -> tuple[str, int]:
    kind, stage = text.split(" of stage ")
    return kind, int(stage)


_INT, _KIND = "[0-9]{1,7}", "[A-Z0-9_]+"
_ARROWS = f"{_INT}>{_INT}(?: {_INT}>{_INT})*"
_FORMS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "int": (_INT, int),
    "long": ("[0-9]{1,9}", int),
    "ints": (f"{_INT}(?: {_INT})*", _read_numbers),
    "number": (r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", float),
    "name": (r"\S+", str),
    "rule": ("[a-z0-9-]{1,40}", str),
    "kind": (_KIND, str),
    "end": (f"{_KIND} of stage {_INT}", _read_end),
    "arrows": (_ARROWS, _read_arrows),
    "edges": (f"none|{_ARROWS}", _read_arrows),
    "flag": ("", lambda _: True),
}
"""How a field looks in the text, and what reads it."""


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return ""  # the words around it say so
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if not isinstance(value, tuple | list):
        return str(value)
    if value and isinstance(value[0], str):
        return f"{value[0]} of stage {value[1]}"
    return " ".join(f"{each[0]}>{each[1]}" if isinstance(each, tuple) else str(each) for each in value) or "none"


_SINGULAR = re.compile(r"(?<=\b1 )([a-z]+)\(e?s\)|(?<![0-9] )\b([a-z]+)\(e?s\)(?= [0-9]+(?![0-9]| [0-9]))")


class LineTemplate:
    """A line above the rows: text with `{field: form}`, and parts in brackets that are there if their field is."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._readers = {name: _FORMS[form][1] for name, form in re.findall(r"\{(\w+): (\w+)\}", template)}
        pattern = re.sub(r"\((e?s)\)", r"(?:\1)?", re.sub(r"\[(.*?)\]", r"(?:\1)?", template))
        self._regex = re.compile(
            re.sub(r"\{(\w+): (\w+)\}", lambda field: f"(?P<{field[1]}>{_FORMS[field[2]][0]})", pattern)
        )

    def read(self, text: str) -> dict[str, Any] | None:
        """Returns the fields that a line of text gives, or None if the text is no such line."""
        match = self._regex.fullmatch(text)
        given = {} if match is None else match.groupdict()
        found = {name: self._readers[name](value) for name, value in given.items() if value is not None}
        return None if match is None else found

    def write(self, values: Mapping[str, Any]) -> str:
        """Returns the line with these fields."""
        text = re.sub(r"\[(.*?\{(\w+): .*?)\]", lambda part: part[1] if part[2] in values else "", self._template)
        text = re.sub(r"\{(\w+): \w+\}", lambda field: _written(values[field[1]]), text)
        return re.sub(r"\((e?s)\)", r"\1", _SINGULAR.sub(r"\1\2", text))


LINES = {
    name: LineTemplate(template)
    for name, template in {
        "schedule": "schedule {name: name}: {num_ranks: int} rank(s), {num_stages: int} stage(s), "
        "{num_microbatches: int} microbatch(es)[, at most {max_in_flight: number} in flight]",
        "pipeline": "pipeline {pipeline: int}: stages on ranks {ranks: ints}[, microbatches {microbatches: ints}]",
        "updates": "updates every {window: long} microbatch(es)[, mismatch at most {max_mismatch: long}]"
        "[, weights by {rule: rule}]",
        "shared": "stage {stage: int}: shared by ranks {ranks: ints}",
        "edges": "edges {edges: edges}",
        "counts": "microbatches of stages {num_microbatches: ints}",
        "registered": "kind {kind: kind} of stage {stage: int}: {num_ops: int} op(s)[, on ranks {ranks: ints}]"
        "[, asynchronous{asynchronous: flag}][, holds {holds: number}][, of microbatch(es) {microbatches: ints}]",
        "needs pairs": "needs {before: end} before {after: end}: {pairs: arrows}",
        "needs groups": "needs {num_before: int} {before: end} before {num_after: int} {after: end}",
        "order": "order of {kind: kind} on stage(s) {stages: ints}[ of pipeline {pipeline: int}]: "
        "{microbatches: ints}",
    }.items()
}
"""The lines above the rows, in the order in which they are written."""


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default."""
    given = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: each for field, each in given if field.default is MISSING or each != field.default}


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
    head = {name: getattr(schedule, name) for name in ("name", "num_ranks", "num_stages", "num_microbatches")}
    if schedule.max_in_flight is not None:
        head["max_in_flight"] = schedule.max_in_flight
    several, graph = schedule.placement.num_pipelines > 1, schedule.stage_graph
    lines: list[tuple[str, dict[str, Any]]] = [("schedule", head)]
    for k, ranks in enumerate(schedule.placement.pipelines):
        mine = [m for m, pipeline in enumerate(schedule.microbatch_pipeline) if pipeline == k]
        lines.append(("pipeline", {"pipeline": k, "ranks": ranks}))
        if several and mine:
            lines[-1][1]["microbatches"] = mine
    if schedule.updates is not None:
        lines.append(("updates", _given(schedule.updates)))
    lines += [("shared", {"stage": stage, "ranks": ranks}) for stage, ranks in schedule.placement.shared]
    if graph is not None:
        lines.append(("edges", {"edges": graph.edges}))
        if graph.num_microbatches:
            lines.append(("counts", {"num_microbatches": graph.num_microbatches}))
        lines += [("registered", _given(each)) for each in graph.registered]
        lines += [("needs pairs" if each.pairs else "needs groups", vars(each)) for each in graph.needs]
    for kind, k, stages, microbatches in grouped(schedule.microbatch_orders):
        lines.append(("order", {"kind": kind, "stages": stages, "microbatches": microbatches}))
        if several:
            lines[-1][1]["pipeline"] = k
    return "\n".join([*(LINES[name].write(values) for name, values in lines), *rows_text(schedule)])


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


def cell_texts(schedule: Schedule, rank: int) -> list[str]:
    """The ops of one row as the grid writes them."""
    stages = schedule.stages_of(rank)
    return [op.short() if stages == (op.stage,) else str(op) for op in schedule.order[rank]]


def unit_columns(schedule: Schedule) -> list[list[int]]:
    """The column of every op when each takes one unit of time and starts as soon as it can; of a pair, one for both.

    Where the order can't be timed (a deadlock, a missing op), the ops left over follow one another.
    """
    graph, rows = schedule.graph, schedule.order
    present = {op: rank for rank, row in enumerate(rows) for op in row}
    together = ranks_together(schedule)
    finished: dict[Op, int] = {}
    columns: list[list[int]] = [[] for _ in rows]

    def place(op: Op, rank: int, needed: list[Op]) -> None:
        hosts = together.get(op, (rank,))
        if _is_joined(graph, rows[rank], len(columns[rank])):
            start = columns[rank][-1]
        else:
            free = [columns[host][-1] + 1 for host in hosts if columns[host]]
            start = max([0, *free, *(finished[each] for each in needed)])
        for host in hosts:
            columns[host].append(start)
        finished[op] = start + 1

    run_rows(rows, lambda op: predecessors(op, graph, present), together, ran=place)
    for row, placed in zip(rows, columns, strict=True):
        while len(placed) < len(row):
            placed.append(placed[-1] + (not _is_joined(graph, row, len(placed))) if placed else 0)
    return columns


def _is_joined(graph: StageGraph, row: Sequence[Op], place: int) -> bool:
    """Whether the op at a place of a row is the backward of a pair whose forward comes right before it."""
    return bool(graph.pairs) and place > 0 and graph.forward_of.get(row[place]) == row[place - 1]


_SHOWN_EACH_SIDE = 6
"""Ops before and after the one that is wrong."""


def spot_of(schedule: Schedule, rank: int, step: int) -> str:
    """The row around one op, with an arrow under it."""
    cells = cell_texts(schedule, rank)
    first, last = max(0, step - _SHOWN_EACH_SIDE), min(len(cells), step + _SHOWN_EACH_SIDE + 1)
    before = "... " if first else ""
    lead = f"  rank {rank} | {before}" + "".join(c + " " for c in cells[first:step])
    cell = cells[step] if step < len(cells) else "(end)"
    row = lead + " ".join([cell, *cells[step + 1 : last]]) + (" ..." if last < len(cells) else "")
    return f"{row}\n{' ' * len(lead)}{'^' * len(cell)}"


def error_at(
    schedule: Schedule, rule: str, rank: int, step: int, op: Op, message: str, peer: str | None = None
) -> ScheduleError:
    """The error at one op, with the row around it and an arrow under it."""
    text = f"rank {rank}, step {step}, {name_of(op)}: {message} (rule: {rule})\n{spot_of(schedule, rank, step)}"
    return ScheduleError(text, rule=rule, rank=rank, step=step, op=op, peer=peer)
