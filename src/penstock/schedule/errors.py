"""The one exception for a schedule that must not run: it says where, which rule, and what is missing."""

from __future__ import annotations

from pathlib import Path

from penstock.schedule.op import Op


class ScheduleError(ValueError):
    """A schedule is invalid, or cannot be built or read. What does not apply is None.

    Attributes:
        rule: short name of the broken rule, like "order" or "deadlock".
        rank, step, op: the spot; `step` is the index in the rank's order.
        peer: the missing or mismatched other side, an op or a rank, in words.
        line, column: the spot in a file, counted from 1; a column of a CSV is a cell.

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
        """The same error with the file named first."""
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
