"""The exception for a schedule that must not run: where it is wrong, which rule it breaks, and what is missing.

`text.error_at` makes one that shows the row around the op that is wrong.
"""

from __future__ import annotations

from pathlib import Path

from penstock.schedule.op import Op


class ScheduleError(ValueError):
    """A schedule is invalid, or cannot be built or read. Attributes that do not apply are None.

    Attributes:
        rule: short name of the broken rule, such as "order" or "deadlock".
        rank, step, op: where it is broken; `step` is the index in the rank's order.
        peer: the other side that is missing or does not match, an op or a rank, in words.
        line, column: the place in a file, counted from 1. In a CSV, a column is a cell.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.check(ps.parse("rank 0 | F0 B0\\nrank 1 | B0 F0"))
        ... except ps.ScheduleError as error:
        ...     print(error.rule, error.rank, error.step, error.op)
        order 1 0 1B0
    """

    def __init__(
        self,
        message: str,
        *,
        rule: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        op: Op | None = None,
        peer: str | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rule, self.rank, self.step, self.op, self.peer = rule, rank, step, op, peer
        self.line, self.column = line, column

    def in_file(self, path: str | Path) -> ScheduleError:
        """The same error, with the name of the file in front."""
        return ScheduleError(
            f"{path}: {self}",
            rule=self.rule,
            rank=self.rank,
            step=self.step,
            op=self.op,
            peer=self.peer,
            line=self.line,
            column=self.column,
        )


def name_of(op: Op) -> str:
    """An op in words."""
    return f"{op.short()} of stage {op.stage}"


def only(count: int, noun: str) -> str:
    """Says how many stages or microbatches there are, where an op names another."""
    if count == 1:
        return f"there is only 1 {noun}, {noun} 0"
    return f"there are only {count} {noun}{'es' if noun.endswith('h') else 's'}, 0 to {count - 1}"
