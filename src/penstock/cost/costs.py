"""What ops cost: milliseconds for each stage's F, I, W and B, the activations a forward keeps, what weights take."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING

from penstock.schedule.short_repr import short_repr

if TYPE_CHECKING:
    from penstock.schedule import Placement

FREED_BY_INPUT = 0.5
"""Share of a stage's activation that I frees where nothing else is said; W frees the rest."""

_OPTIONAL_ROWS = ("update_bytes", "take_over", "weight_bytes", "gradient_bytes", "optimizer_bytes")
"""What stays empty where it is not given."""


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


def _uneven(values: Sequence[float]) -> tuple[float, ...]:
    try:
        result = tuple(float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        raise CostError(f"uneven is {reprlib.repr(values)}: give one number a microbatch") from None
    for microbatch, value in enumerate(result):
        if not 0 <= value < math.inf:
            raise CostError(f"uneven of microbatch {microbatch} is {value}: give a number of at least 0")
    return result


OtherCosts = (
    Mapping[str | tuple[str, int], float | tuple[float, float]] | tuple[tuple[str, int | None, float, float], ...]
)


def _other(given: OtherCosts, num_stages: int) -> tuple[tuple[str, int | None, float, float], ...]:
    """Registered ops' costs as (kind, stage or None, ms, memory)."""
    if isinstance(given, tuple):
        return given
    entries: list[tuple[str, int | None, float, float]] = []
    for key, value in given.items():
        kind, stage = (key, None) if isinstance(key, str) else key
        ms, memory = value if isinstance(value, tuple) else (value, 0.0)
        if stage is not None and not 0 <= stage < num_stages:
            raise CostError(f"the cost of {kind} names stage {stage}: stages go from 0 to {num_stages - 1}")
        if not (isinstance(ms, Real) and 0 <= ms < math.inf and isinstance(memory, Real) and math.isfinite(memory)):
            raise CostError(f"the cost of {key} is {value!r}: give ms of at least 0, or (ms, memory)")
        entries.append((kind, stage, float(ms), float(memory)))
    return tuple(sorted(entries, key=lambda entry: (entry[0], -1 if entry[1] is None else entry[1])))


@dataclass(frozen=True)
class Costs:
    """Costs of every stage, one entry a stage.

    Attributes:
        f, i, w: milliseconds of the forward, the input-gradient and the weight-gradient half.
        b: milliseconds of a full backward; i + w where not given.
        activation: what one forward keeps, in activation units or bytes; 1 a stage where not given.
        freed_by_input: share of the activation, 0 to 1, that I frees; W (or B) frees the rest.
        kept_by_recompute: share of the activation that a forward keeps (its input) where an R runs it again.
        other: registered ops' costs by kind, or by (kind, stage): ms, or (ms, memory). Memory above 0 is held
            from the op's start, below 0 it is freed at its end. Kinds that are not named cost nothing, but R, which
            then takes as long as F.
        message_bytes: what a stage's forward sends on, and so what its gradient weighs coming back; 0 a stage where
            not given. It matters where a link has a bandwidth, and where messages are really sent.
        update_bytes: what a stage's gradients weigh on their way to the owner of its optimizer state, and its
            parameters coming back, where updates are ops of the schedule; 0 a stage where not given.
        take_over: milliseconds of an update on a copy that does not own the stage, which only takes parameters over;
            0 a stage where not given.
        weight_bytes: of a stage's parameters as ops read them; not given where nobody asks for memory.
        gradient_bytes: of a buffer of their gradients; `weight_bytes` where not given.
        optimizer_bytes: of what only the optimizer keeps: moments, and parameters in full precision where ops read
            shorter ones; 0 a stage where not given.
        uneven: how many times as long the ops of each microbatch take, as those of long and short sequences do; 1 for
            those not given. Runs, simulated or emulated, take it; schedules are made as if all were 1.

    The time of an update on its owner is that of kind "U" in `other`. Messages as ops (SEND_F and the like) take no
    time: `Links` says how late they arrive.

    Raises:
        CostError: a negative or non-finite number, lists of different lengths, or no stage.
    """

    f: Sequence[float]
    i: Sequence[float]
    w: Sequence[float]
    b: Sequence[float] = ()
    activation: Sequence[float] = ()
    freed_by_input: float = field(default=FREED_BY_INPUT)
    kept_by_recompute: float = 0.0
    other: OtherCosts = field(default=())
    message_bytes: Sequence[float] = ()
    uneven: Sequence[float] = ()
    update_bytes: Sequence[float] = ()
    take_over: Sequence[float] = ()
    weight_bytes: Sequence[float] = ()
    gradient_bytes: Sequence[float] = ()
    optimizer_bytes: Sequence[float] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        f = _validated("f", self.f, None)
        if not f:
            raise CostError("costs need at least one stage")
        i, w = _validated("i", self.i, len(f)), _validated("w", self.w, len(f))
        b = _validated("b", self.b, None) or tuple(x + y for x, y in zip(i, w, strict=True))
        activation = _validated("activation", self.activation, None) or (1.0,) * len(f)
        message_bytes = _validated("message_bytes", self.message_bytes, None) or (0.0,) * len(f)
        for name in _OPTIONAL_ROWS:
            given = getattr(self, name)
            object.__setattr__(self, name, _validated(name, given, len(f) if given else None))
        rows = {"f": f, "i": i, "w": w, "b": b, "activation": activation}
        rows |= {"message_bytes": message_bytes}
        for name, row in rows.items():
            _validated(name, row, len(f))
        for name in ("freed_by_input", "kept_by_recompute"):
            share = getattr(self, name)
            if not isinstance(share, Real) or not 0 <= float(share) <= 1:
                raise CostError(f"{name} is {share!r}: give a share from 0 to 1")
        object.__setattr__(self, "other", _other(self.other, len(f)))
        object.__setattr__(self, "uneven", _uneven(self.uneven))
        for name, value in rows.items():
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
        if not isinstance(num_stages, Integral) or num_stages < 1:
            raise CostError(f"costs need at least one stage, a whole number, got {num_stages!r}")
        n = num_stages
        return cls([f] * n, [i] * n, [w] * n, [] if b is None else [b] * n, [activation] * n, freed_by_input)

    @classmethod
    def assumed(cls, num_ranks: int, placement: Placement) -> Costs:
        """What is assumed where no costs are given: each rank's share of the model takes F = I = W = 1 ms.

        A microbatch's way through the whole model takes the ranks `num_ranks` ms for each of the three, however
        finely the model is cut, so makespans of different schedules compare. All stages take as long as each other;
        one that several ranks run together occupies each of them. An activation is 1 a stage, as in `uniform`.
        """
        num_stages = placement.num_stages
        occupied = sum(len(placement.hosts(0, stage)) for stage in range(num_stages))
        # A multiple of 2**-36, so that sums are exact: with thirds as they are, rounding would decide which of two
        # ops that are ready at the same moment comes first.
        each = round(2**36 * num_ranks / occupied) / 2**36
        return cls.uniform(num_stages, each, each, each)

    @property
    def num_stages(self) -> int:
        return len(self.f)

    def duration(self, kind: str, stage: int, owns: bool = True) -> float:
        """Milliseconds of one op; of an update, on the copy that owns the stage or on another."""
        if kind == "U" and not owns:
            return self.take_over[stage] if self.take_over else 0.0
        by_kind = {"F": self.f, "I": self.i, "W": self.w, "B": self.b}
        if kind in by_kind:
            return by_kind[kind][stage]
        if kind == "R" and not {(kind, stage), (kind, None)} & self._other_by_key.keys():
            return self.f[stage]
        return self._other_cost(kind, stage)[0]

    def factor(self, kind: str, microbatch: int) -> float:
        """How many times as long as others of its kind an op of a microbatch takes; registered kinds are even."""
        return self.uneven[microbatch] if kind in "FBIWR" and 0 <= microbatch < len(self.uneven) else 1.0

    def memory_change(self, kind: str, stage: int) -> float:
        """What one op adds to (F, R) or takes from (I, W, B) the activations its rank holds.

        F adds the whole activation; where an R of its own adds all but what is kept, F adds only that.
        """
        share = {
            "F": 1.0,
            "I": -self.freed_by_input,
            "W": self.freed_by_input - 1.0,
            "B": -1.0,
            "R": 1.0 - self.kept_by_recompute,
        }
        if kind in share:
            return share[kind] * self.activation[stage]
        return self._other_cost(kind, stage)[1]

    def message_size(self, producer: tuple[str, int], consumer: tuple[str, int]) -> float:
        """Bytes of the message from one op to another, each as (kind, stage). A gradient weighs what it is of.

        Other messages than activations and gradients tell that an op has run and weigh nothing.
        """
        if producer[0] == consumer[0] == "F":
            return self.message_bytes[producer[1]]
        if producer[0] in ("B", "I") and consumer[0] in ("B", "I"):
            return self.message_bytes[consumer[1]]
        if consumer[0] == "U":
            return self.update_bytes[consumer[1]] if self.update_bytes else 0.0
        return 0.0

    def with_other(self, other: Mapping[tuple[str, int], float | tuple[float, float]]) -> Costs:
        """The same costs with those of more registered ops, by (kind, stage)."""
        added = _other(dict(other), self.num_stages)
        kept = tuple(entry for entry in self.other_entries if entry[:2] not in dict(other))
        return replace(self, other=kept + added)

    @property
    def other_entries(self) -> tuple[tuple[str, int | None, float, float], ...]:
        """`other` as (kind, stage or None for all, ms, memory), sorted."""
        return _other(self.other, self.num_stages)

    def _other_cost(self, kind: str, stage: int) -> tuple[float, float]:
        found = self._other_by_key
        return found.get((kind, stage)) or found.get((kind, None), (0.0, 0.0))

    @cached_property
    def _other_by_key(self) -> dict[tuple[str, int | None], tuple[float, float]]:
        return {(kind, stage): (ms, memory) for kind, stage, ms, memory in self.other_entries}


def require_costs(value: object) -> None:
    """Raises CostError for what are no costs."""
    if not isinstance(value, Costs):
        raise CostError(
            f"costs are {type(value).__name__}: give ps.Costs, like ps.Costs.uniform(num_stages=4, f=10, i=10, w=10)"
        )
