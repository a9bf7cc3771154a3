"""Updates in words: how often they come, and how many fall between a microbatch's forward and its backward."""

from __future__ import annotations

from penstock.schedule import Schedule, count_mismatch


def bound(most: int) -> str:
    """`at most 1 update between F and B`."""
    return f"at most {most} update{'' if most == 1 else 's'} between F and B" if most else "no update between F and B"


def one_every(window: int) -> str:
    """`one every 4 microbatches`: how often updates come."""
    return "one every microbatch" if window == 1 else f"one every {window} microbatches"


def proved_mismatch(schedule: Schedule) -> int:
    """The most updates between any microbatch's forward and backward; 0 where the schedule has none."""
    return max(count_mismatch(schedule).values(), default=0) if schedule.updates is not None else 0
