"""torch's CSV of a schedule: what `torch.distributed.pipelining` reads and writes, a line per rank, a cell an action.

    0F0,0F1,,,0B0,,0B1              compute only; an empty cell is a bubble
    ,1F0,1B0,,1F1,1B1

    0UNSHARD,0F0,0SEND_F0,0F1,...   with communication
    1UNSHARD,1RECV_F0,1F0,1B0,...

A cell is the stage, the action and the microbatch. torch's own reader takes `2F0junk` for `2F0` and drops the
microbatch of `0BW3`; this one takes the whole cell or none of it. Where ops are says where stages are.

UNSHARD, RESHARD and REDUCE_GRAD tell torch when to gather a stage's sharded weights and when to scale and sum
its gradients. They have no counterpart here (our runtime does the latter after a stage's last backward), so they
are checked for their place and left out on reading, and put in on writing:

    UNSHARD s        before the first op, for every stage of the rank
    REDUCE_GRAD s    after the last op of the stage; without it gradients are sums, not means
    RESHARD s        after that

The first and last do nothing unless the stage's module is sharded (FSDP). Since torch 2.15 a file must also say when
each send and each sum of gradients is waited for, which older ones can't read. The form `compute_comms_waits` does:

    WAIT_SEND_F s m         before the backward of s and m on the rank, which shows that the message has come
    WAIT_SEND_B s m         at the row's end, where every receive has been posted
    WAIT_REDUCE_GRAD s      after its REDUCE_GRAD

Each wait comes once at most, after what it waits for, and is left out on reading as well. torch itself puts messages
into a file of the form `compute_only`, a grid of unit steps. It runs `compute_comms` as it stands.

`(0F3;3B1)OVERLAP_F_B` is a forward and a backward that torch may run at once: a pair (`schedule.pairs`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from penstock.schedule import Op, Placement, Schedule, ScheduleError, check
from penstock.schedule.messages import NCCL, has_communication, remove_communication
from penstock.schedule.op import BACKWARD, COMMUNICATION, FORWARD, INPUT, KINDS, WEIGHT
from penstock.schedule.pairs import of_steps, paired_steps
from penstock.schedule.text import unit_columns

BOOKKEEPING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
WAITS = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}
"""Of each wait what it waits for; a file of torch 2.15 or newer has one for each send."""
OVERLAP = "OVERLAP_F_B"
ACTIONS = (*KINDS, *COMMUNICATION)
"""The actions that are ops of ours, by the same names."""
WHOLE = -1
"""Stands for the microbatch of an action on a whole stage."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_ACTION = re.compile(r"(?P<stage>[0-9]{1,9})(?P<kind>[A-Z]+(?:_[A-Z]+)*)(?P<microbatch>[0-9]{1,9})?")
_TOGETHER = re.compile(r"\((?P<parts>[^()]*)\)(?P<kind>[A-Z]+(?:_[A-Z]+)*)")
_BLANK = " \t"


@dataclass(frozen=True)
class Cell:
    """A cell that holds something: its line and column, counted from 1, and the character it starts at."""

    line: int
    column: int
    character: int
    text: str

    @property
    def rank(self) -> int:
        return self.line - 1


def from_torch_csv(text: str, name: str = "torch") -> Schedule:
    """Reads torch's CSV, `compute_only` or `compute_comms`; the schedule has one pipeline.

    Cells may have blanks around them, and rows may differ in length, as torch writes them. What is read is in
    its place, not proved: `ps.check` does that.

    Args:
        text: of a CSV file.
        name: of the schedule; the file has none.

    Raises:
        ScheduleError (rule "csv"): names the line and column, counted from 1, and has them as attributes.

    Examples:
        >>> import penstock as ps
        >>> s = ps.formats.from_torch_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1")
        >>> s.num_ranks, s.num_microbatches
        (2, 2)
    """
    lines = _LINE_END.split(text)
    if lines[-1] == "":
        lines.pop()
    if not lines:
        _fail(Cell(1, 1, 1, ""), "the file holds no rank; it has a line for each, with its actions between commas")
    spots: dict[Op, Cell] = {}
    hosts: dict[int, Cell] = {}
    beside: list[tuple[Op, Cell]] = []
    rows: list[list[tuple[Op, ...]]] = []
    for line, content in enumerate(lines, start=1):
        row: list[tuple[Op, ...]] = []
        for cell in _cells(line, content):
            step = _step(cell)
            for op in step:
                _note(op, cell, spots, hosts)
            if step[0].kind in ACTIONS:
                row.append(step)
            else:
                beside.append((step[0], cell))
        if not row:
            _fail(
                Cell(line, 1, 1, content),
                f"rank {line - 1} has no op; a line is a rank, and each runs at least one stage"
                + ("; delete the blank line" if not content.strip(_BLANK) and line == len(lines) else ""),
            )
        rows.append(row)
    for op, cell in beside:
        if op.stage not in hosts or hosts[op.stage].rank != cell.rank:
            why = f"{op.kind} is for stages of its own rank, and stage {op.stage} has no op here"
            _fail(cell, f"{_spelled(cell)}: {why}")
    spots = {op: cell for op, cell in spots.items() if op.kind in ACTIONS}
    num_stages = _count_stages(hosts)
    num_microbatches = _count_microbatches(spots, num_stages)
    placement = Placement((tuple(hosts[stage].rank for stage in range(num_stages)),))
    order, pairs = of_steps(rows)
    return Schedule(name, placement, order, (0,) * num_microbatches, pairs=pairs)


def _cells(line: int, content: str) -> Iterator[Cell]:
    """The cells of a line that are not bubbles."""
    start = 1
    for column, raw in enumerate(content.split(","), start=1):
        text = raw.strip(_BLANK)
        if text:
            yield Cell(line, column, start + raw.index(text), text)
        start += len(raw) + 1


def _step(cell: Cell) -> tuple[Op, ...]:
    """The action of a cell, or the forward and the backward that it has run as one."""
    together = _TOGETHER.fullmatch(cell.text)
    if together is None:
        return (_action(cell, cell.text),)
    if together["kind"] != OVERLAP:
        _fail(cell, f"{_spelled(cell)}: torch writes pairs as (0F3;3B1){OVERLAP}, there is no {together['kind']}")
    pair = tuple(_action(cell, part.strip(_BLANK)) for part in together["parts"].split(";"))
    if [op.kind for op in pair] != [FORWARD, BACKWARD]:
        _fail(
            cell,
            f"{_spelled(cell)}: {OVERLAP} is of a forward (F) and then a full backward (B), and this is of "
            f"{', '.join(op.kind for op in pair)}; put its parts in cells of their own",
        )
    return pair


def _action(cell: Cell, text: str) -> Op:
    match = _ACTION.fullmatch(text)
    if match is None:
        _fail(cell, f"{_spelled(cell)} is no action; write [stage][action][microbatch], like 2F0 or 3SEND_F1")
    kind, stage, microbatch = match["kind"], int(match["stage"]), match["microbatch"]
    if kind in BOOKKEEPING:
        if microbatch is not None:
            _fail(cell, f"{_spelled(cell)}: {kind} is for a whole stage; leave out microbatch {microbatch}")
        return Op(kind, stage, WHOLE)
    if kind == "BW":
        _fail(
            cell,
            f"{_spelled(cell)}: BW was the full backward, and B its input half, in an older torch; they are B and I "
            "now, so replace every B by I, then every IW by B",
        )
    if kind not in ACTIONS and kind not in WAITS:
        known = ", ".join((*ACTIONS, *BOOKKEEPING, *WAITS))
        what = (
            f"{kind} is an op of Penstock's, not of torch's" if kind in ("R", "U") else f"there is no action {kind}"
        )
        _fail(cell, f"{_spelled(cell)}: {what}; there are {known}")
    if microbatch is None:
        _fail(cell, f"{_spelled(cell)} names no microbatch; write one after {kind}, like {stage}{kind}0")
    return Op(kind, stage, int(microbatch))


def _note(op: Op, cell: Cell, spots: dict[Op, Cell], hosts: dict[int, Cell]) -> None:
    """Notes where an op is, or refuses it there."""
    if op.kind.startswith("WAIT_"):
        before = op._replace(kind=op.kind.removeprefix("WAIT_"))
        if before not in spots or spots[before].rank != cell.rank:
            _fail(cell, f"{_spelled(cell)}: no {_named(before)} comes before it on its rank")
    if op in spots and op.kind not in ("UNSHARD", "RESHARD", "WAIT_REDUCE_GRAD"):
        _fail(cell, f"{_named(op)} occurs twice, first at {_at(spots[op])}; each op runs once", op)
    if op.kind in ACTIONS:
        host = hosts.setdefault(op.stage, cell)
        if host.rank != cell.rank:
            _fail(
                cell,
                f"{op} puts stage {op.stage} on rank {cell.rank}, but it is on rank {host.rank} too, at {_at(host)}; "
                "torch runs each stage on one rank",
                op,
            )
        summed = spots.get(Op("REDUCE_GRAD", op.stage, WHOLE))
        if summed is not None and op.kind in (BACKWARD, WEIGHT):
            _fail(cell, f"{op} comes after the REDUCE_GRAD of its stage, at {_at(summed)}, so it would be lost", op)
    spots[op] = cell


def _count_stages(hosts: dict[int, Cell]) -> int:
    num_stages = max(hosts) + 1
    if len(hosts) < num_stages:
        missing = next(stage for stage in itertools.count() if stage not in hosts)
        above = hosts[min(stage for stage in hosts if stage > missing)]
        _fail(above, f"{_spelled(above)}: stage {missing} has no op anywhere, and stages are numbered without gaps")
    return num_stages


def _count_microbatches(spots: dict[Op, Cell], num_stages: int) -> int:
    """The number of microbatches; each stage has F and B, or F, I and W, of every one."""
    num_microbatches = max(op.microbatch for op in spots) + 1
    there: list[dict[str, dict[int, Cell]]] = [{"F": {}, "I": {}, "W": {}} for _ in range(num_stages)]
    for op, cell in spots.items():
        for half in ("I", "W") if op.kind == BACKWARD else (op.kind,) if op.kind in KINDS else ():
            if (other := there[op.stage][half].get(op.microbatch)) is not None:
                _refuse_two_backwards(spots, op, cell, other)
            there[op.stage][half][op.microbatch] = cell
    for stage, of_kind in enumerate(there):
        for kind, cells in of_kind.items():
            if len(cells) == num_microbatches:
                continue
            missing = next(m for m in itertools.count() if m not in cells)
            if kind != FORWARD and missing not in there[stage]["W" if kind == INPUT else "I"]:
                kind = BACKWARD  # neither half is there
            above = [m for m in cells if m > missing]
            stages_cells = [cell for op, cell in spots.items() if op.stage == stage]
            near = cells[min(above)] if above else max(stages_cells, key=lambda cell: cell.column)
            op = Op(kind, stage, missing)
            _fail(
                near,
                f"{op} is missing here or before; the microbatches go from 0 to {num_microbatches - 1} without gaps"
                if above
                else f"{op} is missing after this cell; the microbatches go from 0 to {num_microbatches - 1}",
                op,
            )
    return num_microbatches


def _refuse_two_backwards(spots: dict[Op, Cell], op: Op, cell: Cell, other: Cell) -> NoReturn:
    old = Op(WEIGHT, *op[1:]) in spots and Op(INPUT, *op[1:]) not in spots
    hint = "; an older torch wrote B for the input half: if this file is as old, replace every B by I" if old else ""
    _fail(
        max(cell, other, key=lambda c: c.column),
        f"microbatch {op.microbatch} of stage {op.stage} has two backwards, at {_at(other)} and {_at(cell)}: "
        f"B is the full backward, I and W are its halves{hint}",
        op,
    )


def _named(op: Op) -> str:
    return f"{op.stage}{op.kind}" if op.microbatch == WHOLE else str(op)


def _spelled(cell: Cell) -> str:
    return repr(cell.text if len(cell.text) <= 40 else cell.text[:40] + "...")


def _at(cell: Cell) -> str:
    return f"line {cell.line}, column {cell.column}"


def _fail(cell: Cell, message: str, op: Op | None = None) -> NoReturn:
    raise ScheduleError(
        f"{_at(cell)} (character {cell.character}): {message}",
        rule="csv",
        rank=cell.rank,
        op=op,
        line=cell.line,
        column=cell.column,
    )


CsvForm = Literal["compute_only", "compute_comms", "compute_comms_waits"]
"""The first two are names of torch's `_load_csv`, too: load a file in the form it was written in. The third is what
"compute_comms" is since torch 2.15.
"""


def to_torch_csv(schedule: Schedule, form: CsvForm | None = None, channels: str = NCCL) -> str:
    """The schedule as torch's CSV. Its name and `max_in_flight` have no place there.

    Args:
        schedule: any schedule.
        form: "compute_only" leaves messages out, "compute_comms" adds them where the schedule has none, and
            "compute_comms_waits" also says when they are waited for, as torch 2.15 and newer ask; by default it is
            "compute_comms" or "compute_only", as the schedule is.
        channels: what will carry the messages in torch, see `schedule.messages`. A schedule whose messages would
            hang there is refused; messages that it lacks are placed for it.

    Raises:
        ScheduleError: the schedule is not valid, or (rule "torch") needs what torch's pipelining lacks; the
            message names it.

    Examples:
        >>> import penstock as ps
        >>> print(ps.formats.to_torch_csv(ps.build("gpipe", 2, 2)).rstrip())
        0F0,0F1,,,0B0,0B1
        ,1F0,1F1,1B0,1B1
    """
    if form is None:
        form = "compute_comms" if has_communication(schedule) else "compute_only"
    _refuse(schedule)
    schedule = in_form(schedule, form, channels)
    check(schedule, channels=None if form == "compute_only" else channels)
    _check_losses(schedule)
    if form != "compute_only":
        rows = [_with_bookkeeping(row, form == "compute_comms_waits") for row in paired_steps(schedule)]
    else:
        steps = zip(paired_steps(schedule), unit_columns(schedule), strict=True)
        rows = [_spread(row, columns) for row, columns in steps]
    return "".join(",".join(row) + "\n" for row in rows)


def in_form(schedule: Schedule, form: CsvForm | None, channels: str = NCCL) -> Schedule:
    """The schedule without messages as ops, or with them; as it is where no form is given."""
    if form == "compute_only":
        return remove_communication(schedule)
    if form is None or has_communication(schedule):
        return schedule
    from penstock.passes.communication import add_communication  # here, since other forms need no passes

    return add_communication(schedule, channels=channels)


def _spread(row: Sequence[tuple[Op, ...]], columns: Sequence[int]) -> list[str]:
    """The row with an empty cell for every step in which the rank waits; the two of a pair are in one column."""
    cells = [""] * (columns[-1] + 1)
    for ops, column in zip(row, dict.fromkeys(columns), strict=True):
        cells[column] = _written(ops)
    return cells


def _with_bookkeeping(row: Sequence[tuple[Op, ...]], waits: bool) -> list[str]:
    last = {op.stage: step for step, ops in enumerate(row) for op in ops}
    cells = [f"{stage}UNSHARD" for stage in last]
    sent: dict[Op, None] = {}
    for step, ops in enumerate(row):
        if waits:
            for op in ops:
                if op.kind in (BACKWARD, INPUT) and (send := Op("SEND_F", op.stage, op.microbatch)) in sent:
                    del sent[send]
                    cells.append(_wait(send))
            sent.update((op, None) for op in ops if op.kind in WAITS.values())
        cells.append(_written(ops))
        for stage in dict.fromkeys(op.stage for op in ops):
            if last[stage] == step:
                summed = [f"{stage}REDUCE_GRAD", *([f"{stage}WAIT_REDUCE_GRAD"] if waits else [])]
                cells += [*summed, f"{stage}RESHARD"]
    return [*cells, *map(_wait, sent)]


def _wait(send: Op) -> str:
    return f"{send.stage}WAIT_{send.kind}{send.microbatch}"


def _written(ops: tuple[Op, ...]) -> str:
    """An op, or the two of a pair, as torch writes them."""
    return str(ops[0]) if len(ops) == 1 else f"({';'.join(map(str, ops))}){OVERLAP}"


LACKED = {
    "R": "recomputation as an op of the schedule (R); checkpoint inside the stage's module instead, and leave R out",
    "U": "updates as ops of the schedule (U); leave them out, and step the optimizer after the schedule",
}
"""Kinds of op that torch's pipelining lacks."""


def _refuse(schedule: Schedule) -> None:
    """Raises ScheduleError that names the first feature of the schedule that torch's pipelining lacks."""
    if (num := schedule.placement.num_pipelines) > 1:
        _lacks(f"several pipelines ({num} here): one chain of stages, each on one rank, is all it runs")
    if schedule.placement.shared:
        stage, ranks = schedule.placement.shared[0]
        _lacks(f"stages that several ranks share (stage {stage} is on ranks {', '.join(map(str, ranks))})")
    if registered := schedule.graph.registered:
        _lacks(f"op kinds of the user's own ({registered[0].kind} here)")
    if not schedule.graph.is_chain:
        _lacks(
            "a graph of stages: in its schedules stage s feeds stage s + 1 and no other, and all stages have as many "
            "microbatches"
        )
    for rank, row in enumerate(schedule.order):
        if not row:
            _lacks(f"ranks with nothing to do (rank {rank} has no op): each hosts at least one stage")
        for step, op in enumerate(row):
            if op.kind not in ACTIONS:
                _lacks(LACKED.get(op.kind, f"ops of kind {op.kind}"), rank, step, op)


def _check_losses(schedule: Schedule) -> None:
    """torch finds a microbatch's loss by its place among the forwards of the last stage."""
    last = schedule.num_stages - 1
    for rank, row in enumerate(schedule.order):
        forwards = [(step, op) for step, op in enumerate(row) if op.kind == FORWARD and op.stage == last]
        for place, (step, op) in enumerate(forwards):
            if op.microbatch != place:
                why = f"{op} is number {place} there): it would take another microbatch's loss for the backward"
                _lacks(f"forwards of the last stage out of microbatch order ({why}", rank, step, op)


def _lacks(feature: str, rank: int | None = None, step: int | None = None, op: Op | None = None) -> None:
    spot = "" if rank is None else f"rank {rank}, step {step}, {op}: "
    raise ScheduleError(f"{spot}torch's pipelining lacks {feature}", rule="torch", rank=rank, step=step, op=op)
