"""Where in a schedule something is wrong: the op in words, its row with an arrow under it, the error with both."""

from __future__ import annotations

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import Op
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import cell_texts

_SHOWN_EACH_SIDE = 6


def name_of(op: Op) -> str:
    return f"{op.short()} of stage {op.stage}"


def only(count: int, noun: str) -> str:
    """Says how many stages or microbatches there are, where an op names another."""
    if count == 1:
        return f"there is only 1 {noun}, {noun} 0"
    return f"there are only {count} {noun}{'es' if noun.endswith('h') else 's'}, 0 to {count - 1}"


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
    text = f"rank {rank}, step {step}, {name_of(op)}: {message} (rule: {rule})\n{spot_of(schedule, rank, step)}"
    return ScheduleError(text, rule=rule, rank=rank, step=step, op=op, peer=peer)
