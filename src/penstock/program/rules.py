"""Rules for which ready op a rank runs next: FlexPipe's two priorities (Table 2), limits, and the user's functions.

Rules()                                            backward before forward, no limit on microbatches in flight
Rules(max_in_flight=[4, 3, 2, 1])                  1F1B on four ranks
Rules("interleaved", forward=breadth_first(4), backward=depth_first(4), warmup=[10, 8, 6, 4])
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from penstock.engine.list_by_rules import (
    BACKWARD_FIRST,
    BY_MICROBATCH,
    EARLIEST,
    FORWARD_FIRST,
    IN_ORDER,
    INTERLEAVED,
)
from penstock.schedule import Op, ScheduleError
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import refuse_unknown

if TYPE_CHECKING:
    from penstock.program.stepper import View

KINDS = {"backward-first": BACKWARD_FIRST, "forward-first": FORWARD_FIRST, "interleaved": INTERLEAVED}

Check = Callable[["View", Op], bool]
Choose = Callable[["View", tuple[Op, ...]], Op | None]
Limit = float | Sequence[float] | Mapping[int, float] | Callable[["View", Op], float] | None


@dataclass(frozen=True)
class Traversal:
    """In which order a rank goes through the stages that it hosts, for one kind of op.

    Attributes:
        deepest_first: whether it goes from the last stage to the first (depth-first) instead of from the first on.
        interval: how many ops of a stage run before the next stage's turn. None: no such rule.
        strict: whether ops of other stages must wait until the interval of a stage is complete.
        pick: which of the ready ops comes first: the first in this order (IN_ORDER), the one that has been ready
            longest (EARLIEST), or the one of the lowest microbatch (BY_MICROBATCH). The order decides ties.

    Raises:
        ScheduleError: an interval below 1.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.Rules(forward=ps.program.Traversal(deepest_first=True))
        >>> program = ps.Program(ps.placements.v_shape(2), 4, rules)
        >>> program.build().num_ops
        32
    """

    deepest_first: bool = False
    interval: int | None = None
    strict: bool = False
    pick: int = IN_ORDER

    def __post_init__(self) -> None:
        if self.interval is not None and (not isinstance(self.interval, int) or self.interval < 1):
            raise ScheduleError(
                f"a traversal's interval is {self.interval!r}: give at least 1, or None", rule="rules"
            )


def breadth_first(interval: int | None = None, strict: bool = False) -> Traversal:
    """Prefers, of the stages that a rank hosts, those nearer the front of the model.

    Args:
        interval: how many microbatches go through a stage before the next stage's turn. None: all that are ready.
        strict: whether the rank waits for the stage whose turn it is, instead of running another one.

    Returns:
        A traversal for `Rules(forward=...)` and `Rules(backward=...)`.

    Raises:
        ScheduleError: an interval below 1.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.Rules(forward=ps.breadth_first())
        >>> s = ps.Program(ps.placements.circular(2, 4), 4, rules).build()
        >>> " ".join(map(str, s.order[0][:6]))
        '0F0 0F1 0F2 0F3 2F0 2F1'

    References:
        FlexPipe, section 4.2: stage traversal.
    """
    return Traversal(False, interval, strict)


def depth_first(interval: int | None = None, strict: bool = False) -> Traversal:
    """Prefers, of the stages that a rank hosts, those nearer the end of the model.

    Args:
        interval: how many microbatches go through a stage before the next stage's turn. None: all that are ready.
        strict: whether the rank waits for the stage whose turn it is, instead of running another one.

    Returns:
        A traversal for `Rules(forward=...)` and `Rules(backward=...)`.

    Raises:
        ScheduleError: an interval below 1.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.Rules(forward=ps.depth_first())
        >>> s = ps.Program(ps.placements.circular(2, 4), 4, rules).build()
        >>> " ".join(map(str, s.order[0][:6]))
        '0F0 0F1 2F0 2F1 0F2 0F3'

    References:
        FlexPipe, section 4.2: stage traversal.
    """
    return Traversal(True, interval, strict)


def earliest_first(deepest_first: bool = False) -> Traversal:
    """Prefers the op that has been ready longest (first in, first out).

    Args:
        deepest_first: whether ties go to the stage nearest the end of the model, instead of the front.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.Rules(forward=ps.program.earliest_first())
        >>> program = ps.Program(ps.placements.v_shape(2), 4, rules)
        >>> [op.short() for op in program.build().order[0][:3]]
        ['F0', 'F1', 'F2']
    """
    return Traversal(deepest_first, pick=EARLIEST)


def by_microbatch(deepest_first: bool = False) -> Traversal:
    """Prefers the lowest microbatch, of any stage.

    Args:
        deepest_first: whether ties go to the stage nearest the end of the model, instead of the front.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.Rules(forward=ps.program.by_microbatch())
        >>> program = ps.Program(ps.placements.v_shape(2), 4, rules)
        >>> [op.short() for op in program.build().order[0][:3]]
        ['F0', 'F1', 'F2']
    """
    return Traversal(deepest_first, pick=BY_MICROBATCH)


@refuse_unknown(ScheduleError)
@dataclass(frozen=True)
class Rules:
    """How a rank chooses among the ops that are ready.

    Attributes:
        kinds: "backward-first", "forward-first" or "interleaved" (forwards and backwards take turns).
        units: how many forwards, and how many backwards, run in one turn.
        strict: with "interleaved", whether a rank waits for the kind whose turn it is as long as ops of it are left.
        forward, backward: which of a rank's stages goes first: `ps.breadth_first()` (the default),
            `ps.depth_first()`, `ps.program.earliest_first()` or `ps.program.by_microbatch()`. Weight gradients follow
            the rule for backwards.
        warmup: forwards that a rank runs before anything else: one count for all ranks, or one per rank.
        max_in_flight: most forwards that a rank may hold without having run their B (or W). One number, one per rank,
            a mapping from stages to limits of their own, or a function of (view, the F in question). Limits of ranks
            keep room for the rank's deeper stages, so they never cause a deadlock. The other two forms may.
        memory_limit: most memory that a rank may hold, in the unit of the costs' activations: one number, or one per
            rank.
        patience: no W starts within this many milliseconds before an expected forward or backward.
        check: called as `check(view, op)` before an op is chosen. If it returns False, the op must wait.
        choose: called as `choose(view, ready ops)`, with the ops in the order of the rules. It returns one of them,
            or None to idle. It replaces the rules' own choice, warm-ups included. Both `check` and `choose` are
            called again as soon as any op starts or ends.

    Raises:
        ScheduleError: an unknown name, or a number out of range.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.Rules(kinds="backward-first", max_in_flight=2)
        >>> print(ps.Program(ps.placements.one_to_one(2), 3, rules).build())
        schedule program: 2 ranks, 2 stages, 3 microbatches, at most 2 in flight
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 F1 .  B0 F2 B1 .  B2
        rank 1 | .  F0 B0 F1 B1 F2 B2

    References:
        FlexPipe, section 4.2: computation types and stage traversal.
    """

    kinds: str = "backward-first"
    units: tuple[int, int] = (1, 1)
    strict: bool = False
    forward: Traversal = field(default_factory=Traversal)
    backward: Traversal = field(default_factory=Traversal)
    warmup: int | Sequence[int] | None = None
    max_in_flight: Limit = None
    memory_limit: float | Sequence[float] | None = None
    patience: float = 0.0
    check: Check | None = None
    choose: Choose | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.kinds not in KINDS:
            raise ScheduleError(f"kinds {self.kinds!r}: give {', '.join(map(repr, KINDS))}", rule="rules")
        units = self.units if isinstance(self.units, tuple | list) else ()
        if len(units) != 2 or any(not isinstance(u, int) or u < 1 for u in units):
            raise ScheduleError(
                f"units {self.units!r}: give how many forwards and how many backwards run at one go, each at least 1",
                rule="rules",
            )
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), Traversal):
                raise ScheduleError(
                    f"{name} is {getattr(self, name)!r}: give ps.breadth_first(), ps.depth_first(), "
                    "ps.program.earliest_first() or ps.program.by_microbatch()",
                    rule="rules",
                )
        if not isinstance(self.patience, Real) or not 0 <= self.patience < math.inf:
            raise ScheduleError(f"patience is {self.patience}: give milliseconds of at least 0", rule="rules")
        for name in ("check", "choose"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ScheduleError(f"{name} is {function!r}: give a function", rule="rules")

    @property
    def has_functions(self) -> bool:
        """Whether some rule is a function of the user's."""
        return self.check is not None or self.choose is not None or callable(self.max_in_flight)

    def check_stages(self, num_stages: int) -> None:
        """Raises ScheduleError if a limit names a stage that does not exist, or is below one forward."""
        if not isinstance(self.max_in_flight, Mapping):
            return
        for stage, limit in self.max_in_flight.items():
            if not (isinstance(stage, Integral) and 0 <= int(stage) < num_stages):
                raise ScheduleError(
                    f"max_in_flight names stage {stage!r}; stages go from 0 to {num_stages - 1}", rule="rules"
                )
            if isinstance(limit, bool) or not isinstance(limit, Real) or not float(limit) >= 1:
                raise ScheduleError(
                    f"max_in_flight of stage {stage} is {limit!r}: a stage must be let hold at least 1", rule="rules"
                )

    def warmup_of(self, rank: int, num_ranks: int) -> int:
        """Forwards that `rank` runs before anything else."""
        found = _of_rank("warmup", self.warmup, rank, num_ranks, 0)
        if found != math.inf and found != int(found):
            raise ScheduleError(f"warmup of rank {rank} is {found}: give a whole number", rule="rules")
        return int(min(found, sys.maxsize))

    def cap_of(self, rank: int, num_ranks: int) -> float:
        """Most forwards in flight on `rank`; infinite if the limit is one of stages or a function."""
        if callable(self.max_in_flight) or isinstance(self.max_in_flight, Mapping):
            return math.inf
        return _of_rank("max_in_flight", self.max_in_flight, rank, num_ranks, math.inf)

    def cap_of_stage(self, stage: int) -> float:
        """Most forwards of `stage` in flight."""
        if not isinstance(self.max_in_flight, Mapping):
            return math.inf
        return float(self.max_in_flight.get(stage, math.inf))

    def memory_of(self, rank: int, num_ranks: int) -> float:
        """Most memory that `rank` may hold."""
        return _of_rank("memory_limit", self.memory_limit, rank, num_ranks, math.inf)


def _of_rank(name: str, value: Any, rank: int, num_ranks: int, otherwise: float) -> float:
    if value is None:
        return otherwise
    entry = value
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        entries = list(value)
        if len(entries) != num_ranks:
            raise ScheduleError(
                f"{name} has {len(entries)} entries; give one per rank, {num_ranks} in all", rule="rules"
            )
        entry = entries[rank]
    if isinstance(entry, bool) or not isinstance(entry, Real):
        raise ScheduleError(f"{name} is {reprlib.repr(value)}: give one number, or one per rank", rule="rules")
    if not float(entry) >= 0:
        raise ScheduleError(f"{name} of rank {rank} is {entry}: give at least 0", rule="rules")
    return float(entry)


def of_one_rank(rules: Rules, place: int, num_ranks: int, first_stage: int, num_stages: int) -> Rules:
    """The rules of a branch for its rank number `place`, with stages numbered over the whole model."""
    changes: dict[str, Any] = {}
    for name in ("warmup", "max_in_flight", "memory_limit"):
        value = getattr(rules, name)
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
            entries = list(value)
            if len(entries) != num_ranks:
                raise ScheduleError(
                    f"{name} has {len(entries)} entries; give one per rank of the branch, {num_ranks} in all",
                    rule="rules",
                )
            changes[name] = entries[place]
    if isinstance(rules.max_in_flight, Mapping):
        rules.check_stages(num_stages)
        changes["max_in_flight"] = {first_stage + stage: cap for stage, cap in rules.max_in_flight.items()}
    return replace(rules, **changes) if changes else rules


def joined_rules(some: Rules, more: Rules) -> Rules:
    """The first rules, with the second's limits of stages added."""
    if isinstance(some.max_in_flight, Mapping) and isinstance(more.max_in_flight, Mapping):
        return replace(some, max_in_flight={**some.max_in_flight, **more.max_in_flight})
    return some
