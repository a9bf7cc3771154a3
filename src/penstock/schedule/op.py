"""One op: what a rank does for one stage and one microbatch.

The letters are torch's. PipeMorph and the zero-bubble papers write B for what is `I` here.

    F  forward                 B  full backward (I and W at once)
    I  input-gradient half     W  weight-gradient half
    R  forward again, before a backward whose F kept only its input
    U  update: a copy of a stage takes over new parameters (see `updates`)

GIVE and PREDICT belong to updates, too: with them forwards read weights that part of a window's gradient has moved
(see `tentative`).

SEND_F, RECV_F, SEND_B and RECV_B are messages as ops. They are for runtimes that want messages in the schedule, such
as torch's; Penstock's own runtime places messages itself. Any other kind must be registered with the schedule's stage
graph.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE, UPDATE = "F", "B", "I", "W", "R", "U"
GIVE, PREDICT = "GIVE", "PREDICT"
OF_UPDATES = (UPDATE, GIVE, PREDICT)
"""The kinds that belong to an update, and are numbered by update and pipeline."""
KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
"""The kinds that every schedule is made of."""
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
BUILT_IN = (*KINDS, RECOMPUTE, *OF_UPDATES, *COMMUNICATION)

KIND_NAME = r"[A-Z]|[A-Z][A-Z0-9_]+[A-Z]|[A-Z][A-Z0-9_]*[0-9]"
"""The names that a kind may have."""
_OP = re.compile(
    rf"(?P<stage>[0-9]{{1,9}})?(?P<kind>{KIND_NAME})(?:(?<=[A-Z])|(?<=[0-9])\.)(?P<microbatch>[0-9]{{1,9}})"
)


_DIGITS = frozenset("0123456789")


class Op(NamedTuple):
    """One op of a schedule: a kind, a stage and a microbatch.

    As text it is stage, kind and microbatch: 2F0. If the kind's name ends with a digit, a dot stands before the
    microbatch: 1GATHER2.0.

    Attributes:
        kind: F (forward), B (backward), I and W (its two halves: input and weight gradients), R (a forward that runs
            again), U (an update), or the name of another kind, such as SEND_F.
        stage: the stage, counted over the whole model from 0.
        microbatch: the microbatch, from 0. For a registered op and for those of updates: its number among the ops of
            its kind and stage.

    Examples:
        >>> import penstock as ps
        >>> op = ps.Op("B", stage=1, microbatch=3)
        >>> str(op), op.short()
        ('1B3', 'B3')
        >>> ps.build("1f1b", 2, 4).order[1][0]
        Op(kind='F', stage=1, microbatch=0)
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.short()}"

    def short(self) -> str:
        """The op's text without its stage, for rows of ranks that host only one."""
        return f"{self.kind}{'.' if self.kind[-1] in _DIGITS else ''}{self.microbatch}"


def parse_op(text: str, default_stage: int | None = None) -> Op:
    """Reads one op: `2F0` (of stage 2), or `F0` with a `default_stage`.

    The whole text must match. Raises ValueError if it does not.

    Args:
        text: the text of one op.
        default_stage: the stage of an op that names none.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.parse_op("2F0"), ps.schedule.parse_op("I5", default_stage=1)
        (Op(kind='F', stage=2, microbatch=0), Op(kind='I', stage=1, microbatch=5))
    """
    match = _OP.fullmatch(text)
    if match is None:
        near = text[:40].strip(",;").upper().replace("O", "0")
        meant = _OP.fullmatch(near) if near != text else None
        hint = f"did you mean {near}?" if meant and meant["kind"] in KINDS else "like F0 or 2F0"
        raise ValueError(f"{text[:40]!r} is not an op: write [stage]KIND<microbatch>, {hint}")
    stage = match["stage"]
    if stage is None:
        if default_stage is None:
            raise ValueError(f"{text!r} names no stage, and its rank hosts several: write 2{text} for stage 2")
        return Op(match["kind"], default_stage, int(match["microbatch"]))
    return Op(match["kind"], int(stage), int(match["microbatch"]))
