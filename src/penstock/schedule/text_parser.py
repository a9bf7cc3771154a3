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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from penstock.schedule.error_context import only
from penstock.schedule.errors import ScheduleError
from penstock.schedule.microbatch_order import MicrobatchOrder, ungrouped
from penstock.schedule.op import KINDS, RECOMPUTE, Op, parse_op
from penstock.schedule.pairs import JOIN, of_steps
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_graph import Needs, Registered, StageGraph
from penstock.schedule.updates import NEWEST, Updates

_UNNAMED_STAGE = -1
_SHOWN_EACH_SIDE = 60

UNNAMED = "grid"
"""The name of a schedule whose grid has no header line."""

_HEAD = re.compile(
    r"schedule (?P<name>\S+): (?P<ranks>[0-9]{1,7}) ranks?, (?P<stages>[0-9]{1,7}) stages?, "
    r"(?P<mbs>[0-9]{1,7}) microbatch(?:es)?"
    r"(?:, at most (?P<limit>[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?) in flight)?"
)
_PIPELINE = re.compile(
    r"pipeline (?P<index>[0-9]{1,7}): stages on ranks (?P<ranks>[0-9]{1,7}(?: [0-9]{1,7})*)"
    r"(?:, microbatches (?P<mbs>[0-9]{1,7}(?: [0-9]{1,7})*))?"
)
_SHARED = re.compile(r"stage (?P<stage>[0-9]{1,7}): shared by ranks (?P<ranks>[0-9]{1,7}(?: [0-9]{1,7})*)")
_EDGES = re.compile(r"edges (?P<edges>none|[0-9]{1,7}>[0-9]{1,7}(?: [0-9]{1,7}>[0-9]{1,7})*)")
_COUNTS = re.compile(r"microbatches of stages (?P<counts>[0-9]{1,7}(?: [0-9]{1,7})*)")
_KIND = re.compile(
    r"kind (?P<kind>[A-Z0-9_]+) of stage (?P<stage>[0-9]{1,7}): (?P<ops>[0-9]{1,7}) ops?"
    r"(?:, on ranks (?P<ranks>[0-9]{1,7}(?: [0-9]{1,7})*))?(?P<asynchronous>, asynchronous)?"
    r"(?:, holds (?P<holds>-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?))?"
    r"(?:, of microbatch(?:es)? (?P<mbs>[0-9]{1,7}(?: [0-9]{1,7})*))?"
)
_PAIRS = re.compile(
    r"needs (?P<before>[A-Z0-9_]+) of stage (?P<from>[0-9]{1,7}) before (?P<after>[A-Z0-9_]+) of stage "
    r"(?P<to>[0-9]{1,7}): (?P<pairs>[0-9]{1,7}>[0-9]{1,7}(?: [0-9]{1,7}>[0-9]{1,7})*)"
)
_NEEDS = re.compile(
    r"needs (?P<num_before>[0-9]{1,7}) (?P<before>[A-Z0-9_]+) of stage (?P<from>[0-9]{1,7}) before "
    r"(?P<num_after>[0-9]{1,7}) (?P<after>[A-Z0-9_]+) of stage (?P<to>[0-9]{1,7})"
)
_UPDATES = re.compile(
    r"updates every (?P<window>[0-9]{1,9}) microbatch(?:es)?(?:, mismatch at most (?P<most>[0-9]{1,9}))?"
    r"(?:, weights by (?P<rule>[a-z0-9-]{1,40}))?"
)
_ORDER = re.compile(
    r"order of (?P<kind>[A-Z0-9_]+) on stages? (?P<stages>[0-9]{1,7}(?: [0-9]{1,7})*)"
    r"(?: of pipeline (?P<pipeline>[0-9]{1,7}))?: (?P<mbs>[0-9]{1,7}(?: [0-9]{1,7})*)"
)
_ROW = re.compile(r"rank (?P<rank>[0-9]{1,7}) *\|(?P<cells>.*)")
_CELLS = re.compile(r"[0-9]*[A-Z][A-Z0-9_]*[0-9]\b.*|\.[. ]*(?:[0-9]*[A-Z][A-Z0-9_]*[0-9]\b.*)?")
"""The rank of a row that does not name one."""


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


def _schedule(text: str) -> Schedule:
    head: re.Match[str] | None = None
    is_first, top = True, 1
    pipelines: dict[int, tuple[int, ...]] = {}
    mine: dict[int, list[int]] = {}
    rows: dict[int, tuple[int, str, int]] = {}
    shared: list[tuple[int, tuple[int, ...]]] = []
    edges: tuple[tuple[int, int], ...] | None = None
    counts: tuple[int, ...] = ()
    registered: list[Registered] = []
    needs: list[Needs] = []
    updates: Updates | None = None
    orders: list[MicrobatchOrder] = []
    unnamed: list[tuple[int, str, int]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if is_first:
            is_first, top, head = False, number, _HEAD.fullmatch(line)
            if head is not None:
                continue
            if not any(each.fullmatch(line) for each in (_PIPELINE, _UPDATES, _ROW, _CELLS)):
                _fail(
                    number,
                    1,
                    "expected 'schedule NAME: R ranks, S stages, N microbatches' (after it, where there is a limit, "
                    f"', at most K in flight'), or a row like 'rank 0 | F0 B0', got {line[:80]!r}",
                )
        if match := _PIPELINE.fullmatch(line):
            index = int(match["index"])
            if index in pipelines:
                _fail(number, 1, f"pipeline {index} is given twice")
            pipelines[index] = tuple(map(int, match["ranks"].split()))
            mine[index] = list(map(int, (match["mbs"] or "").split()))
        elif match := _SHARED.fullmatch(line):
            shared.append((int(match["stage"]), _numbers(match["ranks"])))
        elif match := _UPDATES.fullmatch(line):
            if updates is not None:
                _fail(number, 1, "the updates' window is given twice")
            updates = _updates(number, match)
        elif match := _EDGES.fullmatch(line):
            edges = () if match["edges"] == "none" else _pairs(match["edges"])
        elif match := _COUNTS.fullmatch(line):
            counts = _numbers(match["counts"])
        elif match := _KIND.fullmatch(line):
            registered.append(
                Registered(
                    match["kind"],
                    int(match["stage"]),
                    int(match["ops"]),
                    _numbers(match["ranks"]),
                    match["asynchronous"] is not None,
                    float(match["holds"] or 0),
                    _numbers(match["mbs"]),
                )
            )
        elif match := _PAIRS.fullmatch(line):
            before, after = (match["before"], int(match["from"])), (match["after"], int(match["to"]))
            needs.append(Needs(before, after, pairs=_pairs(match["pairs"])))
        elif match := _NEEDS.fullmatch(line):
            needs.append(
                Needs(
                    (match["before"], int(match["from"])),
                    (match["after"], int(match["to"])),
                    int(match["num_before"]),
                    int(match["num_after"]),
                )
            )
        elif match := _ORDER.fullmatch(line):
            stages, microbatches = _numbers(match["stages"]), _numbers(match["mbs"])
            orders += ungrouped(match["kind"], int(match["pipeline"] or 0), stages, microbatches)
        elif match := _ROW.fullmatch(line):
            rank = int(match["rank"])
            if rank in rows:
                _fail(number, 1, f"rank {rank} is given twice")
            rows[rank] = (number, match["cells"], raw.index("|") + 2)
        elif _CELLS.fullmatch(line):
            unnamed.append((number, line, raw.index(line) + 1))
        else:
            _fail(
                number,
                1,
                f"expected 'pipeline K: ...' or 'rank R | ...' (or a line of updates, of a stage graph or of an "
                f"order), got "
                f"{line[:60]!r}",
            )
    if rows and unnamed:
        _fail(unnamed[0][0], 1, "some rows name their rank and this one does not; begin it like 'rank 0 | F0 B0'")
    rows.update(enumerate(unnamed))
    if head is None:
        if not rows:
            _fail(top, 1, "the text holds no 'schedule NAME: ...' line and no row")
        cells = list(_cells(rows))
        if not pipelines:
            pipelines, mine = {0: _hosts_of(cells, len(rows))}, {0: []}
        name, num_ranks, num_stages = UNNAMED, len(rows), len(next(iter(pipelines.values())))
        num_microbatches = _num_microbatches(cells)
    else:
        name, num_ranks, num_stages = head["name"], int(head["ranks"]), int(head["stages"])
        num_microbatches = int(head["mbs"])
    if sorted(rows) != list(range(num_ranks)):
        says = "the header says" if head is not None else "there are rows of"
        where = next((rows[rank][0] for rank in sorted(rows) if rank >= num_ranks), top)
        _fail(where, 1, f"{says} {num_ranks} ranks, the rows are for ranks {sorted(rows)}")
    if not pipelines:
        example = " ".join(str(stage % max(1, num_ranks)) for stage in range(min(num_stages, 16)))
        _fail(top, 1, f"no line says where stages lie; add one below, like 'pipeline 0: stages on ranks {example}'")
    if sorted(pipelines) != list(range(len(pipelines))):
        _fail(top, 1, f"pipelines must be numbered from 0, got {sorted(pipelines)}")
    for k, ranks in pipelines.items():
        if len(ranks) != num_stages:
            _fail(top, 1, f"the header says {num_stages} stages, pipeline {k} places {len(ranks)}")
        if max(ranks) >= num_ranks:
            _fail(top, 1, f"pipeline {k} names rank {max(ranks)}, but there are {num_ranks} ranks")
    if any(max(ranks) >= num_ranks for _, ranks in shared):
        _fail(top, 1, f"a shared stage names a rank that is not there: there are {num_ranks} ranks")
    placement = Placement(tuple(pipelines[k] for k in range(len(pipelines))), tuple(shared))
    if edges is None and (counts or registered or needs):
        _fail(top, 1, "a line describes a stage graph, but there is no 'edges A>B ...' line; add one")
    graph = None if edges is None else StageGraph(num_stages, edges, counts, tuple(registered), tuple(needs))
    pipeline_of = [0] * num_microbatches
    if len(pipelines) > 1 or mine[0]:
        listed = sorted(m for found in mine.values() for m in found)
        if listed != list(range(num_microbatches)):
            _fail(
                top,
                1,
                f"each of the {num_microbatches} microbatches must be in one pipeline's list, as in 'pipeline 0: "
                f"stages on ranks 0 1, microbatches 0 2', got {listed}",
            )
        for k, found in mine.items():
            for m in found:
                pipeline_of[m] = k
    order, pairs = of_steps(_parse_row(placement, rank, *rows[rank]) for rank in range(num_ranks))
    limit = float(head["limit"]) if head is not None and head["limit"] else None
    return Schedule(name, placement, order, tuple(pipeline_of), limit, graph, updates, tuple(orders), pairs)


class _Cell(NamedTuple):
    """An op of a row without a header, and its place in the text. Its stage is `_UNNAMED_STAGE` if it names none."""

    rank: int
    line: int
    column: int
    op: Op


def _cells(rows: Mapping[int, tuple[int, str, int]]) -> Iterator[_Cell]:
    """The ops of all rows, rank after rank."""
    for rank, (line, text, offset) in sorted(rows.items()):
        for found in re.finditer(r"[^\s+]+", text):
            if found[0] != ".":
                try:
                    yield _Cell(rank, line, offset + found.start(), parse_op(found[0], _UNNAMED_STAGE))
                except ValueError as error:
                    _fail(line, offset + found.start(), str(error))


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
            _fail(line, column, f"{only(max(1, len(hosts)), 'stage')}{hint}")
        if all_named and hosts.get(stage, rank) != rank and 2 * named[stage, rank] >= named[stage, hosts[stage]]:
            _fail(
                line,
                column,
                f"stage {stage} stands on ranks {hosts[stage]} and {rank}: rows alone do not say "
                "which pipelines there are; head them with 'schedule NAME: R ranks, S stages, N microbatches' "
                "and a line like 'pipeline 0: stages on ranks 0 1, microbatches 0 2' for each",
            )
    if sorted(hosts) != list(range(len(hosts))):
        _fail(
            cells[0].line, 1, f"the cells name stages {sorted(hosts)}: stages are numbered from 0, with ops in each"
        )
    return tuple(hosts[stage] for stage in range(len(hosts)))


def _num_microbatches(cells: Sequence[_Cell]) -> int:
    """One more than the last microbatch that enough cells name."""
    plain = [cell for cell in cells if cell.op.kind in (*KINDS, RECOMPUTE)]
    num = _num_counted(Counter(cell.op.microbatch for cell in plain))
    for cell in plain:
        if cell.op.microbatch >= num:
            _fail(cell.line, cell.column, only(num, "microbatch"))
    return num


def _num_counted(cells_of: Counter[int]) -> int:
    """How many of the numbers from 0 on are meant, by how many cells name each: those that half as many cells name as
    the number that most do. A number that fewer name, or that stands beyond a gap and no more name, is a mistake.
    """
    most = max(cells_of.values(), default=0)
    num = next(number for number in itertools.count() if not cells_of[number] or 2 * cells_of[number] < most)
    beyond = [number + 1 for number, count in cells_of.items() if 2 * count > most and number <= cells_of.total()]
    return max([num, min(1, most), *beyond])


def _updates(line: int, match: re.Match[str]) -> Updates:
    most, rule = match["most"], match["rule"]
    try:
        return Updates(int(match["window"]), None if most is None else int(most), rule or NEWEST)
    except ScheduleError as error:
        _fail(line, 1, str(error))


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in (pair.split(">") for pair in text.split()))


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split())) if text else ()


def _parse_row(placement: Placement, rank: int, line: int, cells: str, offset: int) -> list[tuple[Op, ...]]:
    """The ops of a row, the two of a pair at once."""
    stages = placement.stages_of(rank)
    default = stages[0] if len(stages) == 1 else None
    steps = []
    for cell in re.finditer(r"\S+", cells):
        if cell[0] == ".":
            continue
        try:
            steps.append(parse_step(cell[0], default))
        except ValueError as error:
            _fail(line, offset + cell.start(), str(error))
    return steps


def parse_step(text: str, default_stage: int | None = None) -> tuple[Op, ...]:
    """Reads an op, or the two of a pair: `0F3+3B1`. Raises ValueError."""
    parts = text.split(JOIN)
    if len(parts) > 2:
        raise ValueError(f"{text[:40]!r} is no pair: two ops run as one, a forward and a backward, like 0F3+3B1")
    return tuple([parse_op(part, default_stage) for part in parts])


def _fail(line: int, column: int, message: str) -> NoReturn:
    raise ScheduleError(f"line {line}, column {column}: {message}", rule="text", line=line, column=column)
