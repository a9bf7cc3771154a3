"""Writing torch's CSV, in the forms that `_PipelineScheduleRuntime` loads.

`compute_only` is a grid of unit steps: torch puts messages in when it loads the file. `compute_comms` is a list of
actions a rank with the messages among them (`passes.add_communication`). torch runs that as it stands, so it
also holds what torch would otherwise put in itself:

    UNSHARD s        before the first op, for every stage of the rank
    REDUCE_GRAD s    after the last op of the stage; without it gradients are sums, not means
    RESHARD s        after that

The first and last do nothing unless the stage's module is sharded (FSDP). Since torch 2.15 such a file must also say
when each send and each sum is waited for, which older ones can't read; this is `compute_comms_waits`:

    WAIT_SEND_F s m         before the backward of s and m on the rank, which shows that the message has come
    WAIT_SEND_B s m         at the row's end, where every receive has been posted
    WAIT_REDUCE_GRAD s      after its REDUCE_GRAD
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penstock.formats.torch_csv import ACTIONS, OVERLAP, WAITS
from penstock.schedule import Op, Schedule, ScheduleError, check
from penstock.schedule.messages import NCCL, has_communication, remove_communication
from penstock.schedule.op import BACKWARD, FORWARD, INPUT
from penstock.schedule.pairs import paired_steps
from penstock.schedule.text import unit_columns

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
    if form == "compute_only":
        schedule = remove_communication(schedule)
    elif not has_communication(schedule):
        from penstock.passes.communication import add_communication  # here, since other forms need no passes

        schedule = add_communication(schedule, channels=channels)
    check(schedule, channels=None if form == "compute_only" else channels)
    _check_losses(schedule)
    if form != "compute_only":
        rows = [_with_bookkeeping(row, form == "compute_comms_waits") for row in paired_steps(schedule)]
    else:
        steps = zip(paired_steps(schedule), unit_columns(schedule), strict=True)
        rows = [_spread(row, columns) for row, columns in steps]
    return "".join(",".join(row) + "\n" for row in rows)


def _spread(row: Sequence[tuple[Op, ...]], columns: Sequence[int]) -> list[str]:
    """The row with an empty cell for every step in which the rank waits; the two of a pair are in one column."""
    cells = [""] * (columns[-1] + 1)
    for ops, column in zip(row, dict.fromkeys(columns), strict=True):
        cells[column] = _action(ops)
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
        cells.append(_action(ops))
        for stage in dict.fromkeys(op.stage for op in ops):
            if last[stage] == step:
                summed = [f"{stage}REDUCE_GRAD", *([f"{stage}WAIT_REDUCE_GRAD"] if waits else [])]
                cells += [*summed, f"{stage}RESHARD"]
    return [*cells, *map(_wait, sent)]


def _wait(send: Op) -> str:
    return f"{send.stage}WAIT_{send.kind}{send.microbatch}"


def _action(ops: tuple[Op, ...]) -> str:
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
