"""Reads a text grid (see `text`) strictly: errors give the line and the column of what is wrong.

    rank 0 | F0 F1 B0 B1        a schedule of two ranks, two stages and two microbatches
    rank 1 | F0 B0 F1 B1

A grid written by hand needs only its rows. Ranks and microbatches are counted. A stage lies on the rank whose row has
its ops; if cells name no stage, stage r lies on rank r. Rows without a rank's name belong to ranks 0, 1, 2 and so
on. Several pipelines need the lines above the rows.

Most cells say how many stages and microbatches there are, and where the stages lie. A cell with another number is a
typing mistake, such as `0F33` if there are four microbatches.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from penstock.schedule.errors import ScheduleError, only
from penstock.schedule.microbatch_order import ungrouped
from penstock.schedule.op import KINDS, RECOMPUTE, Op, parse_op
from penstock.schedule.pairs import JOIN, of_steps
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import Needs, Registered, StageGraph
from penstock.schedule.text import LINES
from penstock.schedule.updates import Updates

T = TypeVar("T")

_UNNAMED_STAGE = -1
_SHOWN_EACH_SIDE = 60

UNNAMED = "grid"
"""The name of a schedule whose grid has no header line."""

_HEADED = "schedule NAME: R ranks, S stages, N microbatches"
_ROW = re.compile(r"rank (?P<rank>[0-9]{1,7}) *\|(?P<cells>.*)")
_CELLS = re.compile(r"[0-9]*[A-Z][A-Z0-9_]*[0-9]\b.*|\.[. ]*(?:[0-9]*[A-Z][A-Z0-9_]*[0-9]\b.*)?")
"""A row that does not name its rank."""


def parse(text: str) -> Schedule:
    """Reads a schedule from a text grid. It does not prove the schedule; `check` does.

    Words and cells must be exact. Bubbles, alignment, comments and blank lines don't matter.

    Args:
        text: one line per rank, as `str(schedule)` writes it.

    Raises:
        ScheduleError: the text is not a grid (rule "text"); the error gives the line and the column.

    Examples:
        >>> import penstock as ps
        >>> s = ps.parse("rank 0 | F0 F1 B0 B1\\nrank 1 | F0 B0 F1 B1")
        >>> s.num_ranks, s.num_microbatches
        (2, 2)
        >>> ps.parse("F0 F1 B0 B1\\nF0 B0 F1 B1") == s
        True
    """
    if not isinstance(text, str):
        raise ScheduleError(f"a grid of text is needed here, got {type(text).__name__}", rule="text")
    try:
        return _schedule(text)
    except ScheduleError as error:
        if error.line is None or error.column is None or not text.strip():
            raise
        spot = _spot(text.splitlines()[error.line - 1], error.column - 1)
        raise ScheduleError(f"{error}\n{spot}", rule=error.rule, line=error.line, column=error.column) from None


def _spot(line: str, at: int) -> str:
    """The line around a place, with an arrow under it."""
    begin, end = max(0, at - _SHOWN_EACH_SIDE), at + _SHOWN_EACH_SIDE
    lead = ("... " if begin else "") + line[begin:at]
    shown = (lead + line[at:end]).replace("\t", " ") + (" ..." if len(line) > end else "")
    word = re.match(r"\S*", line[at:end])
    return f"  {shown}\n  {' ' * len(lead)}{'^' * max(1, len(word[0] if word else ''))}"


class _Row(NamedTuple):
    """The cells of a row, and where they begin in the text."""

    line: int
    text: str
    column: int


class _Lines(NamedTuple):
    """The lines of a text.

    Attributes:
        top: the number of the first line.
        fields: by name of a line in `LINES`, the numbers and the fields of such lines.
        rows: the rows by rank.
    """

    top: int
    fields: dict[str, list[tuple[int, dict[str, Any]]]]
    rows: dict[int, _Row]

    def only(self, name: str) -> dict[str, Any]:
        """The fields of a line that may be there once; empty where it is not there."""
        return self.fields[name][0][1] if self.fields[name] else {}


def _schedule(text: str) -> Schedule:
    lines = _read_lines(text)
    head, rows, top = lines.only("schedule"), lines.rows, lines.top
    if not head and not rows:
        _fail("the text holds no 'schedule NAME: ...' line and no row", top)
    pipelines: dict[int, dict[str, Any]] = {}
    for line, given in lines.fields["pipeline"]:
        if given["pipeline"] in pipelines:
            _fail(f"pipeline {given['pipeline']} is given twice", line)
        pipelines[given["pipeline"]] = given
    if not head:
        cells = [
            _Cell(rank, row.line, column, op)
            for rank, row in sorted(rows.items())
            for column, step in _steps_of(row, _UNNAMED_STAGE)
            for op in step
        ]
        pipelines = pipelines or {0: {"ranks": _hosts_of(cells, len(rows))}}
        num_stages = len(next(iter(pipelines.values()))["ranks"])
        head = {"name": UNNAMED, "num_ranks": len(rows), "num_stages": num_stages}
        head["num_microbatches"] = _num_microbatches(cells)
    num_ranks = head["num_ranks"]
    if sorted(rows) != list(range(num_ranks)):
        says = "the header says" if lines.fields["schedule"] else "there are rows of"
        where = next((rows[rank].line for rank in sorted(rows) if rank >= num_ranks), top)
        _fail(f"{says} {num_ranks} ranks, the rows are for ranks {sorted(rows)}", where)
    placement = _placement(lines, pipelines, head)
    stages = [placement.stages_of(rank) for rank in range(num_ranks)]
    order, pairs = of_steps(
        [step for _, step in _steps_of(rows[rank], own[0] if len(own) == 1 else None)]
        for rank, own in enumerate(stages)
    )
    return Schedule(
        head["name"],
        placement,
        order,
        _pipeline_of(top, pipelines, head["num_microbatches"]),
        head.get("max_in_flight"),
        _graph(lines, head["num_stages"]),
        next(iter(_made(lines, "updates", Updates)), None),
        tuple(order for _, given in lines.fields["order"] for order in ungrouped(**{"pipeline": 0} | given)),
        pairs,
    )


def _read_lines(text: str) -> _Lines:
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {name.split()[0]: [] for name in LINES}
    rows: dict[int, _Row] = {}
    unnamed: list[_Row] = []
    top = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        is_first, top = not top, top or number
        if match := _ROW.fullmatch(line):
            rank = int(match["rank"])
            if rank in rows:
                _fail(f"rank {rank} is given twice", number)
            rows[rank] = _Row(number, match["cells"], raw.index("|") + 2)
        elif _CELLS.fullmatch(line):
            unnamed.append(_Row(number, line, raw.index(line) + 1))
        else:
            every = (
                (name.split()[0], given) for name, each in LINES.items() if (given := each.read(line)) is not None
            )
            name, given = next(every, ("", {}))
            if is_first and name not in ("schedule", "pipeline", "updates"):
                headed = f"'{_HEADED}' (after it, where there is a limit, ', at most K in flight')"
                _fail(f"expected {headed}, or a row like 'rank 0 | F0 B0', got {line[:80]!r}", number)
            if not name or (name == "schedule" and not is_first):
                others = "(or a line of updates, of a stage graph or of an order)"
                _fail(f"expected 'pipeline K: ...' or 'rank R | ...' {others}, got {line[:60]!r}", number)
            if found[name] and name in ("updates", "edges", "counts"):
                _fail(f"the line of {name} is given twice", number)
            found[name].append((number, given))
    if rows and unnamed:
        _fail("some rows name their rank and this one does not; begin it like 'rank 0 | F0 B0'", unnamed[0].line)
    return _Lines(top or 1, found, rows | dict(enumerate(unnamed)))


def _placement(lines: _Lines, pipelines: Mapping[int, Mapping[str, Any]], head: Mapping[str, Any]) -> Placement:
    top, num_ranks, num_stages = lines.top, head["num_ranks"], head["num_stages"]
    if not pipelines:
        example = " ".join(str(stage % max(1, num_ranks)) for stage in range(min(num_stages, 16)))
        _fail(f"no line says where stages lie; add one below, like 'pipeline 0: stages on ranks {example}'", top)
    if sorted(pipelines) != list(range(len(pipelines))):
        _fail(f"pipelines must be numbered from 0, got {sorted(pipelines)}", top)
    for k, given in pipelines.items():
        if len(given["ranks"]) != num_stages:
            _fail(f"the header says {num_stages} stages, pipeline {k} places {len(given['ranks'])}", top)
        if max(given["ranks"]) >= num_ranks:
            _fail(f"pipeline {k} names rank {max(given['ranks'])}, but there are {num_ranks} ranks", top)
    shared = tuple((given["stage"], given["ranks"]) for _, given in lines.fields["shared"])
    if any(max(ranks) >= num_ranks for _, ranks in shared):
        _fail(f"a shared stage names a rank that is not there: there are {num_ranks} ranks", top)
    return Placement(tuple(pipelines[k]["ranks"] for k in range(len(pipelines))), shared)


def _pipeline_of(top: int, pipelines: Mapping[int, Mapping[str, Any]], num_microbatches: int) -> tuple[int, ...]:
    """The pipeline of each microbatch."""
    mine = {m: k for k, given in pipelines.items() for m in given.get("microbatches", ())}
    listed = sorted(m for given in pipelines.values() for m in given.get("microbatches", ()))
    if len(pipelines) == 1 and not listed:
        return (0,) * num_microbatches
    if listed != list(range(num_microbatches)):
        _fail(
            f"each of the {num_microbatches} microbatches must be in one pipeline's list, as in 'pipeline 0: stages "
            f"on ranks 0 1, microbatches 0 2', got {listed}",
            top,
        )
    return tuple(mine[m] for m in listed)


def _graph(lines: _Lines, num_stages: int) -> StageGraph | None:
    counts, edges = lines.only("counts"), lines.only("edges")
    registered = tuple(_made(lines, "registered", Registered))
    needs = tuple(_made(lines, "needs", Needs))
    if edges:
        return StageGraph(num_stages, **edges, **counts, registered=registered, needs=needs)
    if counts or registered or needs:
        _fail("a line describes a stage graph, but there is no 'edges A>B ...' line; add one", lines.top)
    return None


def _made(lines: _Lines, name: str, make: Callable[..., T]) -> Iterator[T]:
    """What the lines of a name stand for, each made of its fields."""
    for line, given in lines.fields[name]:
        try:
            yield make(**given)
        except ScheduleError as error:
            _fail(str(error), line)


class _Cell(NamedTuple):
    """An op of a row without a header, and its place in the text. Its stage is `_UNNAMED_STAGE` if it names none."""

    rank: int
    line: int
    column: int
    op: Op


def _steps_of(row: _Row, default_stage: int | None) -> Iterator[tuple[int, tuple[Op, ...]]]:
    """The column of each cell of a row that is no bubble, and its op, or the two of a pair."""
    for cell in re.finditer(r"\S+", row.text):
        if cell[0] != ".":
            try:
                yield row.column + cell.start(), parse_step(cell[0], default_stage)
            except ValueError as error:
                _fail(str(error), row.line, row.column + cell.start())


def _hosts_of(cells: Sequence[_Cell], num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage, read off rows without a header: stage r on rank r, or where most of its cells stand."""
    named = Counter((cell.op.stage, cell.rank) for cell in cells if cell.op.stage != _UNNAMED_STAGE)
    all_named = 2 * named.total() > len(cells)
    if all_named:
        num_stages = _num_counted(Counter(stage for stage, _ in named.elements()))
        hosts = {stage: rank for (stage, rank), _ in reversed(named.most_common()) if stage < num_stages}
    else:
        hosts = dict(enumerate(range(num_ranks)))
    for rank, line, column, (_, stage, _) in cells:
        if stage not in (_UNNAMED_STAGE, *hosts):
            hint = "" if all_named else "; where one cell names its stage, as 2F0 does, all do"
            _fail(f"{only(max(1, len(hosts)), 'stage')}{hint}", line, column)
        if all_named and hosts.get(stage, rank) != rank and 2 * named[stage, rank] >= named[stage, hosts[stage]]:
            _fail(
                f"stage {stage} stands on ranks {hosts[stage]} and {rank}: rows alone do not say "
                "which pipelines there are; head them with 'schedule NAME: R ranks, S stages, N microbatches' "
                "and a line like 'pipeline 0: stages on ranks 0 1, microbatches 0 2' for each",
                line,
                column,
            )
    if sorted(hosts) != list(range(len(hosts))):
        _fail(f"the cells name stages {sorted(hosts)}: stages are numbered from 0, with ops in each", cells[0].line)
    return tuple(hosts[stage] for stage in range(len(hosts)))


def _num_microbatches(cells: Sequence[_Cell]) -> int:
    """One more than the last microbatch that enough cells name."""
    plain = [cell for cell in cells if cell.op.kind in (*KINDS, RECOMPUTE)]
    num = _num_counted(Counter(cell.op.microbatch for cell in plain))
    for cell in plain:
        if cell.op.microbatch >= num:
            _fail(only(num, "microbatch"), cell.line, cell.column)
    return num


def _num_counted(cells_of: Counter[int]) -> int:
    """How many of the numbers from 0 on are meant, by how many cells name each: those that half as many cells name as
    the number that most do. A number that fewer name, or that stands beyond a gap and no more name, is a mistake.
    """
    most = max(cells_of.values(), default=0)
    num = next(number for number in itertools.count() if not cells_of[number] or 2 * cells_of[number] < most)
    beyond = [number + 1 for number, count in cells_of.items() if 2 * count > most and number <= cells_of.total()]
    return max([num, min(1, most), *beyond])


def parse_step(text: str, default_stage: int | None = None) -> tuple[Op, ...]:
    """Reads an op, or the two of a pair: `0F3+3B1`. Raises ValueError."""
    parts = text.split(JOIN)
    if len(parts) > 2:
        raise ValueError(f"{text[:40]!r} is no pair: two ops run as one, a forward and a backward, like 0F3+3B1")
    return tuple([parse_op(part, default_stage) for part in parts])


def _fail(message: str, line: int, column: int = 1) -> NoReturn:
    raise ScheduleError(f"line {line}, column {column}: {message}", rule="text", line=line, column=column)
