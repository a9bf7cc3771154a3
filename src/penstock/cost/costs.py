"""What ops cost: milliseconds for each stage's F, I, W and B, and the activations a forward keeps."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

FREED_BY_INPUT = 0.5
"""Share of a stage's activation that I frees where nothing else is said; W frees the rest."""


class CostError(ValueError):
    """Costs or links that make no sense: negative, not a number, of the wrong length."""


def _validated(name: str, values: Sequence[float], length: int | None) -> tuple[float, ...]:
    try:
        result = tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        raise CostError(f"{name} is {reprlib.repr(values)}: give one number a stage") from None
    if length is not None and len(result) != length:
        raise CostError(f"{name} has {len(result)} entries, one a stage is needed: {length}")
    for stage, value in enumerate(result):
        if not math.isfinite(value) or value < 0:
            raise CostError(f"{name} of stage {stage} is {value}: give a number of at least 0")
    return result


@dataclass(frozen=True)
class Costs:
    """Costs of every stage, one entry a stage.

    Attributes:
        f, i, w: milliseconds of the forward, the input-gradient and the weight-gradient half.
        b: milliseconds of a full backward; i + w where not given.
        activation: what one forward keeps, in activation units or bytes; 1 a stage where not given.
        freed_by_input: share of the activation, 0 to 1, that I frees; W (or B) frees the rest.

    Raises:
        CostError: a negative or non-finite number, lists of different lengths, or no stage.
    """

    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    b: Sequence[float] = ()
    activation: Sequence[float] = ()
    freed_by_input: float = field(default=FREED_BY_INPUT)

    def __post_init__(self) -> None:
        f = _validated("f", self.f, None)
        if not f:
            raise CostError("costs need at least one stage")
        i, w = _validated("i", self.i, len(f)), _validated("w", self.w, len(f))
        b = _validated("b", self.b, None) or tuple(x + y for x, y in zip(i, w, strict=True))
        activation = _validated("activation", self.activation, None) or (1.0,) * len(f)
        _validated("b", b, len(f)), _validated("activation", activation, len(f))
        share = self.freed_by_input
        if not isinstance(share, Real) or not 0 <= share <= 1:
            raise CostError(f"freed_by_input is {share!r}: give a share from 0 to 1")
        for name, value in (("f", f), ("i", i), ("w", w), ("b", b), ("activation", activation)):
            object.__setattr__(self, name, value)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        b: float | None = None,
        activation: float = 1.0,
        freed_by_input: float = FREED_BY_INPUT,
    ) -> Costs:
        """The same costs for every stage."""
        if num_stages < 1:
            raise CostError(f"costs need at least one stage, got {num_stages}")
        n = num_stages
        return cls([f] * n, [i] * n, [w] * n, [] if b is None else [b] * n, [activation] * n, freed_by_input)

    @property
    def num_stages(self) -> int:
        return len(self.f)

    def duration(self, kind: str, stage: int) -> float:
        """Milliseconds of one op."""
        return {"F": self.f, "I": self.i, "W": self.w, "B": self.b}[kind][stage]

    def memory_change(self, kind: str, stage: int) -> float:
        """What one op adds to (F) or takes from (I, W, B) the activations its rank holds."""
        share = {"F": 1.0, "I": -self.freed_by_input, "W": self.freed_by_input - 1.0, "B": -1.0}[kind]
        return share * self.activation[stage]
