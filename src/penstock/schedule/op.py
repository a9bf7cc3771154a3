"""One op: what a rank does for one stage and one microbatch.

The letters are torch's. PipeMorph and the zero-bubble papers write B for what is `I` here.

    F  forward                 B  full backward (I and W at once)
    I  input-gradient half     W  weight-gradient half
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)

_OP = re.compile(r"(?P<stage>[0-9]{1,9})?(?P<kind>[A-Z])(?P<microbatch>[0-9]{1,9})")


class Op(NamedTuple):
    """An op of `stage` (counted over the whole model) on `microbatch`; `kind` is one of F, B, I, W."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def short(self) -> str:
        """The op without its stage, for rows of ranks that host just one."""
        return f"{self.kind}{self.microbatch}"


def parse_op(text: str, default_stage: int | None = None) -> Op:
    """Reads `2F0` (stage 2), or `F0` where `default_stage` says which stage that is.

    Strict: the whole text must match. Raises ValueError.
    """
    match = _OP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not an op: write [stage]KIND<microbatch>, like F0 or 2F0")
    stage = match["stage"]
    if stage is None:
        if default_stage is None:
            raise ValueError(f"{text!r} names no stage, and its rank hosts several: write 2{text} for stage 2")
        return Op(match["kind"], default_stage, int(match["microbatch"]))
    return Op(match["kind"], int(stage), int(match["microbatch"]))
